"""What it costs to index a large tar, and to open a saved index of fourteen million samples.

python -m benchmarks.index [--out benchmarks/results]

Python's tarfile reads the same file, in turns; every figure is of a fresh process, and the file is
in memory, so that no disk is measured.
"""

import argparse
import os
import platform
import statistics
import tarfile
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.saving import save
from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.formats.tar import members
from trainyard.data.index.build import build_index, index_scan, open_index
from trainyard.data.storage.location import find_place
from trainyard.data.storage.open import open_source

MEMBERS = 1_300_000
SAMPLES, CLASSES, SHARD = 14_197_122, 21_841, 1000  # ImageNet-21K, fall 2011
IMAGE_BYTES = 700  # of a member; content is jumped over, and this much keeps the file small
ROUNDS = {"tar": 3, "saved": 9}

Actions = dict[str, tuple[Callable[[str], object], Path]]


# --- what is measured, each in a fresh process ---


def walk_headers(path: str) -> object:
    with closing(open_source(path)) as tar:
        return sum(1 for _ in members(tar))


def list_by_tarfile(path: str) -> object:
    with tarfile.open(path) as tar:
        return tar.getmembers()


def open_and_locate(path: str) -> object:
    """As a rank does for its first ten thousand samples, all over the data set."""
    index = open_index(path)
    return [index.locate(int(n)) for n in np.random.default_rng(0).integers(0, len(index), 10**4)]


def cost(action: Callable[[str], object], path: str) -> dict[str, float]:
    """Seconds, by the clock and of the CPU, and the growth in bytes of memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    resident, proportional = memory("status", "VmRSS"), memory("smaps_rollup", "Pss")
    started, started_cpu = time.perf_counter(), time.process_time()
    result = action(path)
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    grown = {
        "seconds": seconds,
        "cpu": cpu,
        "peak": memory("status", "VmHWM") - resident,
        "resident": memory("status", "VmRSS") - resident,
        "proportional": memory("smaps_rollup", "Pss") - proportional,
    }
    del result  # counted as long as it is held
    return grown


def memory(file: str, field: str) -> float:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024


def medians(actions: Actions, rounds: int) -> dict[str, dict[str, Any]]:
    """The costs of actions, taken in turns: median, least and most of each."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, (action, path) in actions.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                found[name].append(fresh.submit(cost, action, str(path)).result())
    return {
        name: {
            field: {
                "median": statistics.median(c[field] for c in costs),
                "min": min(c[field] for c in costs),
                "max": max(c[field] for c in costs),
            }
            for field in costs[0]
        }
        for name, costs in found.items()
    }


# --- what it is measured on ---


def write_tar(path: Path, count: int) -> None:
    """A thousand class folders in one tar."""
    content = bytes(-(-IMAGE_BYTES // 512) * 512)
    with open(path, "wb", buffering=1 << 20) as file:
        for number in range(count):
            wnid = f"n{number * 1000 // count:08d}"
            info = tarfile.TarInfo(f"imagenet/images/{wnid}/{wnid}_{number}.JPEG")
            info.size = IMAGE_BYTES
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + content)
        file.write(bytes(1024))


def save_large_index(folder: Path, shards: int) -> None:
    """The index of as many samples as ImageNet-21K has, in empty shards."""
    folder.mkdir()
    for number in range(shards):
        tarfile.open(folder / f"imagenet-{number:06d}.tar", "w").close()
    place = find_place(str(folder))
    classes = [f"n{number:08d}" for number in range(CLASSES)]
    rows = large_rows(place.names)
    index_scan(
        Scan(place, "tar", classes, place.watched(place.names), rows), folder / ".trainyard-index"
    )


def large_rows(names: tuple[str, ...]) -> Iterator[FileRows]:
    for start in range(0, SAMPLES, SHARD):
        rows = range(start, min(start + SHARD, SAMPLES))
        name = names[start * len(names) // SAMPLES]
        offsets = array("q", range(start * 110_000, start * 110_000 + len(rows) * 110_000, 110_000))
        sizes = array("q", [109_000]) * len(rows)
        yield FileRows(name, offsets, sizes, array("i", [row % CLASSES for row in rows]))


# --- what is printed ---


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"1. A tar of {MEMBERS:,} members of {IMAGE_BYTES} bytes, per million members:",
        "",
        "| | seconds: median (min to max) | of the CPU | peak memory |",
        "|---|---|---|---|",
    ]
    million = MEMBERS / 1e6
    for name, costs in results["tar"].items():
        seconds = spread(costs["seconds"], 1 / million, "s", 2)
        cpu, peak = costs["cpu"]["median"] / million, costs["peak"]["median"] / million / 1e6
        lines.append(f"| {name} | {seconds} | {cpu:.2f} s | {peak:.1f} MB |")
    lines += [
        "",
        f"2. The saved index of {SAMPLES:,} samples:",
        "",
        "| | milliseconds: median (min to max) | of the CPU | resident | proportional |",
        "|---|---|---|---|---|",
    ]
    for name, costs in results["saved"].items():
        seconds = spread(costs["seconds"], 1000, "ms", 0)
        cpu = costs["cpu"]["median"] * 1000
        resident, share = (costs[f]["median"] / 1e6 for f in ("resident", "proportional"))
        lines.append(f"| {name} | {seconds} | {cpu:.0f} ms | {resident:.1f} MB | {share:.1f} MB |")
    return "\n".join(lines) + "\n"


def spread(values: dict[str, float], scale: float, unit: str, digits: int) -> str:
    median, low, high = (f"{values[key] * scale:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} {unit} ({low} to {high})"


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "cpu")
    return f"{os.cpu_count()}x-{model}".replace(" ", "-").lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for a table and the figures as JSON")
    parser.add_argument("--scratch", help="folder for 2 GB of temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        tar, one, many = (Path(scratch) / name for name in ("images.tar", "one", "many"))
        shards = -(-SAMPLES // SHARD)
        write_tar(tar, MEMBERS)
        save_large_index(one, 1)
        save_large_index(many, shards)
        actions: dict[str, Actions] = {
            "tar": {
                "Trainyard: the headers alone": (walk_headers, tar),
                "Trainyard: `data index`, saved": (build_index, tar),
                "Python: `tarfile.getmembers`": (list_by_tarfile, tar),
            },
            "saved": {
                "open, of one tar": (open_index, one),
                f"open, of {shards:,} shards, each looked at for changes": (open_index, many),
                "open, and 10,000 random samples": (open_and_locate, one),
            },
        }
        results = {part: medians(actions[part], ROUNDS[part]) for part in actions}
    text = table(results)
    print(text)
    if options.out:
        about = {"hardware": hardware(), "python": platform.python_version(), "rounds": ROUNDS}
        heading = f"# Indexing, {hardware()}, Python {platform.python_version()}\n\n"
        name = f"{hardware()}-index"
        save(name, {**about, "results": results}, heading + text, folder=options.out)


if __name__ == "__main__":
    main()
