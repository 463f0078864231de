"""Encoded images in memory: each is an object of its own, or a span of a larger one."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trainyard.data._native.core import Buffer

PACKED_MAGIC = b"\xa7TYpack\n"
"""The first bytes of a packed record: see decode/packed_record.py, which few data sets need."""


class EncodedSpans(NamedTuple):
    """Encoded images: number i has `lengths[i]` bytes, from `offsets[i]` in `buffers[which[i]]`."""

    buffers: "Sequence[Buffer]"
    which: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    reread: Callable[[int], bytes] | None = None
    """Reads the bytes of an image; for a mapped file, whose access may end the process."""

    def content(self, position: int) -> bytes:
        """The bytes of one image. OSError if they cannot be read."""
        if self.reread is not None:
            return self.reread(position)
        start, buffer = int(self.offsets[position]), self.buffers[int(self.which[position])]
        view = memoryview(buffer)  # type: ignore[arg-type]  # an array is a buffer, too
        return bytes(view[start : start + int(self.lengths[position])])


def as_stored(images: EncodedSpans | Sequence[bytes]) -> EncodedSpans:
    """Encoded images as spans, each an object of its own."""
    return images if isinstance(images, EncodedSpans) else in_memory(images)


def in_memory(contents: Sequence[bytes]) -> EncodedSpans:
    """Images that are separate objects."""
    lengths = np.array([len(content) for content in contents], np.int64)
    return EncodedSpans(contents, np.arange(len(contents)), np.zeros_like(lengths), lengths)
