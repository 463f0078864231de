"""Images inside a Snappy stream: found once, and unpacked from the bytes of a span of it.

A stream is its length, then elements: literals, which are bytes as they are, and copies of bytes
before them. Photographs hardly repeat themselves, so an image is nearly always a few literals, cut
where the compressor's blocks of 64 KiB end. (github.com/google/snappy, format_description.txt)
"""

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

BLOCK = 1 << 16
"""Uncompressed bytes; the usual compressors copy from inside the same block only."""
_LONG = 60  # lengths above are in 1 to 4 bytes after the tag


class Element(NamedTuple):
    data: int  # first byte of a literal, or the byte after a copy
    length: int  # uncompressed bytes
    back: int  # the distance of a copy; 0 for a literal

    @property
    def next(self) -> int:
        """The first byte after the element."""
        return self.data if self.back else self.data + self.length


class SnappySpan(NamedTuple):
    """A part of a stream that holds an image."""

    offset: int  # from the start of the stream
    size: int  # bytes
    start: int
    """Positive: bytes of a literal before the first tag. Else the span begins at a tag, and -start
    uncompressed bytes come before the image."""
    length: int
    """Bytes of the image; 0 if the span is the image itself."""


class SnappyStream:
    """A whole stream, to find the spans of its images. ValueError if it is damaged."""

    def __init__(self, content: bytes) -> None:
        size, at = varint(content, 0)
        elements = []
        tags = []
        while at < len(content):
            tags.append(at)
            elements.append(_element(content, at))
            at = elements[-1].next
        self._elements, self._tags = elements, tags
        ends = list(accumulate(element.length for element in elements))
        self._starts = [0, *ends[:-1]]
        self._num_copies = [0, *accumulate(element.back > 0 for element in elements)]
        if at != len(content) or (ends or [0])[-1] != size:
            raise ValueError("its Snappy data is cut short")

    def span(self, at: int, length: int) -> SnappySpan:
        """The span of the uncompressed bytes from `at`, which is not empty."""
        first = bisect_right(self._starts, at) - 1
        last = bisect_right(self._starts, at + length - 1) - 1
        if self._num_copies[last + 1] == self._num_copies[first]:
            skipped = at - self._starts[first]
            begin = self._elements[first].data + skipped
            end = self._elements[last].data + at + length - self._starts[last]
            if first == last:
                return SnappySpan(begin, length, 0, 0)
            return SnappySpan(begin, end - begin, self._elements[first].length - skipped, length)
        first = bisect_right(self._starts, at // BLOCK * BLOCK) - 1
        start = self._starts[first]
        for copy in range(first, last + 1):
            if self._elements[copy].back > self._starts[copy] - start:
                raise ValueError("its Snappy data copies from more than 64 KiB before")
        end = self._elements[last].next
        return SnappySpan(self._tags[first], end - self._tags[first], start - at, length)


def unpacked(stored: bytes, start: int, length: int) -> bytes:
    """The image in the bytes of a span, see `SnappySpan`. ValueError if they are damaged."""
    if not length:
        return stored
    image = bytearray(stored[: max(0, start)])
    at, skip = len(image), max(0, -start)
    while len(image) < skip + length and at < len(stored):
        data, size, back = element = _element(stored, at)
        at = element.next
        if not back:
            image += stored[data : data + size]
        elif back > len(image):
            raise ValueError("its Snappy data copies from before its start")
        elif back >= size:
            image += image[len(image) - back : len(image) - back + size]
        else:
            image += (image[-back:] * (size // back + 1))[:size]
    if len(image) < skip + length:
        raise ValueError("its Snappy data is cut short")
    return bytes(image[skip : skip + length])


def _element(content: bytes, tag_at: int) -> Element:
    tag = content[tag_at]
    number, at = tag >> 2, tag_at + 1
    match tag & 3:
        case 0:  # a literal
            if number >= _LONG:
                width = number - _LONG + 1
                number, at = int.from_bytes(content[at : at + width], "little"), at + width
            return Element(at, number + 1, 0)
        case 1:
            width, length, high = 1, 4 + (number & 7), tag >> 5 << 8
        case 2:
            width, length, high = 2, number + 1, 0
        case _:
            width, length, high = 4, number + 1, 0
    back = high + int.from_bytes(content[at : at + width], "little")
    if not back:
        raise ValueError("its Snappy data has a copy of nothing")
    return Element(at + width, length, back)


def varint(content: bytes, at: int) -> tuple[int, int]:
    """An unsigned number, 7 bits in a byte, and the byte after it, as in protobuf and Thrift."""
    byte = content[at] if at < len(content) else 0x80
    if byte < 0x80:  # nearly always
        return byte, at + 1
    value = 0
    for place, byte in enumerate(content[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("has a number that does not end")
