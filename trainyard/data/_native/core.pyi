"""The Python interface of the C extension. All arrays are C-contiguous; the interpreter lock is
released while images are read or decoded. Only scratch memory is kept between calls, so a
Decoder belongs to one thread at a time (RuntimeError otherwise)."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import typing_extensions
from numpy.typing import NDArray

Buffer: TypeAlias = typing_extensions.Buffer | NDArray[Any]

class File(Protocol):
    """An open local file."""

    def fileno(self) -> int: ...

paths: tuple[str, ...]
"""The code paths that this machine can run, the best first: ("avx2", "plain") for instance.

("plain",) where ATEN_CPU_CAPABILITY is "default", by which torch uses no vectors either.
"""

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
        """Uses the best path, or one by name; ValueError if this machine cannot run it."""

    def sizes(
        self,
        sources: Sequence[Buffer | File],
        which: Buffer,  # int64[n]: image i lies in sources[which[i]] ...
        offsets: Buffer,  # int64[n]: ... at this byte ...
        lengths: Buffer,  # int64[n]: ... and has this length in bytes
        out_sizes: Buffer,  # int64[n, 2], width and height; 1 x 1 where the status is not OK
        out_status: Buffer,  # uint8[n]
    ) -> None:
        """The size of each image from its header. ValueError for spans outside a buffer.

        An image in a file that is cut short, or cannot be read, is UNREADABLE, here and below.
        """

    def decode(
        self,
        sources: Sequence[Buffer | File],
        which: Buffer,
        offsets: Buffer,
        lengths: Buffer,
        boxes: Buffer,  # float64[n, 4]: left, top, right, bottom; filled in by `drawn` or `central`
        flips: Buffer,  # bool[n]
        out: Buffer,  # uint8[n, height, width, channels]
        out_status: Buffer,  # uint8[n], read first: only images whose status is OK are decoded
        *,
        height: int,
        width: int,
        bicubic: bool = False,
        beyond: bool = False,  # pixels around a box count: resize, then crop
        seek: tuple[Sequence[Buffer | File], Buffer, Buffer, Buffer] | None = None,
        # the seek table of each image, in the form of the first arguments; may be empty
        channels: int = 3,  # 3: RGB; 1: luma, which is NOT_OURS for a record of RGB pixels
        drawn: Buffer = ...,  # float64[n, 22], see RandomCropParameters
        ratio: tuple[float, float] = ...,  # its least and greatest
        central: tuple[int, int, int, int] = ...,  # width and height of a CentralCrop, and covered
    ) -> None:
        """Decodes, resizes (antialiased) and flips a box of each image into its place in `out`.

        The pixels of an image whose final status is not OK are undefined. An image that its seek
        table does not fit is decoded without it.
        """

    def seek_table(self, content: Buffer) -> bytes | None:
        """The seek table of a JPEG; None for a JPEG that is damaged or not for this decoder."""

    def pack(self, content: Buffer) -> bytes | None:
        """The packed record of a JPEG, which restores it byte by byte; None if impossible."""

    def unpack(self, record: Buffer) -> bytes | None:
        """The original JPEG of a packed record; None if the record is damaged."""

def read_spans(
    root: bytes,
    names: Buffer,  # uint8: names end to end, relative to the root
    begins: Buffer,  # int64[n]: name i is names[begins[i]:ends[i]]
    ends: Buffer,  # int64[n]
    starts: Buffer,  # int64[n]: first byte in the file; -1: the whole file, which has this length
    offsets: Buffer,  # int64[n]: position of each span in `out`
    lengths: Buffer,  # int64[n]: bytes of each span
    out: Buffer,
    files: Buffer,  # int32[n]: open files to read from, or -1; those opened for parts stay open
    out_errno: Buffer,  # int32[n]: 0, the errno of a failed read, or -1 for another length
) -> float:
    """Reads files or parts of them. Returns the seconds in which storage was waited for.

    Seconds in which other threads had the processor do not count.
    """

def will_need(
    sources: Sequence[Buffer | File],
    which: Buffer,
    offsets: Buffer,
    lengths: Buffer,
    out_in_memory: Buffer,  # bool[n]: whether its middle can be read without waiting for storage
) -> None:
    """Asks the system to read those images ahead that lie in files and not in memory yet."""

def unpack_snappy(
    sources: Sequence[Buffer | File],
    which: Buffer,
    offsets: Buffer,
    lengths: Buffer,
    starts: Buffer,  # int64[n], see SnappySpan
    ends: Buffer,  # int64[n]: span i is unpacked into out[ends[i - 1]:ends[i]]
    out: Buffer,  # uint8
    out_status: Buffer,  # uint8[n]: OK, DAMAGED or UNREADABLE
) -> None:
    """Unpacks spans of Snappy streams. A span with a negative start gives so many bytes before."""
