"""A whole loader, measured in a process of its own, which prints one line of JSON.

python -m benchmarks.loaders.measure MODULE FUNCTION --data PATH --cores N --seconds S

FUNCTION of MODULE takes a Job and gives a function that begins an epoch: an iterable of (images,
labels). Images are a uint8 tensor of 64, in either layout. Rates are of the clock, after a warm-up,
over as many epochs as it takes; memory is that of all processes that belong to it.
"""

import time

_BEGUN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterable, Iterator  # noqa: E402
from contextlib import suppress  # noqa: E402
from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

BATCH, SIDE = 64, 224
_WARM_S = 0.7
_SPARSE = 50_021  # of so many bytes of a batch one is looked at


class Job(NamedTuple):
    data: Path
    cores: int


Epoch = Callable[[], Iterable[Any]]
"""Begins an epoch of (images, labels)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("function")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    import torch

    torch.set_num_threads(1)
    torch_mb = memory()["anonymous_mb"]
    make = getattr(import_module(options.module), options.function)
    imported = time.perf_counter()
    stream = _endless(make(Job(options.data, options.cores)))
    images, _ = next(stream)
    first = time.perf_counter()
    found = {
        "import_s": imported - _BEGUN,
        "first_batch_s": first - imported,
        "torch_mb": torch_mb,
        "shape": [str(images.dtype).removeprefix("torch."), *images.shape],
    }
    print(json.dumps(found | _rates(stream, options.seconds) | memory()), flush=True)
    sys.stdout.flush()
    end_tree()


def _endless(epoch: Epoch) -> Iterator[Any]:
    while True:
        yield from epoch()


def _rates(stream: Iterator[Any], seconds: float) -> dict[str, float]:
    begun = time.perf_counter()
    while time.perf_counter() < begun + _WARM_S:
        _touch(next(stream))
    begun, cpu, count = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() < begun + seconds:
        count += _touch(next(stream))
    wall, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
    return {"images_per_second": count / wall, "images_per_cpu_second": count / max(cpu, 1e-9)}


def _touch(batch: Any) -> int:
    images, labels = batch
    assert int(images.reshape(-1)[::_SPARSE].sum()) + int(labels.sum()) >= 0
    return len(images)


# --- the processes that belong to this one ---


def processes() -> list[int]:
    """This process and all that descend from it."""
    found = [os.getpid()]
    for pid in found:
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # has just ended
                found += map(int, tasks.read_text().split())
    return found


def memory() -> dict[str, float]:
    """MB in proportion to who shares them: of no file, and of mapped files."""
    kb = dict.fromkeys(("Pss_Anon", "Pss_Shmem", "Pss_File"), 0)
    for pid in processes():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for name, value in (line.split()[:2] for line in lines[1:]):
            if name[:-1] in kb:
                kb[name[:-1]] += int(value)
    anonymous = kb["Pss_Anon"] + kb["Pss_Shmem"]
    return {"anonymous_mb": anonymous / 1e3, "mapped_mb": kb["Pss_File"] / 1e3}


def cpu_seconds() -> float:
    ticks = 0
    for pid in processes():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def end_tree() -> None:
    """At once: some loaders need seconds to end, or never do."""
    for pid in processes()[:0:-1]:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    os._exit(0)


if __name__ == "__main__":
    main()
