"""Images a second from local storage that answers an open, and a read, after a while.

python -m benchmarks.slow_storage FOLDER [--base CHECKOUT] [--pairs 3] [--hardware NAME]

Needs libfuse 3 (libfuse3-dev, pkg-config, a C compiler). FOLDER is for 3 GB of photographs, as
files and as 6,000 shards of 3. CHECKOUT is another working tree, built, which takes turns. The
view is mounted anew for each turn, so that the kernel remembers nothing.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

HERE = Path(__file__)
PHOTOGRAPHS, SHARDS, IN_SHARD = 6000, 6000, 3
BATCH, THREADS = 256, 16
DELAYS_MS = {1: 4096, 50: 1536}  # and the images that are measured
SOURCES = {"image files": "photographs", f"{SHARDS:,} shards": "shards"}


def prepare(folder: Path) -> None:
    """Makes what is not there yet: the data, their indices, and the program of the view."""
    from benchmarks.loaders.photographs import make_photographs
    from trainyard.data.index.build import open_index

    images, shards = folder / "photographs", folder / "shards"
    made = make_photographs(images, PHOTOGRAPHS)
    shards.mkdir(exist_ok=True)
    choice = random.Random(0)
    for number in range(SHARDS):
        path = shards / f"{number:05d}.tar"
        if not path.exists():
            with tarfile.open(path, "w") as tar:
                for photograph in choice.sample(made, IN_SHARD):
                    tar.add(images / photograph.name, photograph.name)
    for each in (images, shards):
        open_index(str(each))
    flags = subprocess.run(
        ["pkg-config", "fuse3", "--cflags", "--libs"], check=True, capture_output=True, text=True
    )
    source = [str(HERE.with_suffix(".c")), "-o", str(folder / "view")]
    subprocess.run(["cc", "-O2", *source, *flags.stdout.split()], check=True)


@contextmanager
def view(folder: Path, name: str, delay_ms: int) -> Iterator[Path]:
    """A view of the data, with all that it has read forgotten."""
    there = folder / f"{name}-{delay_ms}-ms"
    there.mkdir(exist_ok=True)
    variables = os.environ | {"FOLDER": str(folder / name), "DELAY_MS": str(delay_ms)}
    options = ["-o", "max_threads=1024,ro"]
    subprocess.run([folder / "view", there, *options], check=True, env=variables)
    try:
        yield there
    finally:
        subprocess.run(["fusermount3", "-u", "-z", there], check=True)


def measure(location: str, images: int, seed: int) -> dict[str, float]:
    """Images a second after the first batches, and the seconds to the first one."""
    from trainyard.data.decode.crops import RandomResizedCrop
    from trainyard.data.index.build import open_index
    from trainyard.data.loader.loader import Loader
    from trainyard.data.loader.spec import LoaderSpec
    from trainyard.data.sampler.plan import ShuffledPlan

    index = open_index(location)
    spec = LoaderSpec(
        plan=ShuffledPlan(len(index), global_batch=BATCH, seed=seed),
        crop=RandomResizedCrop(seed=seed, scale=(0.08, 1.0), ratio=(0.75, 4 / 3), flip=0.5),
        image_size=224,
        stop=1 << 40,
        threads=THREADS,
    )
    begun = time.perf_counter()
    with Loader(index, spec) as loader:
        next(loader)
        first = time.perf_counter() - begun
        for _ in range(4):  # some are ready, or nearly so
            next(loader)
        begun, count = time.perf_counter(), 0
        while count < images:
            count += len(next(loader).ids)
        return {"rate": count / (time.perf_counter() - begun), "first": first}


def turn(tree: Path, location: Path, images: int, seed: int) -> dict[str, float]:
    """`measure` by the code of a working tree."""
    command = [sys.executable, str(HERE), str(location), "--measure", str(images), str(seed)]
    variables = os.environ | {"PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=tree, env=variables, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(found: dict[str, dict[str, list[dict[str, float]]]], facts: str) -> str:
    lines = [
        f"Images a second of a rank with {THREADS} threads from storage that answers each open,",
        "and each read, after a while; seconds to the first batch. Medians (least to most), in",
        f"turns; {facts}. {THREADS} threads that open and read one image after the other have",
        f"{THREADS * 500:,} at 1 ms, more than the cores decode, and {THREADS * 10} at 50 ms.",
        "",
        "| storage | code | images/s | first batch |",
        "|---|---|---|---|",
    ]
    for row, trees in found.items():
        for tree, turns in trees.items():
            rate, first = ([each[key] for each in turns] for key in ("rate", "first"))
            rates = f"{statistics.median(rate):,.0f} ({min(rate):,.0f} to {max(rate):,.0f})"
            lines.append(f"| {row} | {tree} | {rates} | {statistics.median(first):.1f} s |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, help="another working tree, built")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-slow-storage.json and .md")
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(str(options.folder), *options.measure)))
        return
    from benchmarks.saving import save

    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    trees = {"before": options.base.resolve()} if options.base else {}
    trees["now"] = HERE.resolve().parents[1]
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for (delay_ms, images), (name, data) in product(DELAYS_MS.items(), SOURCES.items()):
        turns = found.setdefault(f"{name}, {delay_ms} ms", {tree: [] for tree in trees})
        for seed, (tree, path) in product(range(options.pairs), trees.items()):
            with view(folder, data, delay_ms) as location:
                turns[tree].append(turn(path, location, images, seed))
            print(delay_ms, name, tree, turns[tree][-1], flush=True)
    text = table(found, f"{os.cpu_count()} cores, {options.pairs} turns each")
    print(text)
    if options.hardware:
        save(f"{options.hardware}-slow-storage", {"rates": found}, text)


if __name__ == "__main__":
    main()
