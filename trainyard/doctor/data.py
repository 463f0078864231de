"""Checks of the data: the same for all ranks, and read fast enough."""

import hashlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

from rich.console import Console

from trainyard.data.config import DataConfig
from trainyard.data.index.build import Progress
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets, open_datasets, source_of
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.source import is_remote
from trainyard.distributed.heartbeat import Heartbeat
from trainyard.doctor.check import (
    FAIL,
    WARN,
    Check,
    Context,
    Row,
    differing,
    run_check,
    spread,
)
from trainyard.errors import TrainyardError
from trainyard.monitor.progress import counter
from trainyard.printable import in_bytes
from trainyard.world import gather, in_turns

_READERS = 16  # threads per rank, as many as wait in a loader
_COMPARED = 16  # samples whose bytes are compared
_SLOW_READ = 100  # samples per second and rank


def data_rows(context: Context, console: Console, heartbeat: Heartbeat) -> Iterator[Row]:
    """Yields rows as they are found; all ranks call it."""
    config, world = context.options.config.data, context.world
    context.say("data")
    try:
        with counter(console, "indexing samples") as show:
            progress = heartbeat.counted("indexing", show)
            leads = world.rank in context.machines
            own = in_turns(world, partial(_fingerprints, config, leads, progress))
            others = _other_fingerprints(gather(world, own))
            if others:
                advice = "copy the data there anew, or mount the same file system everywhere"
                yield Row("data", differing(others, context), FAIL, advice)
                return
            data = open_datasets(config, world, progress)
    except TrainyardError as error:  # on all ranks
        yield Row("data", str(error), FAIL, "see the message")
        return
    yield Row("data", _described(data))
    index = data.train if isinstance(data.train, Index) else data.val
    yield run_check(_same_samples(index), context)
    read = partial(_read, index)
    yield run_check(Check("reading samples", read, _judge_reading, "see the message"), context)


def _described(data: Datasets) -> str:
    train = "a stream" if not isinstance(data.train, Index) else f"{len(data.train):,}"
    prints = ", ".join(f"{split} {print[:12]}" for split, print in data.fingerprints.items())
    return (
        f"the same for all ranks: {train} to train on, {len(data.val):,} to validate, "
        f"{len(data.val.classes):,} classes ({prints})"
    )


def _fingerprints(config: DataConfig, leads: bool, progress: Progress) -> dict[str, str]:
    """Fingerprints by split as this machine sees the data; empty unless `leads`.

    In training, the other ranks use the first rank's index if they see its file.
    """
    found: dict[str, str] = {}
    splits: tuple[Literal["train", "val"], ...] = ("train", "val") if leads else ()
    for split in splits:
        locations, _, side = source_of(config, split)
        if locations is None or (split == "train" and config.order == "join"):
            continue
        locations = (locations,) if isinstance(locations, str) else locations
        found[split] = open_merged(locations, None, progress, side).fingerprint
    return found


def _other_fingerprints(found: list[dict[str, str]]) -> dict[int, str]:
    """The differences of each rank whose data differs from the first one's."""
    first = found[0]
    return {
        rank: " and ".join(split for split in prints if prints[split] != first[split])
        + " data other than rank 0's (other files, sizes or classes)"
        for rank, prints in enumerate(found)
        if any(prints[split] != first[split] for split in prints)
    }


def _same_samples(index: Index) -> Check:
    """A check that the bytes of a few samples are the same for all ranks."""
    samples = random.Random(0).sample(range(len(index)), min(len(index), _COMPARED))

    def digest(context: Context) -> str:
        reader, found = Reader(index), hashlib.sha256()
        for sample in samples:
            found.update(reader.read(sample))
        return found.hexdigest()

    def judge(values: list[str], context: Context) -> Row:
        others = {
            rank: "other bytes than rank 0"
            for rank, value in enumerate(values)
            if value != values[0]
        }
        if others:
            advice = "copy the data there anew; `trainyard data verify --deep` says which are wrong"
            return Row("samples", differing(others, context), FAIL, advice)
        return Row("samples", f"{len(samples)} at random are whole and the same")

    return Check("samples", digest, judge, "`trainyard data verify` says what is wrong with it")


class _ReadSpeed(NamedTuple):
    samples: float  # per second
    bytes: float
    is_cached: bool


def _read(index: Index, context: Context) -> _ReadSpeed:
    """Speed of random reads on this rank, as in training."""
    reader, begun = Reader(index), time.perf_counter()
    cached: list[bool] = []

    def read(thread: int) -> tuple[int, int]:
        draw = random.Random(1_000_003 * context.world.rank + thread)
        samples = num_bytes = 0
        while time.perf_counter() - begun < context.options.seconds:
            sample = draw.randrange(len(index))
            cached.append(_drop(*index.locate(sample)))
            num_bytes += len(reader.read(sample))
            samples += 1
        return samples, num_bytes

    with ThreadPoolExecutor(_READERS) as pool:
        done = list(pool.map(read, range(_READERS)))
    took = time.perf_counter() - begun
    samples, num_bytes = (sum(column) / took for column in zip(*done, strict=True))
    return _ReadSpeed(samples, num_bytes, sum(cached) > len(cached) / 2)


def _drop(name: str, offset: int, size: int) -> bool:
    """True if a piece of a file stays in memory after the kernel was asked to drop it."""
    if is_remote(name) or not hasattr(os, "posix_fadvise"):  # macOS
        return False
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not in memory, or the file system cannot tell
        return False
    finally:
        os.close(file)


def _judge_reading(values: list[_ReadSpeed], context: Context) -> Row:
    samples = [value.samples for value in values]
    speeds = spread(samples, context, lambda each: f"{each:,.0f} samples/s")
    total = in_bytes(sum(value.bytes for value in values))
    from_memory = ", from memory: the kernel did not drop it" * any(v.is_cached for v in values)
    found = f"{speeds} ({total}/s in all{from_memory})"
    if min(samples) < _SLOW_READ:
        advice = (
            "pack small files into shards (`trainyard data pack`), keep copies on local disks "
            "(data.stage), or read in blocks (data.locality)"
        )
        return Row("reading samples", found, WARN, advice)
    return Row("reading samples", found)
