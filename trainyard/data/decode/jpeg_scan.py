"""Encodes coefficients as the scan of a baseline JPEG (ITU-T T.81, annex F.1.2), with numpy.

It turns a packed record into a JPEG where the C extension is missing, and is the reference that
the extension is tested against. It takes some tens of milliseconds an image.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Coefficients = NDArray[np.int16]
"""int16[rows of blocks, blocks across, 64] of one component, not dequantised, in natural order."""

# Position in natural order of each coefficient in zigzag order.
ZIGZAG = np.array(
    sorted(range(64), key=lambda k: (sum(divmod(k, 8)), k if sum(divmod(k, 8)) % 2 else -k))
)
_ZERO_RUN, _END = 0xF0, 0x00  # symbols: 16 zeros; only zeros to the end


Codes = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Code and length by symbol; a symbol without a code has length 0."""


class Component(NamedTuple):
    h: int  # sampling factors
    v: int
    dc: int  # numbers of the component's tables
    ac: int


class Frame(NamedTuple):
    """The parameters of a scan, from the header of a JPEG."""

    width: int
    height: int
    components: tuple[Component, ...]
    restart_interval: int  # MCUs; 0: none
    codes: dict[int, Codes]
    """Codes by table number; AC tables count from 16."""

    @property
    def mcus(self) -> tuple[int, int]:
        """Number of MCUs, down and across."""
        h = max(component.h for component in self.components)
        v = max(component.v for component in self.components)
        return -(-self.height // (8 * v)), -(-self.width // (8 * h))


def read_frame(head: bytes) -> Frame:
    """Reads a header up to its scan. ValueError if it is not of a baseline JPEG."""
    position, interval, frame = 2, 0, b""
    codes: dict[int, Codes] = {}
    while True:
        if head[position : position + 1] != b"\xff":
            raise ValueError("no JPEG header")
        marker = head[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        (length,) = struct.unpack_from(">H", head, position + 2)
        segment = head[position + 4 : position + 2 + length]
        position += 2 + length
        match marker:
            case 0xC0 | 0xC1:
                frame = segment
            case 0xC4:
                codes |= _read_codes(segment)
            case 0xDD:
                (interval,) = struct.unpack_from(">H", segment)
            case 0xDA:
                return _frame(frame, segment, interval, codes)


def _frame(frame: bytes, scan: bytes, interval: int, codes: dict[int, Codes]) -> Frame:
    _, height, width, count = struct.unpack_from(">BHHB", frame)
    components = []
    for number in range(count):
        factors, tables = frame[7 + 3 * number], scan[2 + 2 * number]
        # A single component is not interleaved, so its sampling factors are ignored.
        h, v = divmod(factors, 16) if count > 1 else (1, 1)
        components.append(Component(h, v, tables >> 4, tables & 15))
    return Frame(width, height, tuple(components), interval, codes)


def _read_codes(segment: bytes) -> dict[int, Codes]:
    found = {}
    while segment:
        counts = segment[1:17]
        symbols = segment[17 : 17 + sum(counts)]
        table = np.zeros(256, np.int64), np.zeros(256, np.int64)
        code = number = 0
        for length, count in enumerate(counts, 1):
            for symbol in symbols[number : number + count]:
                table[0][symbol], table[1][symbol] = code, length
                code += 1
            number += count
            code *= 2
        found[segment[0]] = table
        segment = segment[17 + sum(counts) :]
    return found


# --- blocks to symbols ---


class _Symbols(NamedTuple):
    """Symbols, each with the value that follows it; one row per symbol."""

    block: NDArray[np.int64]
    place: NDArray[np.int64]  # zigzag position in the block; 64 for the end
    symbol: NDArray[np.int64]
    value: NDArray[np.int64]
    size: NDArray[np.int64]  # bits of the value


def write_scan(frame: Frame, planes: Sequence[Coefficients], fill: int) -> bytes:
    """The entropy-coded bytes; `fill` is the bit that completes the last byte of an interval.

    ValueError if a coefficient has no code in the tables.
    """
    down, across = frame.mcus
    parts = []
    for component, plane in zip(frame.components, planes, strict=True):
        v, h = component.v, component.h
        split = plane[:, :, ZIGZAG].reshape(down, v, across, h, 64)
        parts.append(split.transpose(0, 2, 1, 3, 4).reshape(down * across, v * h, 64))
    blocks = np.concatenate(parts, axis=1).astype(np.int64)
    of_block = np.repeat(np.arange(len(parts)), [part.shape[1] for part in parts])
    interval = frame.restart_interval or len(blocks)
    for number in range(len(parts)):
        _subtract_before(blocks[:, of_block == number, 0], blocks, of_block == number, interval)
    rows = _in_order(blocks.reshape(-1, 64))
    code, length = _codes_of(frame, rows, of_block[rows.block % len(of_block)])
    bits = (code << rows.size) | (rows.value & ((1 << rows.size) - 1))
    ends = np.cumsum(length + rows.size)
    stream = _bits(bits, length + rows.size, ends)
    blocks_per_interval = interval * len(of_block)
    last = np.arange(blocks_per_interval, len(blocks) * len(of_block), blocks_per_interval)
    cuts = ends[np.searchsorted(rows.block, last) - 1]
    return _joined(np.split(stream, cuts), fill)


def _subtract_before(
    first: NDArray[np.int64], blocks: NDArray[np.int64], which: NDArray[np.bool_], interval: int
) -> None:
    """Replaces a component's first coefficients by differences to the preceding blocks."""
    line = first.reshape(-1)
    before = np.concatenate([[0], line[:-1]])
    before[:: interval * first.shape[1]] = 0
    blocks[:, which, 0] = (line - before).reshape(first.shape)


def _in_order(blocks: NDArray[np.int64]) -> _Symbols:
    """The symbols of blocks whose first coefficients are differences."""
    count = len(blocks)
    every = np.arange(count)
    difference = blocks[:, 0]
    size = _bit_length(difference)
    first = _Symbols(every, np.zeros(count, np.int64), size, _as_bits(difference), size)
    block, place = np.nonzero(blocks[:, 1:])
    place = place + 1
    value = blocks[block, place]
    before = np.concatenate([[0], place[:-1]])
    before[np.concatenate([[True], block[1:] != block[:-1]])[: len(block)]] = 0
    run, size = place - before[: len(place)] - 1, _bit_length(value)
    rest = _Symbols(block, place, (run % 16) * 16 + size, _as_bits(value), size)
    repeat = np.repeat(np.arange(len(run)), run // 16)
    zeros = np.zeros(len(repeat), np.int64)
    runs = _Symbols(block[repeat], place[repeat], zeros + _ZERO_RUN, zeros, zeros)
    ended = np.flatnonzero(blocks[:, 63] == 0)
    zeros = np.zeros(len(ended), np.int64)
    end = _Symbols(ended, zeros + 64, zeros + _END, zeros, zeros)
    # Runs of zeros come before the value that follows them.
    rows = [np.concatenate(column) for column in zip(first, runs, rest, end, strict=True)]
    order = np.argsort(rows[0] * 65 + rows[1], kind="stable")
    return _Symbols(*(column[order] for column in rows))


def _bit_length(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.frexp(np.abs(values))[1].astype(np.int64)


def _as_bits(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return values - (values < 0)


def _codes_of(
    frame: Frame, rows: _Symbols, component: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    code, length = np.zeros_like(rows.symbol), np.zeros_like(rows.symbol)
    for number, about in enumerate(frame.components):
        for is_first, table in ((True, about.dc), (False, 16 + about.ac)):
            which = (component == number) & ((rows.place == 0) == is_first)
            codes, lengths = frame.codes[table]
            code[which], length[which] = codes[rows.symbol[which]], lengths[rows.symbol[which]]
    if not length.all():
        raise ValueError("a coefficient has no code in the tables")
    return code, length


# --- symbols to bytes ---


def _bits(
    values: NDArray[np.int64], lengths: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """The bits of values end to end, one byte per bit."""
    from_end = np.repeat(ends, lengths) - np.arange(ends[-1]) - 1
    return (np.repeat(values, lengths) >> from_end & 1).astype(np.uint8)


def _joined(intervals: Sequence[NDArray[np.uint8]], fill: int) -> bytes:
    """The intervals as bytes, with restart markers between them."""
    out = bytearray()
    for number, bits in enumerate(intervals):
        if number:
            out += bytes((0xFF, 0xD0 + (number - 1) % 8))
        padded = np.pad(bits, (0, -len(bits) % 8), constant_values=fill)
        out += np.packbits(padded).tobytes().replace(b"\xff", b"\xff\0")
    return bytes(out)
