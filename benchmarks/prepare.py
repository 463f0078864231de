"""Packing beside the converters of the field: images a second of one core, bytes copied.

python -m benchmarks.prepare FOLDER [--images 8000] [--rounds 5] [--hardware NAME]

Makes JPEGs of 110 kB on average in an image folder, then lets each contender write all of them in
one shuffled order into FOLDER, in turns, each in a process of its own. The clock runs from the
first image to the last file on disk: every contender's files are fsynced. Trainyard's shards have
their SHA-256 too; "+ SHA-256" says what that costs webdataset. The source is in memory.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.saving import listed, save

SHARD = 1000  # samples
CLASSES = 100
DECODED = 20  # of so many images one is taken where every image is decoded, which is slow

Samples = list[tuple[str, int]]


# --- the contenders: each writes `samples` into `out` ---


def trainyard(format: str) -> Callable[[Samples, Path], None]:
    """The work of one packing process; its start, a few tenths of a second, is not counted."""

    def write(samples: Samples, out: Path) -> None:
        from trainyard.data.index.build import open_index
        from trainyard.datasets.pack import worker
        from trainyard.datasets.pack.files import publish
        from trainyard.datasets.pack.pack import PackOptions, Selection
        from trainyard.datasets.pack.shards import plan_jobs

        index = open_index(str(Path(samples[0][0]).parent.parent))
        rows = {index.locate(row)[0]: row for row in range(len(index))}
        ids = np.array([rows[path] for path, _ in samples])
        options = PackOptions(format, shard_samples=SHARD)
        sources = {"train": worker.PackSource(index.path, index.fingerprint, False)}
        work = worker.PackJob(out, options, index.classes, index.classes, sources)
        signals = worker.Signals(multiprocessing.get_context("spawn"))
        worker.begin(work, signals)
        splits = {"train": Selection(index, ids, index.label[ids])}
        for job in plan_jobs(splits, options)["train"]:
            publish(worker.write_shard(job)[1])

    return write


def webdataset_writer(samples: Samples, out: Path) -> None:
    """webdataset's ShardWriter fed with the files' bytes: its best form."""
    import webdataset

    with webdataset.ShardWriter(f"{out}/train-%06d.tar", maxcount=SHARD, verbose=0) as sink:
        for number, (path, label) in enumerate(samples):
            with open(path, "rb") as file:
                image = file.read()
            sink.write({"__key__": f"{number:08d}", "jpg": image, "cls": label})


def webdataset_with_checksums(samples: Samples, out: Path) -> None:
    from trainyard.files import sha256

    webdataset_writer(samples, out)
    for path in out.iterdir():
        sha256(path)


def webdataset_decoding(samples: Samples, out: Path) -> None:
    """As the converter of webdataset-imagenet: decoded, and coded again at quality 100."""
    import webdataset

    with webdataset.ShardWriter(f"{out}/train-%06d.tar", maxcount=SHARD, verbose=0) as sink:
        for number, (path, label) in enumerate(samples[::DECODED]):
            image = Image.open(path).convert("RGB")
            sink.write({"__key__": f"{number:08d}", "jpg": image, "cls": label})


def tfrecord_writer(samples: Samples, out: Path) -> None:
    from tfrecord.writer import TFRecordWriter

    for start in range(0, len(samples), SHARD):
        writer = TFRecordWriter(f"{out}/train-{start // SHARD:05d}")
        for path, label in samples[start : start + SHARD]:
            with open(path, "rb") as file:
                image = file.read()
            features = {"image/encoded": (image, "byte"), "image/class/label": (label + 1, "int")}
            writer.write(features)
        writer.close()


def h5py_writer(samples: Samples, out: Path) -> None:
    """Row by row into variable-length bytes, as fuel's converter."""
    import h5py

    for start in range(0, len(samples), SHARD):
        part = samples[start : start + SHARD]
        with h5py.File(out / f"train-{start // SHARD:05d}.h5", "w") as file:
            kind = h5py.vlen_dtype(np.uint8)
            images = file.create_dataset("encoded_images", (len(part),), dtype=kind)
            targets = file.create_dataset("targets", (len(part), 1), dtype=np.int16)
            for row, (path, label) in enumerate(part):
                images[row] = np.fromfile(path, np.uint8)
                targets[row] = label


CONTENDERS: dict[str, Callable[[Samples, Path], None]] = {
    "Trainyard, WebDataset": trainyard("webdataset"),
    "Trainyard, HDF5": trainyard("hdf5"),
    "webdataset": webdataset_writer,
    "webdataset + SHA-256": webdataset_with_checksums,
    "webdataset, decoding": webdataset_decoding,
    "tfrecord": tfrecord_writer,
    "h5py": h5py_writer,
}
PEERS = ("webdataset", "tfrecord", "h5py")


# --- measuring ---


def make_source(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    images = [jpeg(rng) for _ in range(64)]
    for number in range(count):
        place = folder / f"n{number % CLASSES:08d}"
        place.mkdir(parents=True, exist_ok=True)
        image = images[rng.integers(len(images))]
        comment = b"\xff\xfe\x00\x12%016d" % number  # so that no two files are equal
        (place / f"{place.name}_{number}.JPEG").write_bytes(image[:2] + comment + image[2:])


def jpeg(rng: np.random.Generator) -> bytes:
    """500 x 375 pixels of coloured clouds and noise."""
    coarse = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
    clouds = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.float64)
    noisy = clouds + rng.normal(0, rng.uniform(5, 25), clouds.shape)
    out = io.BytesIO()
    image = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    image.save(out, "JPEG", quality=int(rng.integers(85, 97)))
    return out.getvalue()


def measure(name: str, source: Path, out: Path) -> None:
    """One contender, in this process; prints its seconds."""
    classes = sorted(path for path in source.iterdir() if path.is_dir())
    samples = [(str(path), n) for n, folder in enumerate(classes) for path in folder.iterdir()]
    samples.sort()
    random.Random(0).shuffle(samples)
    warm = out / "warm"  # what is imported and opened at first use is not counted
    warm.mkdir(parents=True)
    CONTENDERS[name](samples[: 2 * DECODED], warm)
    shutil.rmtree(warm)
    os.sync()
    wall, cpu = time.perf_counter(), time.process_time()
    CONTENDERS[name](samples, out)
    for path in files_in(out):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    images = len(samples[::DECODED]) if CONTENDERS[name] is webdataset_decoding else len(samples)
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    print(json.dumps({what: images / value for what, value in seconds.items()}))


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def run_rounds(source: Path, out: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": []} for name in CONTENDERS
    }
    for number in range(rounds):
        names = list(CONTENDERS)
        random.Random(number).shuffle(names)
        for name in names:
            shutil.rmtree(out, ignore_errors=True)
            words = [sys.executable, "-m", "benchmarks.prepare", "--contender", name]
            words += [str(source), str(out)]
            result = subprocess.run(words, capture_output=True, text=True, check=True)
            for what, rate in json.loads(result.stdout.splitlines()[-1]).items():
                found[name][what].append(rate)
            print(f"round {number + 1}: {name}: {result.stdout.strip()}", file=sys.stderr)
    shutil.rmtree(out, ignore_errors=True)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    best = max(statistics.median(found[name]["cpu"]) for name in PEERS)
    lines = [
        "| writer | images per second of CPU: median (min, max) | images per second of the clock "
        "| beside the best peer, CPU |",
        "|---|---|---|---|",
    ]
    for name, rates in found.items():
        cells = [
            f"{statistics.median(r):,.0f} ({min(r):,.0f}, {max(r):,.0f})" for r in rates.values()
        ][::-1]
        lines.append(
            f"| {name} | {cells[0]} | {cells[1]} | {statistics.median(rates['cpu']) / best:.2f} x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-prepare.json and .md")
    options = parser.parse_args()
    source, out = options.folder / "source", options.folder / "out"
    if not source.exists():
        make_source(source, options.images)
    sizes = [len(path.read_bytes()) for path in files_in(source) if path.suffix == ".JPEG"]
    load = os.getloadavg()[0]
    found = run_rounds(source, out, options.rounds)
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "images": len(sizes),
        "mean_bytes": round(statistics.mean(sizes)),
        "rounds": options.rounds,
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    print(table(found))
    if options.hardware:
        text = f"# Packing, bytes copied\n\n{listed(about)}\n\n{table(found)}\n"
        save(f"{options.hardware}-prepare", about | {"images_per_second": found}, text)


if __name__ == "__main__":
    if "--contender" in sys.argv:
        place = sys.argv.index("--contender")
        measure(sys.argv[place + 1], Path(sys.argv[place + 2]), Path(sys.argv[place + 3]))
    else:
        main()
