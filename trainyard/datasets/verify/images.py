"""Reads, hashes and decodes every image as training does, in processes without torch."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.data.arrays import Bytes, Ints
from trainyard.data.decode import lost
from trainyard.data.decode.array_file import MAGIC, Bands
from trainyard.data.decode.crops import Crops
from trainyard.data.decode.decode import decode_batch, image_orientation, opened
from trainyard.data.decode.rendering import Rendering
from trainyard.data.formats.scan import ARRAY_SUFFIX, IMAGE_FORMATS
from trainyard.data.index.build import Progress
from trainyard.data.index.table import Index, load_index
from trainyard.data.reading.reader import Reader, read_ahead
from trainyard.data.storage.ahead import map_ahead
from trainyard.datasets.verify.checks import MAX_LISTED
from trainyard.datasets.workers import CONTEXT, Workers
from trainyard.errors import DataError

T = TypeVar("T")

Hashes = NDArray[np.uint64]
"""uint64[n, 2]: BLAKE2b of each sample's bytes, 128 bits; 0 for an unread sample."""

_CHUNK = 64  # samples of a task; takes half a second
_AHEAD = 4  # tasks per process
_ANY = Rendering(range=(0, 1))  # for all depths
_TINY = 8  # pixels
_HUGE = 50_000_000  # pixels; one such image delays a batch
_FORMAT_OF = {ending: kind for kind, endings in IMAGE_FORMATS.items() for ending in endings}
_FORMAT_OF[ARRAY_SUFFIX] = "NPY"


Oddity = tuple[int, str, str]  # sample, code, description


@dataclass
class Tally(Generic[T]):
    """A count of rows, and the first of them."""

    count: int = 0
    first: list[T] = field(default_factory=list)

    def add(self, rows: Sequence[T]) -> None:
        self.count += len(rows)
        self.first += rows[: max(0, MAX_LISTED - len(self.first))]


@dataclass
class ImageFindings:
    """Findings in the images of a split."""

    bad: Tally[Oddity] = field(default_factory=Tally)
    odd: Tally[Oddity] = field(default_factory=Tally)
    kinds: dict[str, Tally[int]] = field(default_factory=dict)
    """Samples by file type and mode: "JPEG RGB"."""
    turned: Tally[Oddity] = field(default_factory=Tally)
    """Images whose orientation is not 1."""

    def add(self, part: "_Part") -> None:
        self.bad.add(part.bad)
        self.odd.add(part.odd)
        self.turned.add(part.turned)
        for kind, rows in part.kinds.items():
            self.kinds.setdefault(kind, Tally()).add(rows)


def examine(
    indices: Sequence[Index], workers: int, progress: Progress
) -> tuple[list[ImageFindings], Hashes]:
    """Examines all images; also returns the hashes, index after index."""
    starts = np.cumsum([0, *map(len, indices)])
    hashes = np.zeros((int(starts[-1]), 2), np.uint64)
    findings = [ImageFindings() for _ in indices]
    count = 0
    stop = CONTEXT.RawValue("b", 0)
    pool = Workers(workers, _start, [str(index.path) for index in indices], stop)
    try:
        for part in map_ahead(pool, _examine, _tasks(indices), most=workers * _AHEAD):
            findings[part.split].add(part)
            first = int(starts[part.split]) + part.first
            hashes[first : first + len(part.hashes)] = part.hashes
            count += len(part.hashes)
            progress(count)
    except BrokenProcessPool:
        raise DataError(
            "verify.worker-died",
            "a process that decodes images died: out of memory, or an image that crashes the "
            "decoder; try fewer --processes",
        ) from None
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)
    return findings, hashes


def same_bytes(hashes: Hashes) -> tuple[Ints, Ints]:
    """The rows that share a hash, group by group, and the first row of each one's group."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: rows of a group are in order
    ordered = hashes[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    group = np.cumsum(is_first) - 1
    shared = (np.bincount(group)[group] > 1) & ordered.any(axis=1)
    return order[shared], order[is_first][group][shared]


# --- processes ---


class _Part(NamedTuple):
    """Findings in one chunk."""

    split: int
    first: int  # sample
    hashes: Hashes
    bad: list[Oddity]
    odd: list[Oddity]
    kinds: dict[str, list[int]]
    turned: list[Oddity]


_Task = tuple[int, int, int]  # split, first sample, one past the last


def _tasks(indices: Sequence[Index]) -> Iterator[_Task]:
    for split, index in enumerate(indices):
        for start in range(0, len(index), _CHUNK):
            yield split, start, min(start + _CHUNK, len(index))


class _Examiner:
    """The open indices and readers of one process."""

    def __init__(self, indices: list[str], stop: Any) -> None:
        self.stop = stop  # a number in shared memory: not 0 once results are no longer needed
        self.indices = [_load(Path(path)) for path in indices]
        self.readers = [Reader(index) for index in self.indices]

    def examine(self, split: int, start: int, stop: int) -> _Part:
        part = _Part(split, start, np.zeros((stop - start, 2), np.uint64), [], [], {}, [])
        contents = read_ahead(self.readers[split], np.arange(start, stop))
        for sample, content in enumerate(contents, start):
            if self.stop.value:
                break
            if isinstance(content, OSError):
                part.bad.append((sample, "file.unreadable", str(content)))
                continue
            if content:
                digest = hashlib.blake2b(content, digest_size=16).digest()
                part.hashes[sample - start] = np.frombuffer(digest, "<u8")
            self._look(part, sample, content)
        return part

    def _look(self, part: _Part, sample: int, content: bytes) -> None:
        """Adds what is to be reported about an image."""
        out_BHWC = _pixel(content)
        reason = decode_batch([content], _corner, out_BHWC, "bilinear", rendering=_ANY).get(0)
        if reason is not None:
            part.bad.append((sample, "verify.undecodable", reason))
            return
        suffix = os.path.splitext(self.indices[part.split].locate(sample)[0])[1].lower()
        kind, oddities, orientation = _describe(content, suffix)
        if orientation != 1:
            part.turned.append((sample, "verify.turned", f"orientation {orientation}"))
        part.kinds.setdefault(kind, []).append(sample)
        part.odd.extend((sample, f"verify.{code}", what) for code, what in oddities.items())


_examiner: _Examiner  # of this process


def _start(indices: list[str], stop: Any) -> None:
    global _examiner
    Image.init()
    _examiner = _Examiner(indices, stop)


def _examine(task: _Task) -> _Part:
    return _examiner.examine(*task)


def _load(path: Path) -> Index:
    index = load_index(path)
    if index is None:
        raise DataError("verify.index-gone", "the index {path} is gone", path=path)
    return index


# --- one image ---


def _corner(sizes: Ints) -> Crops:
    """A box of one pixel, so that only decoding takes time."""
    boxes = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (len(sizes), 1))
    return Crops(boxes, np.zeros(len(sizes), bool))


def _pixel(content: bytes) -> Bytes:
    """Room for a pixel: of an array, with all of its channels."""
    channels = 3
    with suppress(Exception):  # decoding tells the reason
        channels = getattr(opened(content), "channels", channels)
    return np.empty((1, 1, 1, channels), np.uint8)


def _describe(content: bytes, suffix: str) -> tuple[str, dict[str, str], int]:
    """File type and mode of an image that decodes, its oddities by code, and its orientation."""
    try:
        image, orientation = opened(content), image_orientation(content)
        if isinstance(image, Bands):
            kind = "NPY" if content.startswith(MAGIC) else "TIFF"
            mode = f"{image.channels} channels"
        else:
            kind, mode = image.format or "pixels", image.mode
    except Exception:  # libjpeg-turbo reads its header and Pillow does not
        return "JPEG of unknown mode", {"unopened": "a JPEG that Pillow does not open"}, 1
    odd = {}
    if suffix in _FORMAT_OF and kind.replace("MPO", "JPEG") != _FORMAT_OF[suffix]:
        odd["disguised"] = f"{kind} in disguise: its name ends in {suffix}"
    if mode == "CMYK":
        odd["cmyk"] = "CMYK instead of RGB"
    seen = lost.look(content, only_deep=True)
    odd |= dict[str, str](seen.remarks())
    if seen.is_deep:
        odd["deep"] = f"more than 8 bits a channel: values from {seen.low:,g} to {seen.high:,g}"
    width, height = image.size
    if min(width, height) < _TINY:
        odd["tiny"] = f"tiny: {width} x {height} pixels"
    if width * height > _HUGE:
        odd["huge"] = f"huge: {width} x {height} pixels"
    return f"{kind} {mode}", odd, orientation
