"""Multispectral images: .npy files of numbers[height, width, channels], and their values.

Pickled objects are never loaded, and the pixels of a .npy file are a view of its bytes.
"""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"\x93NUMPY"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Bands(NamedTuple):
    """A multispectral image of which only the header is read."""

    size: tuple[int, int]
    """Width and height, upright."""
    channels: int
    dtype: np.dtype[Any]
    values: Callable[[], NDArray[Any]]
    """Reads [height, width, channels]; almost any error if it is damaged."""


def open_array(content: bytes) -> Bands:
    """The image of a .npy file; [height, width] has one band. ValueError if it is no image."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of .npy, which only structured arrays need")
    shape, is_fortran, dtype = _HEADERS[version](file)
    if dtype.kind not in "uif":
        raise ValueError(f"an array of {dtype}: store integers or floats")
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"an array of shape {list(shape)}: store [height, width, channels]")
    start, (height, width, count) = file.tell(), (*shape, 1)[:3]

    def values() -> NDArray[Any]:
        size = height * width * count * dtype.itemsize
        if len(content) != start + size:
            raise ValueError(f"{len(content) - start:,} bytes of pixels instead of {size:,}")
        pixels = np.frombuffer(content, dtype, offset=start)
        return pixels.reshape((height, width, count), order="F" if is_fortran else "C")

    return Bands((width, height), count, dtype, values)


def array_file(pixels_HWC: NDArray[Any]) -> bytes:
    """The .npy file of an array."""
    file = io.BytesIO()
    np.save(file, pixels_HWC, allow_pickle=False)
    return file.getvalue()
