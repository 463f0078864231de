"""Packed records: a JPEG's coefficients, or pixels, in a layout that needs no entropy decoding.

`packed/packed.h` describes the layout. Only the C extension makes records from JPEGs. The plain
Python here makes records of pixels, and reads both kinds, slowly, as a reference.
"""

import io
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import own_decoder
from trainyard.data.decode.jpeg_scan import Coefficients, Frame, read_frame, write_scan
from trainyard.data.storage.encoded import PACKED_MAGIC

_VERSION = 1
_COEFFICIENTS, _PIXELS = 1, 2
_HEADER = struct.Struct("<8sHBBIIIIIQ24x")  # 64 bytes
_MARGIN = 64  # bytes: zeros at the end
_BLOCK = 10  # bytes of a block besides its values
_MAX_SIDE = 65_535


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
    return len(record) > 10 and record[10] == _PIXELS


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
    """The original JPEG of a record of coefficients. ValueError if the record is damaged."""
    decoder = own_decoder()
    jpeg = plain_jpeg_of(record) if decoder is None else decoder.unpack(record)
    if jpeg is None:
        raise ValueError("a damaged packed record")
    return jpeg


def jpeg_head(record: bytes) -> bytes:
    """The segments before the scan of a record's JPEG; empty for a record of pixels.

    ValueError if the record is damaged.
    """
    if has_pixels(record):
        return b""
    return record[_HEADER.size :][: _read_header(record, _COEFFICIENTS).head_size]


def pixels_of(record: bytes) -> NDArray[np.uint8]:
    """RGB pixels (height, width, 3). ValueError if the record is damaged or holds no pixels."""
    header = _read_header(record, _PIXELS)
    shape = 3, header.height, header.width
    if len(record) < _HEADER.size + shape[0] * shape[1] * shape[2] + _MARGIN:
        raise ValueError("a packed record that is cut short")
    planes = np.frombuffer(record, np.uint8, 3 * header.height * header.width, _HEADER.size)
    return np.ascontiguousarray(planes.reshape(shape).transpose(1, 2, 0))


def record_of_pixels(pixels_HWC: NDArray[np.uint8]) -> bytes:
    """A record of RGB pixels. ValueError for a side of more than 65,535 pixels."""
    height, width, _ = pixels_HWC.shape
    if not 0 < max(width, height) <= _MAX_SIDE:
        raise ValueError(f"{width} x {height} pixels do not fit into a packed record")
    planes = np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1)).tobytes()
    size = _HEADER.size + len(planes) + -len(planes) % 64 + _MARGIN
    head = _HEADER.pack(PACKED_MAGIC, _VERSION, _PIXELS, 1, width, height, 0, 0, 0, size)
    return (head + planes).ljust(size, b"\0")


# --- coefficients, in Python ---


def plain_jpeg_of(record: bytes) -> bytes:
    """`jpeg_of` without the extension."""
    header = _read_header(record, _COEFFICIENTS)
    tail = _HEADER.size + header.head_size
    head, frame, planes = _read_coefficients(record, header)
    try:
        scan = write_scan(frame, planes, header.fill)
    except (IndexError, KeyError) as error:
        raise ValueError(f"a damaged packed record ({error})") from None
    return head + scan + record[tail : tail + header.tail_size]


def coefficients_of(record: bytes) -> list[Coefficients]:
    """Each component's coefficients, not dequantised. ValueError for a damaged or other record."""
    return _read_coefficients(record, _read_header(record, _COEFFICIENTS))[2]


def _read_header(record: bytes, kind: int) -> _Header:
    if len(record) < _HEADER.size + _MARGIN or not is_record(record):
        raise ValueError("no packed record, or one that is cut short")
    header = _Header(*_HEADER.unpack_from(record))
    if header.version != _VERSION:
        raise ValueError(
            f"a packed record of version {header.version}; this version of Trainyard reads "
            f"{_VERSION}"
        )
    if header.kind != kind:
        raise ValueError(f"a packed record of kind {header.kind} where {kind} was expected")
    if header.size != len(record):
        raise ValueError(f"a packed record of {len(record)} bytes instead of {header.size}")
    return header


def _read_coefficients(record: bytes, header: _Header) -> tuple[bytes, Frame, list[Coefficients]]:
    """The JPEG's header in bytes and parsed, and the coefficients of each component."""
    start = _HEADER.size
    try:
        head = record[start : start + header.head_size]
        frame = read_frame(head)
        down, across = frame.mcus
        table = start + header.head_size + header.tail_size
        table += -table % 4
        rows = sum(component.v for component in frame.components) * down
        if rows != header.num_rows:
            raise ValueError("its number of rows is wrong")
        if (frame.width, frame.height) != (header.width, header.height):
            raise ValueError("its header and its JPEG differ in size")
        begins = np.frombuffer(record, "<u4", rows + 1, table).tolist()
        planes: list[list[NDArray[np.int16]]] = [[] for _ in frame.components]
        row = 0
        for _ in range(down):
            for plane, component in zip(planes, frame.components, strict=True):
                for _ in range(component.v):
                    part = record[begins[row] : begins[row + 1]]
                    plane.append(_read_row(part, across * component.h))
                    row += 1
        return head, frame, [np.stack(plane) for plane in planes]
    except (IndexError, KeyError, struct.error, ValueError) as error:
        raise ValueError(f"a damaged packed record ({error})") from None


def _read_row(row: bytes, count: int) -> NDArray[np.int16]:
    """int16[count, 64]: the coefficients of a row of blocks."""
    masks = np.frombuffer(row, np.uint8, 8 * count).reshape(count, 8)
    first = np.frombuffer(row, "<i2", count, 8 * count)
    stored = np.frombuffer(row, np.uint8, offset=_BLOCK * count).astype(np.int64)
    is_set = np.unpackbits(masks, axis=1, bitorder="little").astype(bool)
    is_wide = is_set[:, 0].copy()
    is_set[:, 0] = False
    counts = is_set.sum(axis=1)
    begins = np.concatenate([[0], np.cumsum(counts << is_wide)])
    if begins[-1] > len(stored):
        raise ValueError("a row has more values than bytes")
    block, place = np.nonzero(is_set)
    rank = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = begins[block] + rank
    low = stored[at]
    high = stored[np.where(is_wide[block], at + counts[block], at)]
    values = np.where(is_wide[block], high << 8 | low, low.astype(np.uint8).astype(np.int8))
    blocks = np.zeros((count, 64), np.int16)
    blocks[block, place] = values.astype(np.uint16).astype(np.int16)
    blocks[:, 0] = first
    return blocks
