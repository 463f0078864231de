"""Measures how fast this machine reads and decodes a data set, which bounds training on it.

Reading, decoding and the whole loader are measured separately, for a number of seconds and with a
number of threads, on samples in the order of training. Decoding is measured in all modes, also in
those that need prepared data.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, cycle
from typing import NamedTuple

import numpy as np

from trainyard.data._native import own_decoder
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.decode.decode import decode_batch, native_sizes
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import Ids, ShuffledPlan
from trainyard.data.storage.encoded import contents_of, in_memory
from trainyard.errors import DataError

_HELD_BYTES, _HELD_SAMPLES = 1 << 28, 1024  # of encoded images, for decoding alone
_SLICE = 64  # images per call
_CROP = RandomResizedCrop(seed=0, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)

Turn = Callable[[], int]
"""Processes some images; returns their number."""


class DecodeRate(NamedTuple):
    """The rate of a decoding mode, with images in memory."""

    images_per_second: float
    bytes_per_image: float


@dataclass(frozen=True)
class MeasuredLoad:
    index: Index
    batch: int  # samples
    threads: int
    seconds: float  # of each measurement
    side: int = 224  # pixels of a training image
    channels: int = 3
    seed: int = 0  # of the order

    @property
    def plan(self) -> ShuffledPlan:
        return ShuffledPlan(len(self.index), global_batch=self.batch, seed=self.seed)


def reading_rate(task: MeasuredLoad) -> float:
    """Images read a second."""
    reader, steps = Reader(task.index), count()

    def begin() -> Turn:
        def read() -> int:
            ids = task.plan.batch(next(steps))
            num_read = 0
            for _, stored, unreadable in reader.prefetch(ids).read(slice(0, len(ids))):
                contents, unread = contents_of(stored)
                num_read += len(contents) - len(unreadable | unread)
            return num_read

        return read

    return _rate(begin, task)


def loader_rate(task: MeasuredLoad) -> tuple[float, float]:
    """Images a second of the whole loader, and seconds until the first batch."""
    spec = LoaderSpec(
        plan=task.plan,
        crop=_CROP,
        image_size=task.side,
        channels=task.channels,
        stop=1 << 40,
        threads=task.threads,
    )
    started = time.perf_counter()
    with Loader(task.index, spec) as loader:
        next(loader)
        first = time.perf_counter()
        for _ in range(3):  # these are ready, or nearly so
            next(loader)
        start, images = time.perf_counter(), 0
        while time.perf_counter() < start + task.seconds or not images:
            images += len(next(loader).ids)
        return images / (time.perf_counter() - start), first - started


# --- decoding alone ---


class EncodedSamples(NamedTuple):
    """Encoded images of some samples, in memory."""

    ids: Ids
    contents: list[bytes]

    @property
    def bytes_per_image(self) -> float:
        return sum(map(len, self.contents)) / len(self.contents)

    @property
    def fallback(self) -> float:
        """Share of the images that the extension cannot decode; 1 without the extension."""
        _, status = native_sizes(in_memory(self.contents), own_decoder())
        return float((status != 0).mean())


def load_samples(task: MeasuredLoad) -> EncodedSamples:
    """Reads samples in the order of training. DataError if none can be read."""
    reader, ids, contents, size, failure = Reader(task.index), [], [], 0, ""
    for sample in _samples(task):
        try:
            contents.append(reader.read(sample))
        except OSError as error:
            failure = str(error)
            continue
        ids.append(sample)
        size += len(contents[-1])
        if size > _HELD_BYTES:
            break
    if not ids:
        raise DataError(
            "data.no-readable-image",
            "{location}: no image can be read ({reason})",
            location=task.index.root,
            reason=failure,
        )
    return EncodedSamples(np.array(ids), contents)


def _samples(task: MeasuredLoad) -> Iterator[int]:
    count = min(_HELD_SAMPLES, len(task.index))
    plan = ShuffledPlan(len(task.index), global_batch=count, seed=0)
    return iter(plan.batch(0).tolist())


def decoding_rate(task: MeasuredLoad, held: EncodedSamples, way: str) -> DecodeRate:
    """`way` is libraries, stored, seek or packed; all but the first need the extension."""
    contents, seek = held.contents, None
    decoder = own_decoder()
    if way == "packed":
        assert decoder is not None
        contents = [decoder.pack(content) or content for content in contents]
    if way == "seek":
        assert decoder is not None
        seek = in_memory([decoder.seek_table(content) or b"" for content in contents])
    starts, guard = cycle(range(0, len(contents), _SLICE)), threading.Lock()

    def begin() -> Turn:
        out = np.empty((_SLICE, task.side, task.side, task.channels), np.uint8)
        rounds = count()

        def decode() -> int:
            with guard:
                part = slice(start := next(starts), start + _SLICE)
            ids = held.ids[part]
            decode_batch(
                contents[part],
                _CROP.draw(ids, np.full_like(ids, next(rounds))),
                out[: len(ids)],
                "bilinear",
                decoder=None if way == "libraries" else own_decoder(),
                seek=seek and seek.part(part),
            )
            return len(ids)

        return decode

    return DecodeRate(_rate(begin, task), sum(map(len, contents)) / len(contents))


# --- the clock ---


def _rate(begin: Callable[[], Turn], task: MeasuredLoad) -> float:
    """Images a second of all threads together; each has a turn that `begin` makes."""
    is_over = threading.Event()

    def prepared(_: int) -> Turn:
        turn = begin()
        turn()  # the first call is not counted
        return turn

    def measured(turn: Turn) -> float:
        started, images = time.perf_counter(), 0
        while time.perf_counter() < started + task.seconds and not is_over.is_set():
            images += turn()
        return images / (time.perf_counter() - started)

    with ThreadPoolExecutor(task.threads) as pool:
        try:
            turns = list(pool.map(prepared, range(task.threads)))
            return sum(pool.map(measured, turns))
        finally:
            is_over.set()  # so that Ctrl-C does not wait for the end of a measurement
