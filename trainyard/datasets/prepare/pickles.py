"""Reads pickles of arrays, numbers and texts without running anything that they name."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.pickle_records import Record, read_records

_BYTES = ("u1", "|u1", "uint8", "B")


def read_pickle(content: bytes) -> dict[str, Any]:
    """The dict in a pickle, with texts for keys; arrays must be uint8, and bytes stay.

    ValueError with the reason for any other pickle.
    """
    try:
        values = read_records(content, encoding="bytes")
        return {_text(key): _plain(value) for key, value in values.items()}
    except Exception as error:  # a damaged pickle raises almost any
        raise ValueError(str(error) or type(error).__name__) from None


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


def _plain(value: Any) -> Any:
    return _array(value) if isinstance(value, Record) else value


def _array(made: Record) -> NDArray[np.uint8]:
    module, _, name = made.name.rpartition(".")
    if name == "_frombuffer":
        content, kind, shape, order = made.arguments
    elif name == "_reconstruct" and module.startswith("numpy."):
        _, shape, kind, is_fortran, content = made.state
        order = "F" if is_fortran else "C"
    else:
        raise ValueError(f"it names {made.name}, which is not run")
    if not isinstance(kind, Record) or _text(kind.arguments[0]) not in _BYTES:
        raise ValueError("an array of other values than uint8")
    return np.frombuffer(content, np.uint8).reshape(shape, order=order)
