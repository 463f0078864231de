"""Checks of the data: the same for all ranks, and read fast enough."""

import hashlib
import random
from collections.abc import Iterator
from functools import partial

from rich.console import Console

from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets, open_datasets
from trainyard.data.reading.reader import Reader
from trainyard.datasets.throughput import MeasuredLoad, reading_rate
from trainyard.distributed.heartbeat import Heartbeat
from trainyard.doctor.check import FAIL, Check, Context, Row, differing, limit_check, run_check
from trainyard.errors import TrainyardError
from trainyard.monitor.progress import counter

_READERS = 16  # threads per rank, as many as wait in a loader
_AT_ONCE = 16  # samples that each of them reads at a time
_COMPARED = 16  # samples whose bytes are compared
_SLOW_READ = 100  # samples per second and rank


def data_rows(context: Context, console: Console, heartbeat: Heartbeat) -> Iterator[Row]:
    """Yields rows as they are found; all ranks call it."""
    context.show("data")
    try:
        with counter(console, "indexing samples") as show:
            progress = heartbeat.counted("indexing", show)
            data = open_datasets(context.options.config.data, context.world, progress)
    except TrainyardError as error:  # on all ranks, also for a machine with other files
        yield Row("data", str(error), FAIL, "see the message")
        return
    index = data.train if isinstance(data.train, Index) else data.val
    advice = "`trainyard data verify --deep` lists what is wrong with it"
    yield run_check(Check("data", partial(_digest, index), partial(_judge, data), advice), context)
    reading = limit_check(
        "reading samples",
        partial(_reading, index),
        lambda rate: f"{rate:,.0f} samples/s",
        warn=_SLOW_READ,
        where="; what was read before may come from memory",
        advice="pack small files into shards (`trainyard data pack`), keep copies on local disks "
        "(data.stage), or read in blocks (data.locality)",
    )
    yield run_check(reading, context)


def _digest(index: Index, context: Context) -> str:
    """A hash of the bytes of a few samples."""
    reader, digest = Reader(index), hashlib.sha256()
    for sample in random.Random(0).sample(range(len(index)), min(len(index), _COMPARED)):
        digest.update(reader.read(sample))
    return digest.hexdigest()


def _judge(data: Datasets, values: list[str], context: Context) -> Row:
    others = {rank: "other bytes than rank 0" for rank, of in enumerate(values) if of != values[0]}
    if others:
        advice = "copy the data there anew; `trainyard data verify --deep` lists what is wrong"
        return Row("data", differing(others, context), FAIL, advice)
    train = f"{len(data.train):,}" if isinstance(data.train, Index) else "a stream"
    classes = f"{len(data.val.classes):,} classes"
    text = f"{train} to train on, {len(data.val):,} to validate, {classes}"
    return Row("data", text + (", the same for all ranks" if context.world.size > 1 else ""))


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
