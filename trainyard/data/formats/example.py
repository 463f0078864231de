"""Reads TensorFlow's `Example`, a protobuf message, without reading the image inside it.

An Example is a map from names to lists: `1: {1: {1: name, 2: {1: bytes | 2: floats | 3: int64s}}}`.
ValueError for a malformed one; no length or type in it is trusted.
"""

from collections.abc import Iterator
from itertools import islice

from trainyard.data.storage.snappy import varint
from trainyard.data.storage.source import Source

_READ_AHEAD = 1024  # bytes; holds the features around an image and the next record's head
_HEAD = 20  # bytes: a tag and a length of at most ten bytes each
_MAX_TEXT = 4096  # bytes; a class name
_KINDS = {1: "bytes", 2: "floats", 3: "int64"}

Span = tuple[int, int]
"""The first byte and the byte after the last, as offsets in the file."""


class BufferedReader:
    """Reads a file in small adjacent pieces, with one system call for many of them.

    Two blocks are kept, so that moving from one side of an image to the other costs nothing.
    """

    def __init__(self, source: Source, ahead: int = _READ_AHEAD) -> None:
        """`ahead`: bytes read at once, or more if more are asked for."""
        self.name = source.name
        self.size = source.size
        self._source, self._ahead = source, ahead
        self._block, self._start = b"", 0
        self._other = self._block, self._start

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes, which must lie inside the file."""
        first = offset - self._start
        if first < 0 or first + size > len(self._block):
            first = self._turn_to(offset, size)
        return self._block[first : first + size]

    def head(self, offset: int) -> bytes:
        """The bytes of a tag and a length, with any bytes after them, up to the end of the file."""
        first = offset - self._start
        if first < 0 or first + _HEAD > len(self._block):
            first = self._turn_to(offset, min(_HEAD, self.size - offset))
        return self._block[first : first + _HEAD]

    def _turn_to(self, offset: int, size: int) -> int:
        """Makes a block with these bytes the current one; returns their position in it."""
        self._other, (self._block, self._start) = (self._block, self._start), self._other
        first = offset - self._start
        if first >= 0 and first + size <= len(self._block):
            return first
        wanted = min(max(size, self._ahead), self.size - offset)
        self._block, self._start = self._source.read(offset, wanted), offset
        return 0


Field = tuple[int, int, int, int]
"""Number, wire type (0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes), start, end."""


def find_features(data: BufferedReader, span: Span, names: frozenset[bytes]) -> dict[bytes, Span]:
    """The spans of the named lists of an Example."""
    longest = max(map(len, names))
    found = {}
    for features in _messages(data, span, 1):
        for entry in _messages(data, features, 1):
            name, value = b"", None
            for field in _fields(data, entry):
                if field[0] == 1:
                    start, end = _bytes_of(field)
                    name = data.read(start, end - start) if end - start <= longest else b""
                elif field[0] == 2:
                    value = _bytes_of(field)
            if name in names and value is not None:
                found[name] = value
    return found


def one_bytes(data: BufferedReader, feature: Span) -> Span:
    """The span of the only element of a list of bytes."""
    elements = list(islice(_messages(data, _list_of(data, feature, 1), 1), 2))
    if len(elements) != 1:
        raise ValueError(f"has {'several values' if elements else 'no value'} instead of one")
    return elements[0]


def one_text(data: BufferedReader, feature: Span) -> str:
    """The only element of a list of bytes, as text. ValueError if it is long, or one of several."""
    start, end = one_bytes(data, feature)
    if end - start > _MAX_TEXT:
        raise ValueError(f"has a text of {end - start:,} bytes")
    return data.read(start, end - start).decode(errors="surrogateescape")


def one_int(data: BufferedReader, feature: Span) -> int:
    """The only element of a list of int64, packed or not."""
    values: list[int] = []
    for number, wire, position, end in _fields(data, _list_of(data, feature, 3)):
        if number != 1 or wire not in (0, 2):
            raise ValueError("has a list of int64 that holds something else")
        while position < end and len(values) < 2:
            value, length = varint(data.head(position), 0)
            values.append(value - (1 << 64) if value >> 63 else value)
            position += length
            if position > end:
                raise ValueError("has a number that does not end")
    if len(values) != 1:
        raise ValueError(f"has {'several values' if values else 'no value'} instead of one")
    return values[0]


def _list_of(data: BufferedReader, feature: Span, kind: int) -> Span:
    last = None
    for field in _fields(data, feature):
        last = field  # the last alternative counts
    if last is None:
        raise ValueError("is an empty list")
    if last[0] != kind:
        found = _KINDS.get(last[0], "something unknown")
        raise ValueError(f"is a list of {found} instead of {_KINDS[kind]}")
    return _bytes_of(last)


def _messages(data: BufferedReader, span: Span, number: int) -> Iterator[Span]:
    """The messages or byte strings of one field number; other numbers are ignored."""
    for field in _fields(data, span):
        if field[0] == number:
            yield _bytes_of(field)


def _bytes_of(field: Field) -> Span:
    number, wire, start, end = field
    if wire != 2:
        raise ValueError(f"field {number} has wire type {wire} instead of 2")
    return start, end


def _fields(data: BufferedReader, span: Span) -> Iterator[Field]:
    position, end = span
    while position < end:
        head = data.head(position)
        tag, at = varint(head, 0)
        wire = tag & 7
        if wire == 2:
            length, at = varint(head, at)
        elif wire == 0:
            length = varint(head, at)[1] - at
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"field {tag >> 3} has the unknown wire type {wire}")
        start = position + at
        position = start + length
        if position > end:
            raise ValueError(f"field {tag >> 3} of {length:,} bytes reaches past its message")
        yield tag >> 3, wire, start, position
