"""Multispectral images: .npy files of numbers[height, width, channels], and TIFFs of many bands.

Pickled objects are never loaded, and the pixels of a .npy file are a view of its bytes.
"""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.decode.tiff_file import is_picture, is_tiff, tiff_pixels, tiff_shape

MAGIC = b"\x93NUMPY"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def is_array(content: bytes, *, bands: bool = False) -> bool:
    """True for a .npy file, and for a TIFF that Pillow does not open; with `bands` for any TIFF."""
    if not is_tiff(content):
        return content.startswith(MAGIC)
    return bands or not is_picture(content)


def array_shape(content: bytes) -> tuple[int, int, int]:
    """Height, width and channels of an array; [height, width] has one.

    ValueError if it is no image; almost any error for a damaged TIFF, and without tifffile.
    """
    if is_tiff(content):
        return tiff_shape(content)
    return _header(content)[0]


def pixels_of_array(content: bytes) -> NDArray[Any]:
    """The pixels, [height, width, channels], read-only; errors as of array_shape."""
    if is_tiff(content):
        return tiff_pixels(content)
    shape, is_fortran, dtype, start = _header(content)
    count = shape[0] * shape[1] * shape[2]
    size = count * dtype.itemsize
    if len(content) != start + size:
        raise ValueError(f"{len(content) - start:,} bytes of pixels instead of {size:,}")
    pixels = np.frombuffer(content, dtype, count, start)
    return pixels.reshape(shape, order="F" if is_fortran else "C")


def array_file(pixels_HWC: NDArray[Any]) -> bytes:
    """The .npy file of an array."""
    file = io.BytesIO()
    np.save(file, pixels_HWC, allow_pickle=False)
    return file.getvalue()


def _header(content: bytes) -> tuple[tuple[int, int, int], bool, np.dtype[Any], int]:
    """The shape, whether it is in Fortran's order, the type, and the offset of the pixels."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of .npy, which only structured arrays need")
    shape, is_fortran, dtype = _HEADERS[version](file)
    if dtype.kind not in "uif":
        raise ValueError(f"an array of {dtype}: store integers or floats")
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"an array of shape {list(shape)}: store [height, width, channels]")
    height, width = shape[:2]
    channels = shape[2] if len(shape) == 3 else 1
    return (height, width, channels), is_fortran, dtype, file.tell()
