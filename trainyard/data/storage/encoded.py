"""Encoded images: each is an object of its own, or a span of a larger one or of an open file."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.data.arrays import Ints

if TYPE_CHECKING:
    from trainyard.data._native.core import Buffer

PACKED_MAGIC = b"\xa7TYpack\n"
"""The first bytes of a packed record: see decode/packed_record.py, which few data sets need."""


class ImageFile(Protocol):
    """An open local file, which the C decoder reads by its descriptor."""

    def fileno(self) -> int: ...
    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes; OSError if they cannot be read."""


class EncodedSpans(NamedTuple):
    """Encoded images: number i has `lengths[i]` bytes, from `offsets[i]` in `sources[which[i]]`."""

    sources: "Sequence[Buffer | ImageFile]"
    which: Ints
    offsets: Ints
    lengths: Ints

    def content(self, position: int) -> bytes:
        """The bytes of one image. OSError if they cannot be read."""
        start, size = int(self.offsets[position]), int(self.lengths[position])
        source = self.sources[int(self.which[position])]
        if (read := getattr(source, "read", None)) is not None:
            content: bytes = read(start, size)
            return content
        view = memoryview(source)  # type: ignore[arg-type]  # an array is a buffer, too
        return bytes(view[start : start + size])

    def part(self, rows: slice | NDArray[np.intp]) -> "EncodedSpans":
        """Some of the images."""
        return EncodedSpans(self.sources, self.which[rows], self.offsets[rows], self.lengths[rows])


def as_stored(images: EncodedSpans | Sequence[bytes]) -> EncodedSpans:
    """Encoded images as spans, each an object of its own."""
    return images if isinstance(images, EncodedSpans) else in_memory(images)


def in_memory(contents: Sequence[bytes]) -> EncodedSpans:
    """Images that are separate objects."""
    lengths = np.array([len(content) for content in contents], np.int64)
    return EncodedSpans(contents, np.arange(len(contents)), np.zeros_like(lengths), lengths)


def contents_of(images: EncodedSpans | Sequence[bytes]) -> tuple[list[bytes], dict[int, str]]:
    """The bytes of all images, and why some cannot be read, by their positions; those are empty."""
    if not isinstance(images, EncodedSpans):
        return list(images), {}
    contents, unreadable = [], {}
    for position in range(len(images.which)):
        try:
            contents.append(images.content(position))
        except OSError as error:
            contents.append(b"")
            unreadable[position] = str(error)
    return contents, unreadable
