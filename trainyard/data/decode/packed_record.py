"""Packed records: a JPEG's coefficients, or pixels, in a layout that needs no entropy decoding.

`packed/packed.h` describes the layout. Coefficients are written and read by the C extension alone;
pixels also here.
"""

import io
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import own_decoder
from trainyard.data.storage.encoded import PACKED_MAGIC
from trainyard.errors import DataError
from trainyard.installation import NEEDS_EXTENSION

_VERSION = 1
_COEFFICIENTS, _RGB, _GREY = 1, 2, 3
_HEADER = struct.Struct("<8sHBBIIIIIQ24x")  # 64 bytes
_MARGIN = 64  # bytes: zeros at the end
MAX_SIDE = 65_535  # pixels


class _Header(NamedTuple):
    magic: bytes
    version: int
    kind: int
    fill: int
    width: int
    height: int
    head_size: int
    tail_size: int
    num_rows: int
    size: int


def is_record(content: bytes) -> bool:
    """True if bytes begin like a packed record."""
    return content.startswith(PACKED_MAGIC)


def has_pixels(record: bytes) -> bool:
    """True if a record holds pixels, not coefficients."""
    return len(record) > 10 and record[10] in (_RGB, _GREY)


def image_file(content: bytes) -> bytes:
    """The image file of a record: a JPEG, or a PNG of pixels; other contents are not changed.

    ValueError if the record is damaged.
    """
    if not is_record(content):
        return content
    if not has_pixels(content):
        return jpeg_of(content)
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels_of(content)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def jpeg_of(record: bytes) -> bytes:
    """The original JPEG of a record of coefficients. ValueError if the record is damaged.

    DataError without the extension.
    """
    decoder = own_decoder()
    if decoder is None:
        raise DataError(
            "data.needs-c-extension", name="reading packed coefficients", hint=NEEDS_EXTENSION
        )
    jpeg = decoder.unpack(record)
    if jpeg is None:
        raise ValueError("a damaged packed record")
    return jpeg


def jpeg_head(record: bytes) -> bytes:
    """The segments before the scan of a record's JPEG; empty for a record of pixels.

    ValueError if the record is damaged.
    """
    if has_pixels(record):
        return b""
    return record[_HEADER.size :][: _read_header(record).head_size]


def pixels_of(record: bytes) -> NDArray[np.uint8]:
    """RGB pixels (height, width, 3), or grey ones (height, width).

    ValueError if the record is damaged or holds no pixels.
    """
    header = _read_header(record)
    if header.kind not in (_RGB, _GREY):
        raise ValueError(f"a packed record of kind {header.kind}, which is not one of pixels")
    plane = header.height * header.width
    count = plane if header.kind == _GREY else 3 * plane
    if len(record) < _HEADER.size + count + _MARGIN:
        raise ValueError("a packed record that is cut short")
    planes = np.frombuffer(record, np.uint8, count, _HEADER.size)
    if header.kind == _GREY:
        return planes.reshape(header.height, header.width)
    return np.ascontiguousarray(planes.reshape(3, header.height, header.width).transpose(1, 2, 0))


def record_of_pixels(pixels: NDArray[np.uint8]) -> bytes:
    """A record of RGB pixels (height, width, 3), or of grey ones (height, width).

    ValueError for a side of more than 65,535 pixels.
    """
    height, width = pixels.shape[:2]
    if not 0 < max(width, height) <= MAX_SIDE:
        raise ValueError(f"{width} x {height} pixels do not fit into a packed record")
    is_grey = pixels.ndim == 2
    planes = (pixels if is_grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))).tobytes()
    size = _HEADER.size + len(planes) + -len(planes) % 64 + _MARGIN
    kind = _GREY if is_grey else _RGB
    head = _HEADER.pack(PACKED_MAGIC, _VERSION, kind, 1, width, height, 0, 0, 0, size)
    return (head + planes).ljust(size, b"\0")


def _read_header(record: bytes) -> _Header:
    if len(record) < _HEADER.size + _MARGIN or not is_record(record):
        raise ValueError("no packed record, or one that is cut short")
    header = _Header(*_HEADER.unpack_from(record))
    if header.version != _VERSION:
        raise ValueError(
            f"a packed record of version {header.version}; this version of Trainyard reads "
            f"{_VERSION}"
        )
    if header.size != len(record):
        raise ValueError(f"a packed record of {len(record)} bytes instead of {header.size}")
    return header
