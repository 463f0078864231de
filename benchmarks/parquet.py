"""Parquet as the Hub has it, beside the same images as WebDataset, and beside datasets.

python -m benchmarks.parquet FOLDER [--rounds N] [--hardware NAME]      10 minutes

FOLDER gets 960 photographs like ImageNet's, 100,000 samples of them with a short side of 160
pixels, and the environment of Hugging Face's datasets (loaders/), which writes the Parquet: row
groups of 100, uncompressed as its version 5 does, and in Snappy as older ones did. Trainyard reads
these files, and the same samples as WebDataset; datasets reads its own, with a torch DataLoader.
Indexing, opening and loading are measured in turns, each in a process of its own; the files lie in
memory.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.loader import measure
from benchmarks.loaders.catalogue import Contender
from benchmarks.loaders.environments import MAIN, install, python_of
from benchmarks.loaders.peers.listing import listed
from benchmarks.loaders.photographs import make_photographs
from benchmarks.loaders.tables import Table, with_spread
from benchmarks.loaders.variants import read_all, size_of, write_by_peer
from benchmarks.saving import listed as listed_facts
from benchmarks.saving import save
from trainyard.cli.printing import print_table
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.formats.webdataset import write

PHOTOGRAPHS, SAMPLES, SHARD = 960, 100_000, 5000
DATASETS = "datasets"
CORES = 2
_INDEX = "trainyard.data.index.build"
_NOTES = (
    "Medians over rounds, with the least and the most. Images/s: random crops of 224 x 224, flips, "
    "batches of 64 in random order over all samples, two threads or workers. The index of "
    "datasets is its copy of all images into Arrow files. Opening: of the saved index, or copy."
)


class Row(NamedTuple):
    name: str
    data: str  # a folder
    function: str  # of benchmarks.loaders.peers
    environment: str = MAIN

    @property
    def is_ours(self) -> bool:
        return self.environment == MAIN


ROWS = (
    Row("Trainyard, WebDataset", "webdataset", "trainyard_loader.make"),
    Row("Trainyard, Parquet, uncompressed", "parquet", "trainyard_loader.make"),
    Row("Trainyard, Parquet, Snappy", "parquet-snappy", "trainyard_loader.make"),
    Row("datasets, Pillow", "parquet", "datasets_loader.pil", DATASETS),
    Row("datasets, torchvision", "parquet", "datasets_loader.tensors", DATASETS),
)
INDEXED = ROWS[:4]

Figures = dict[str, dict[str, list[float]]]
"""By the name of a row, then "index", "open" and "rate"."""


def make_data(folder: Path) -> None:
    if reason := install(folder, DATASETS):
        raise SystemExit(f"datasets: {reason}")
    if not (folder / "small").exists():
        make_photographs(folder / "photographs", PHOTOGRAPHS)
        words = [sys.executable, "-m", "trainyard", "data", "pack", str(folder / "photographs")]
        words += [str(folder / "small"), "--format", "folder"]
        subprocess.run([*words, "--short", "160", "--quality", "90"], check=True)
    samples = folder / "samples"
    if not samples.exists():
        repeated(folder / "small" / "train", samples)
    for name, function in (("parquet", "write"), ("parquet-snappy", "write_snappy")):
        if not (folder / name).exists():
            shutil.rmtree(folder / "unfinished", ignore_errors=True)
            write_by_peer(folder, DATASETS, samples, folder / "unfinished", function)
            (folder / "unfinished").rename(folder / name)
    if not (folder / "webdataset").exists():
        write_shards(samples, folder / "webdataset")


def repeated(images: Path, samples: Path) -> None:
    """As many samples, as links to the images."""
    paths = sorted(images.glob("*/*.jpg"))
    for number in range(SAMPLES):
        path = paths[number % len(paths)]
        link = samples / path.parent.name / f"{number // len(paths):03d}-{path.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, link)


def write_shards(samples: Path, out: Path) -> None:
    """The same samples in the same order and in as many files."""
    out.mkdir()
    rows = iter(listed(samples))
    number = 0
    while some := list(islice(rows, SHARD)):
        contents = (
            EncodedSample(Path(path).read_bytes(), ".jpg", label, f"{number:03d}{place:05d}")
            for place, (path, label) in enumerate(some)
        )
        write(out / f"train-{number:05d}.tar", contents, None)
        number += 1


def seconds_of(folder: Path, row: Row, what: str) -> float:
    """Of a call in a process of its own, imports aside."""
    module, function = "benchmarks.loaders.peers.datasets_loader", "load"
    if row.is_ours:
        module, function = _INDEX, {"index": "build_index", "open": "open_index"}[what]
    elif what == "index":
        shutil.rmtree(folder / "hub", ignore_errors=True)
    code = f"import sys, time; from {module} import {function} as call; import {DATASETS}\n"
    if row.is_ours:
        code = code.partition("; import")[0] + "\n"
    code += "begun = time.perf_counter(); call(sys.argv[1]); print(time.perf_counter() - begun)"
    words = [str(python_of(folder, row.environment)), "-c", code, str(folder / row.data)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def rate_of(folder: Path, row: Row, seconds: float) -> float:
    module, _, function = row.function.partition(".")
    contender = Contender(row.name, module, function, row.environment, row.data, "")
    found = measure(folder, contender, folder / row.data, CORES, seconds)
    if isinstance(found, str):
        raise SystemExit(f"{row.name}: {found}")
    rate: float = found["images_per_second"]
    return rate


def measure_all(folder: Path, rounds: int, seconds: float) -> Figures:
    figures: Figures = {row.name: {"index": [], "open": [], "rate": []} for row in ROWS}
    for number in range(rounds):
        for row in random.Random(number).sample(INDEXED, len(INDEXED)):
            read_all(folder / row.data)
            for what in ("index", "open"):
                figures[row.name][what].append(seconds_of(folder, row, what))
            print(f"round {number + 1}: {row.name}: {figures[row.name]}", file=sys.stderr)
        for row in random.Random(number).sample(ROWS, len(ROWS)):
            figures[row.name]["rate"].append(rate_of(folder, row, seconds))
            print(f"round {number + 1}: {row.name}: {figures[row.name]}", file=sys.stderr)
    return figures


def table(folder: Path, figures: Figures) -> Table:
    rows = []
    for row in ROWS:
        about = figures[row.name]
        rows.append(
            [row.name, f"{size_of(folder / row.data) / 1e9:.2f}", spread(about["index"], 1, 2),
             spread(about["open"], 1000, 0), with_spread(about["rate"])]
        )  # fmt: skip
    columns = ["loader", "GB", "index, s", "open, ms", "images/s"]
    return Table(f"{SAMPLES:,} images", columns, rows)


def spread(values: list[float], scale: float, digits: int) -> str:
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return ""
    middle, least, most = ordered[len(ordered) // 2], ordered[0], ordered[-1]
    return f"{middle:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each rate")
    parser.add_argument("--only-data", action="store_true", help="make the data, then end")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-parquet.json and .md")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    make_data(folder)
    if options.only_data:
        return
    load = os.getloadavg()[0]
    figures = measure_all(folder, options.rounds, options.seconds)
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "mean_bytes": round(size_of(folder / "samples") / SAMPLES),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    found = table(folder, figures)
    print_table(found.columns, found.rows)
    if options.hardware:
        text = f"# Parquet, {options.hardware}\n\n{listed_facts(about)}\n\n{_NOTES}\n\n"
        text += f"## {found.markdown()}\n"
        save(f"{options.hardware}-parquet", about | {"results": figures}, text)


if __name__ == "__main__":
    main()
