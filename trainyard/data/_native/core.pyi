"""The C extension, as Python sees it. All arrays are C-contiguous; the interpreter lock is
released while images are decoded or files are read. Nothing is kept between calls but scratch
memory, so a Decoder belongs to one thread at a time (RuntimeError otherwise)."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import typing_extensions
from numpy.typing import NDArray

Buffer: TypeAlias = typing_extensions.Buffer | NDArray[Any]

paths: tuple[str, ...]
"""What this machine can run, the best first: ("avx2", "plain") say."""

OK: int  # 0
NOT_OURS: int
DAMAGED: int
NO_MEMORY: int
BAD_BOX: int
UNREADABLE: int

SEEK_ENTRY: int
"""Bytes of an entry of a seek table."""

class Decoder:
    path: str
    def __init__(self, path: str | None = None) -> None:
        """The best path, or one by name; ValueError if this machine cannot run it."""

    def sizes(
        self,
        buffers: Sequence[Buffer],
        which: Buffer,  # int64[n]: image i lies in buffers[which[i]] ...
        offsets: Buffer,  # int64[n]: ... at this byte ...
        lengths: Buffer,  # int64[n]: ... and is so many bytes long
        out_sizes: Buffer,  # int64[n, 2], width and height; 1 x 1 where the status is not OK
        out_status: Buffer,  # uint8[n]
    ) -> None:
        """The size of each image from its header. ValueError for stretches outside a buffer."""

    def decode(
        self,
        buffers: Sequence[Buffer],
        which: Buffer,
        offsets: Buffer,
        lengths: Buffer,
        boxes: Buffer,  # float64[n, 4]: left, top, right, bottom
        flips: Buffer,  # bool[n]
        out: Buffer,  # uint8[n, height, width, 3], or [n, 3, height, width] if planar
        out_status: Buffer,  # uint8[n], read first: only images whose status is OK are decoded
        *,
        height: int,
        width: int,
        bicubic: bool = False,
        beyond: bool = False,  # pixels around a box count: resize, then crop
        planar: bool = False,
        seek: Buffer | None = None,  # entries of many images
        seek_begins: Buffer | None = None,  # int64[n]: entries [begin, end) are those of image i
        seek_ends: Buffer | None = None,
    ) -> None:
        """Decode a box of each image, resize it (antialiased) and flip it, into its place in `out`.

        The pixels of an image whose status is not OK afterwards are undefined. One that its seek
        table does not fit is decoded without.
        """

    def seek_table(self, content: Buffer) -> bytes | None:
        """The seek table of a JPEG; None if it is not for this decoder or is damaged."""

    def pack(self, content: Buffer) -> bytes | None:
        """A JPEG as a packed record that gives it back to the byte; None if there is none."""

    def unpack(self, record: Buffer) -> bytes | None:
        """The JPEG that a packed record was made of; None if the record is damaged."""

def read_files(
    root: bytes,
    names: Buffer,  # uint8: names end to end, relative to the root
    begins: Buffer,  # int64[n]: name i is names[begins[i]:ends[i]]
    ends: Buffer,  # int64[n]
    offsets: Buffer,  # int64[n]: where each file goes in `out`
    lengths: Buffer,  # int64[n]: bytes that each file has
    out: Buffer,
    out_errno: Buffer,  # int32[n]: 0, or why it could not be read; -1: it has another length
) -> None:
    """Read whole files, each in one go."""

def will_need(buffers: Sequence[Buffer], which: Buffer, offsets: Buffer, lengths: Buffer) -> None:
    """Ask the system to begin reading stretches of memory-mapped files."""

def touch(buffers: Sequence[Buffer], which: Buffer, offsets: Buffer, lengths: Buffer) -> None:
    """Read a byte of some stretches of memory-mapped files, until one was not in memory: then this
    process has had a major page fault."""

def permute(positions: Buffer, keys: Buffer, size: int, out: Buffer) -> None:
    """`permute` of keyed.py, of int64[n] and uint64[n]; ValueError for a position outside."""

def random_boxes(
    sizes: Buffer,  # int64[n, 2], width and height
    drawn: Buffer,  # float64[n, 22], see RandomDraws
    least_ratio: float,
    greatest_ratio: float,
    out_boxes: Buffer,  # float64[n, 4]: left, top, right, bottom
) -> None:
    """Random crops of images of these sizes, equal to the bit to those without the extension."""

def guard_bus_errors() -> None:
    """From now on in this process, a mapped file that cannot be read is an image's error
    (UNREADABLE), not the process's death by SIGBUS. For the loader process only."""
