"""Finds the values of a Parquet column of bytes in the pages of its file.

A column of a row group is a chain of pages, each after a header. A page holds levels, which tell
null from not null, then the values: each with its length before it, or as its number in the
dictionary page, whose values lie the same way. (github.com/apache/parquet-format)

ValueError for damage, NotByOffset if the values do not lie in the file as they are, NullValue for a
row without one.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.example import BufferedReader
from trainyard.data.storage.snappy import SnappySpan, SnappyStream, unpacked, varint

Struct = dict[int, Any]
"""The fields by their numbers; a struct in it is another. Lists and maps are not supported."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_INTEGERS = (4, 5, 6)
_DEEPEST = 8


def read_struct(content: bytes, at: int = 0, depth: int = 0) -> tuple[Struct, int]:
    """A struct that begins at byte `at`, and the byte after it. ValueError if it is damaged."""
    fields: Struct = {}
    number = 0
    if depth > _DEEPEST:
        raise ValueError("a damaged header")
    try:
        while head := content[at]:
            at += 1
            kind = head & 15
            if head >> 4:
                number += head >> 4
            else:
                number, at = _integer(content, at)
            fields[number], at = _value(content, at, kind, depth)
    except IndexError:
        raise ValueError("a header that is cut short") from None
    return fields, at + 1


def _integer(content: bytes, at: int) -> tuple[int, int]:
    value, at = varint(content, at)
    return value >> 1 ^ -(value & 1), at


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in _INTEGERS:
        return _integer(content, at)
    if kind == _BYTE:
        return content[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        length, at = varint(content, at)
        return content[at : at + length], at + length
    if kind == _STRUCT:
        return read_struct(content, at, depth + 1)
    raise ValueError("a damaged header")


_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}  # the field of a header for each kind of page
_HEADER = 1 << 16  # bytes; statistics may make a header long
_LENGTH = 4  # bytes before each value
_MOST_VALUES = 1 << 24  # of a page; more means damage

Decompress = Callable[[bytes, int], bytes]
"""From the data of a page and its size, once decompressed, to the decompressed data."""


class NotByOffset(ValueError):
    """Values do not lie in the file as they are; the text says why."""


class NullValue(ValueError):
    """A row has no value."""

    def __init__(self, row: int) -> None:
        """`row`: counted from the page's first."""
        super().__init__("a row has no value")
        self.row = row


class Column(NamedTuple):
    """A column of one row group, as the footer describes it."""

    start: int  # byte of the first page
    size: int  # bytes of all pages
    rows: int
    codec: str
    most_level: int
    """The level of a value that is not null; 0 for a column without nulls."""


class _Page(NamedTuple):
    kind: int
    head: Struct  # of its kind
    begin: int  # byte after the header
    end: int
    size: int  # bytes, once decompressed


class _Chunk(NamedTuple):
    file: BufferedReader
    column: Column
    decompress: Decompress


def find_values(
    file: BufferedReader, column: Column, decompress: Decompress
) -> Iterator[list[SnappySpan]]:
    """The spans of the values, a page at a time, with offsets in the file; one for each row."""
    if column.codec not in ("UNCOMPRESSED", "SNAPPY"):
        raise NotByOffset(f"they are compressed by {column.codec}")
    at, left = column.start, column.rows
    if at < 0 or column.size < 0 or at + column.size > file.size:
        raise ValueError("its pages lie outside of it")
    chunk = _Chunk(file, column, decompress)
    dictionary: list[SnappySpan] | None = None
    while left > 0:
        page = _page(file, at, column.start + column.size)
        if page.kind == _DICTIONARY:
            dictionary = _plain_values(_body(chunk, page, 0), 0, _count(page))
        elif page.kind in _HEADS:
            found = _values(chunk, page, dictionary)
            left -= len(found)
            yield found
        at = page.end
    if left < 0:
        raise ValueError("a column has more values than rows")


def _page(file: BufferedReader, at: int, end: int) -> _Page:
    if at >= end:
        raise ValueError("a column has fewer values than rows")
    header, length = read_struct(file.read(at, min(_HEADER, end - at)))
    kind, size, stored = (_number(header, field) for field in (1, 2, 3))
    if at + length + stored > end:
        raise ValueError("a page reaches past its column")
    head = header.get(_HEADS.get(kind, -1), {})
    if not isinstance(head, dict):
        raise ValueError("a damaged page header")
    return _Page(kind, head, at + length, at + length + stored, size)


def _number(header: Struct, field: int) -> int:
    value = header.get(field)
    if not isinstance(value, int) or value < 0:
        raise ValueError("a damaged page header")
    return value


def _count(page: _Page) -> int:
    count = _number(page.head, 1)
    if count > _MOST_VALUES:
        raise ValueError("a page has an impossible number of values")
    return count


# --- the data of a page, decompressed ---


class _Stored:
    def __init__(self, file: BufferedReader, begin: int, end: int) -> None:
        self._file, self._begin, self.size = file, begin, end - begin

    def read(self, at: int, size: int) -> bytes:
        return self._file.read(self._begin + at, size)

    def span(self, at: int, size: int) -> SnappySpan:
        """The place of these bytes in the file."""
        return SnappySpan(self._begin + at, size, 0, 0)


class _Compressed:
    """Snappy data; every span is compared with what the library decompresses."""

    def __init__(self, stored: bytes, begin: int, size: int, decompress: Decompress) -> None:
        self._stored, self._begin, self.size = stored, begin, size
        self._content = memoryview(decompress(stored, size))
        self._stream = SnappyStream(stored)

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._content[at : at + size])

    def span(self, at: int, size: int) -> SnappySpan:
        if not size:
            return SnappySpan(self._begin, 0, 0, 0)
        found = self._stream.span(at, size)
        stored = self._stored[found.offset : found.offset + found.size]
        if unpacked(stored, found.start, found.length) != self._content[at : at + size]:
            raise ValueError("its Snappy data is damaged")
        return found._replace(offset=self._begin + found.offset)


_Body = _Stored | _Compressed


def _body(chunk: _Chunk, page: _Page, skip: int) -> _Body:
    """The data of a page after `skip` bytes that are never compressed."""
    begin, size = page.begin + skip, page.size - skip
    is_compressed = page.kind != _DATA_V2 or page.head.get(7, True)
    if begin > page.end or size < 0:
        raise ValueError("the levels of a page reach past it")
    if chunk.column.codec == "UNCOMPRESSED" or not is_compressed:
        return _Stored(chunk.file, begin, page.end)
    if begin == page.end:
        return _Stored(chunk.file, begin, begin)
    stored = chunk.file.read(begin, page.end - begin)
    return _Compressed(stored, begin, size, chunk.decompress)


# --- values ---


def _values(chunk: _Chunk, page: _Page, dictionary: list[SnappySpan] | None) -> list[SnappySpan]:
    body, at, levels = _body_and_levels(chunk, page)
    most = chunk.column.most_level
    count, encoding = _count(page), _number(page.head, 4 if page.kind == _DATA_V2 else 2)
    if most:
        present = _hybrid(levels, most.bit_length(), count) == most
        if not present.all():
            raise NullValue(int(np.argmin(present)))
    if encoding == _PLAIN:
        return _plain_values(body, at, count)
    if encoding not in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
        raise NotByOffset(f"they have Parquet's encoding {encoding}")
    if dictionary is None or at >= body.size:
        raise ValueError("a page without its dictionary")
    width, *rest = body.read(at, body.size - at)
    numbers = _hybrid(bytes(rest), width, count)
    if len(numbers) and numbers.max() >= len(dictionary):
        raise ValueError("a value is not in its dictionary")
    return [dictionary[number] for number in numbers.tolist()]


def _body_and_levels(chunk: _Chunk, page: _Page) -> tuple[_Body, int, bytes]:
    """The data of a page, the byte in it at which the values begin, and the levels."""
    if page.kind == _DATA_V2:
        size, before = _number(page.head, 5), _number(page.head, 6)
        body = _body(chunk, page, before + size)
        return body, 0, chunk.file.read(page.begin + before, size)
    body = _body(chunk, page, 0)
    if not chunk.column.most_level:
        return body, 0, b""
    if page.head.get(3) != _RLE:
        raise NotByOffset("their levels are not in Parquet's RLE")
    size = int.from_bytes(body.read(0, min(_LENGTH, body.size)), "little")
    if _LENGTH + size > body.size:
        raise ValueError("the levels of a page reach past it")
    return body, _LENGTH + size, body.read(_LENGTH, size)


def _plain_values(body: _Body, at: int, count: int) -> list[SnappySpan]:
    found = []
    for _ in range(count):
        length = body.size
        if at + _LENGTH <= body.size:
            length = int.from_bytes(body.read(at, _LENGTH), "little")
        at += _LENGTH
        if at + length > body.size:
            raise ValueError("a value reaches past its page")
        found.append(body.span(at, length))
        at += length
    if at != body.size:
        raise ValueError("a page has bytes after its values")
    return found


def _hybrid(content: bytes, width: int, count: int) -> NDArray[np.int64]:
    """`count` numbers of `width` bits, in runs of one number and of packed bits."""
    numbers, filled, at = np.zeros(count, np.int64), 0, 0
    if width > 32:
        raise ValueError("a damaged page")
    while filled < count and width:
        head, at = varint(content, at)
        size = -(-width // 8) if not head & 1 else (head >> 1) * width
        part = content[at : at + size]
        at += size
        if head & 1:
            bits = np.unpackbits(np.frombuffer(part, np.uint8), bitorder="little")
            whole = bits[: len(bits) // width * width].astype(np.int64)
            run = whole.reshape(-1, width) @ (1 << np.arange(width))
        else:
            run = np.full(min(head >> 1, count - filled), int.from_bytes(part, "little"))
        run = run[: count - filled]
        if not len(run):
            raise ValueError("a damaged page")
        numbers[filled : filled + len(run)] = run
        filled += len(run)
    return numbers
