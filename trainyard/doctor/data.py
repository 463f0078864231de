"""Checks of the data: the same for all ranks, and read fast enough."""

import hashlib
import random
from collections.abc import Iterator
from functools import partial
from typing import Literal

from rich.console import Console

from trainyard.data.config import DataConfig
from trainyard.data.index.build import Progress
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import open_datasets, source_of
from trainyard.data.reading.reader import Reader
from trainyard.datasets.throughput import MeasuredLoad, reading_rate
from trainyard.distributed.heartbeat import Heartbeat
from trainyard.doctor.check import FAIL, Context, Row, differing, limit_check, run_check
from trainyard.errors import TrainyardError
from trainyard.monitor.progress import counter
from trainyard.world import gather, in_turns

_READERS = 16  # threads per rank, as many as wait in a loader
_AT_ONCE = 16  # samples that each of them reads at a time
_COMPARED = 16  # samples whose bytes are compared
_SLOW_READ = 100  # samples per second and rank


def data_rows(context: Context, console: Console, heartbeat: Heartbeat) -> Iterator[Row]:
    """Yields rows as they are found; all ranks call it."""
    config, world = context.options.config.data, context.world
    context.show("data")
    try:
        with counter(console, "indexing samples") as show:
            progress = heartbeat.counted("indexing", show)
            leads = world.rank in context.machines
            digests = in_turns(world, partial(_digests, config, leads, progress))
            values = gather(world, digests)
            others = {
                rank: "other files, sizes, classes or bytes than rank 0"
                for rank, value in enumerate(values)
                if value and value != values[0]
            }
            if others:
                advice = "copy the data there anew, or mount the same file system everywhere"
                yield Row("data", differing(others, context), FAIL, advice)
                return
            data = open_datasets(config, world, progress)
    except (OSError, TrainyardError) as error:  # on all ranks
        advice = "see the message; `trainyard data verify --deep` lists what is wrong"
        yield Row("data", str(error), FAIL, advice)
        return
    train = f"{len(data.train):,}" if isinstance(data.train, Index) else "a stream"
    text = f"{train} to train on, {len(data.val):,} to validate, {len(data.val.classes):,} classes"
    yield Row("data", text + (", the same for all ranks" if world.size > 1 else ""))
    reading = limit_check(
        "reading samples",
        partial(_reading, data.train if isinstance(data.train, Index) else data.val),
        lambda rate: f"{rate:,.0f} samples/s",
        warn=_SLOW_READ,
        where="; what was read before may come from memory",
        advice="pack small files into shards (`trainyard data pack`), keep copies on local disks "
        "(data.stage), or read in blocks (data.locality)",
    )
    yield run_check(reading, context)


def _digests(config: DataConfig, leads: bool, progress: Progress) -> list[str]:
    """Each split's fingerprint, and a hash of a few of its images, as this machine sees the data.

    Empty unless `leads`: in training, others use the first rank's index if they see its file.
    """
    digests: list[str] = []
    splits: tuple[Literal["train", "val"], ...] = ("train", "val") if leads else ()
    for split in splits:
        locations, _, side, _ = source_of(config, split)
        if locations is None or (split == "train" and config.order == "join"):
            continue
        locations = (locations,) if isinstance(locations, str) else locations
        index = open_merged(locations, None, progress, side)
        reader, of_bytes = Reader(index), hashlib.sha256()
        for sample in random.Random(0).sample(range(len(index)), min(len(index), _COMPARED)):
            of_bytes.update(reader.read(sample))
        digests += [index.fingerprint, of_bytes.hexdigest()]
    return digests


def _reading(index: Index, context: Context) -> float:
    """Samples per second that this rank reads at random, in an order of its own."""
    load = MeasuredLoad(
        index,
        batch=_AT_ONCE,
        threads=_READERS,
        seconds=context.options.seconds,
        seed=context.world.rank,
    )
    return reading_rate(load)
