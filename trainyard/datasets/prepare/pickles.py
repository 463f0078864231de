"""Reads pickles of arrays, numbers and texts without running anything that they name.

A pickle names functions, and Python's own reader calls them. Here the few names that NumPy writes
stand for records of their arguments, every other name is an error, and arrays are made of records
at the end.
"""

import io
import pickle
from pickletools import genops
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {
    (module, name)
    for core in ("numpy.core", "numpy._core")
    for module, name in ((f"{core}.multiarray", "_reconstruct"), (f"{core}.numeric", "_frombuffer"))
} | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
_MAX_TUPLES = 1000  # the hash of a million, one in another, ends Python; an array has a few
_BYTES = ("u1", "|u1", "uint8", "B")


class _Made:
    """A record of the arguments and the state of something in a pickle."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Name:
    """A name in a pickle, which records calls of it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "encode":  # bytes, in a pickle of Python 3 for Python 2
            text, codec = arguments
            if codec != "latin1" or not isinstance(text, str):
                raise ValueError(f"a text in {codec!r}")
            return text.encode("latin1")
        return _Made(self.name, arguments)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise ValueError(f"it names {module}.{name}, which is not run")
        return _Name(name)


def read_pickle(content: bytes) -> dict[str, Any]:
    """The dict in a pickle, with texts for keys; arrays must be uint8, and bytes stay.

    ValueError with the reason for any other pickle.
    """
    try:
        if sum(code.name.startswith("TUPLE") for code, _, _ in genops(content)) > _MAX_TUPLES:
            raise ValueError("too many tuples")
        values = _Reader(io.BytesIO(content), encoding="bytes").load()
        return {_text(key): _plain(value) for key, value in values.items()}
    except Exception as error:  # a damaged pickle raises almost any
        raise ValueError(str(error) or type(error).__name__) from None


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


def _plain(value: Any) -> Any:
    return _array(value) if isinstance(value, _Made) else value


def _array(made: _Made) -> NDArray[np.uint8]:
    if made.name == "_frombuffer":
        content, kind, shape, order = made.arguments
    else:
        _, shape, kind, is_fortran, content = made.state
        order = "F" if is_fortran else "C"
    if not isinstance(kind, _Made) or _text(kind.arguments[0]) not in _BYTES:
        raise ValueError("an array of other values than uint8")
    return np.frombuffer(content, np.uint8).reshape(shape, order=order)
