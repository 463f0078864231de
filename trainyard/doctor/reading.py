"""Checks of the data: the same for all ranks, and read fast enough."""

import hashlib
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trainyard.data.config import DataConfig
from trainyard.data.index.build import Progress
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.source import is_remote
from trainyard.doctor.patient import Patient
from trainyard.doctor.rows import FAIL, WARN, Check, Row, differing, spread
from trainyard.monitor.units import in_bytes

_READERS = 16  # threads per rank, as many as wait in a loader
_COMPARED = 16  # samples whose bytes are compared
_SLOW_READ = 100  # samples per second and rank


def own_fingerprints(config: DataConfig, leads: bool, progress: Progress) -> dict[str, str]:
    """Fingerprints by split as this machine sees the data; empty unless `leads`.

    In training, the other ranks use the first rank's index if they see its file.
    """
    found = {}
    for split in ("train", "val") if leads else ():
        locations = getattr(config, split)
        if locations is None or (split == "train" and config.order == "join"):
            continue
        locations = (locations,) if isinstance(locations, str) else locations
        found[split] = open_merged(locations, None, progress).fingerprint
    return found


def other_fingerprints(found: list[dict[str, str]]) -> dict[int, str]:
    """The differences of each rank whose data differs from the first one's."""
    first = found[0]
    return {
        rank: " and ".join(split for split in prints if prints[split] != first[split])
        + " data other than rank 0's (other files, sizes or classes)"
        for rank, prints in enumerate(found)
        if any(prints[split] != first[split] for split in prints)
    }


def same_samples(index: Index) -> Check:
    """A check that the bytes of a few samples are the same for all ranks."""

    def digest(patient: Patient) -> str:
        count = min(len(index), _COMPARED)
        samples = random.Random(0).sample(range(len(index)), count)
        reader, found = Reader(index), hashlib.sha256()
        for sample in samples:
            found.update(reader.read(sample))
        return found.hexdigest()

    def judge(values: list[str], patient: Patient) -> Row:
        others = {
            rank: "other bytes than rank 0"
            for rank, value in enumerate(values)
            if value != values[0]
        }
        if others:
            advice = "copy the data there anew; `trainyard data verify --deep` says which are wrong"
            return Row("samples", differing(others, patient), FAIL, advice)
        return Row("samples", f"{min(len(index), _COMPARED)} at random are whole and the same")

    return Check("samples", digest, judge, "`trainyard data verify` says what is wrong with it")


class _Speed(NamedTuple):
    samples: float  # per second
    bytes: float
    is_cached: bool


def reading(index: Index) -> Check:
    """A check of the speed at which all ranks at once read random samples, as in training."""

    def measure(patient: Patient) -> _Speed:
        return _read(index, patient.world.rank, patient.question.seconds)

    return Check("reading samples", measure, _judge_reading, "see the message")


def _read(index: Index, seed: int, seconds: float) -> _Speed:
    reader, begun = Reader(index), time.perf_counter()
    cached: list[bool] = []

    def read(thread: int) -> tuple[int, int]:
        draw, samples, num_bytes = random.Random(1_000_003 * seed + thread), 0, 0
        while time.perf_counter() - begun < seconds:
            sample = draw.randrange(len(index))
            cached.append(_drop(*index.locate(sample)))
            num_bytes += len(reader.read(sample))
            samples += 1
        return samples, num_bytes

    with ThreadPoolExecutor(_READERS) as pool:
        done = list(pool.map(read, range(_READERS)))
    took = time.perf_counter() - begun
    samples, num_bytes = (sum(column) / took for column in zip(*done, strict=True))
    return _Speed(samples, num_bytes, sum(cached) > len(cached) / 2)


def _drop(name: str, offset: int, size: int) -> bool:
    """True if a piece of a file stays in memory after the kernel was asked to drop it."""
    if is_remote(name):
        return False
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not in memory, or the file system cannot tell
        return False
    finally:
        os.close(file)


def _judge_reading(values: list[_Speed], patient: Patient) -> Row:
    found = spread(
        [value.samples for value in values],
        patient.names,
        lambda samples: f"{samples:,.0f} samples/s",
        "least",
    )
    total = in_bytes(sum(value.bytes for value in values))
    from_memory = ", from memory: the kernel did not drop it" * any(v.is_cached for v in values)
    row = Row("reading samples", f"{found} ({total}/s in all{from_memory})")
    if min(value.samples for value in values) < _SLOW_READ:
        advice = (
            "pack small files into shards (`trainyard data pack`), keep copies on local disks "
            "(data.stage), or read in blocks (data.locality)"
        )
        return row._replace(verdict=WARN, advice=advice)
    return row
