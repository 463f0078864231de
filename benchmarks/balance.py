"""What balancing classes gains on Fashion-MNIST with 1,000 to 20 images a class: balanced accuracy.

python -m benchmarks.balance FOLDER [--images /usr/share/datasets/fashion-mnist] [--seeds 5]
    [--steps 100] [--hardware NAME] [--out benchmarks/results]

The images are those of Debian's package dataset-fashion-mnist. Class sizes fall geometrically to a
fiftieth; validation has 100 test images of each class. Ways differ in their keys alone.
"""

import argparse
import gzip
import statistics
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import trainyard
from benchmarks.saving import RESULTS, save

WAYS: dict[str, dict[str, object]] = {
    "as it is": {},
    "data.balance = 1": {"data.balance": 1.0},
    "loss.class_weights = balanced": {"loss.class_weights": "balanced"},
}
METRICS = {"balanced_accuracy": "balanced accuracy", "macro_f1": "macro-F1", "loss": "loss"}
CLASSES, MOST, LEAST, PER_CLASS = 10, 1000, 20, 100


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in a gzipped IDX file of bytes."""
    content = gzip.decompress(path.read_bytes())
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def write_images(source: Path, folder: Path) -> Path:
    """The chosen images as PNG files, and the list of them."""
    sizes = np.geomspace(MOST, LEAST, CLASSES).round().astype(int).tolist()
    lines = ["path,label,split"]
    for split, stem, counts in (
        ("train", "train", sizes),
        ("val", "t10k", [PER_CLASS] * CLASSES),
    ):
        images = read_idx(source / f"{stem}-images-idx3-ubyte.gz")
        labels = read_idx(source / f"{stem}-labels-idx1-ubyte.gz")
        (folder / split).mkdir(parents=True, exist_ok=True)
        for label, count in enumerate(counts):
            for number in np.flatnonzero(labels == label)[:count].tolist():
                Image.fromarray(images[number]).save(folder / split / f"{number:05d}.png")
                lines.append(f"{split}/{number:05d}.png,{label},{split}")
    listed = folder / "images.csv"
    listed.write_text("\n".join(lines) + "\n")
    return listed


def run_one(listed: Path, folder: Path, way: str, *, seed: int, steps: int) -> dict[str, float]:
    """The last evaluation of one run."""
    keys = WAYS[way] | {
        "data.train": f"{listed}#train",
        "data.val": f"{listed}#val",
        "run.seed": seed,
        "run.length": f"{steps} steps",
        "run.eval_every": "0 steps",
        "run.save_every": "0 steps",
    }
    name = f"{list(WAYS).index(way)}-{seed}"
    last = trainyard.train("digits", run=folder / "runs" / name, overrides=keys).last
    return {key: float(last[key]) for key in METRICS}


def table(found: dict[str, list[dict[str, float]]]) -> str:
    lines = [f"| way | {' | '.join(METRICS.values())} |", "|---|" + "---|" * len(METRICS)]
    for way, runs in found.items():
        cells = []
        for key in METRICS:
            values = [run[key] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            form = ".3f" if key == "loss" else ".1%"
            cells.append(f"{statistics.mean(values):{form}} ± {spread:{form}}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hardware", default="2-core-vm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    listed = write_images(options.images, options.folder)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way in WAYS:
            found[way].append(run_one(listed, options.folder, way, seed=seed, steps=options.steps))
            print(seed, way, found[way][-1], flush=True)
    text = (
        "# Balancing classes\n\n"
        f"Fashion-MNIST, {MOST:,} to {LEAST} training images a class, {PER_CLASS} validation "
        f"images a class; the `digits` recipe, {options.steps} steps of 64 images; mean and "
        f"standard deviation of {options.seeds} seeds. Hardware: {options.hardware}. The "
        "validation classes are equally large, so balanced accuracy is top-1.\n\n"
    )
    save(f"{options.hardware}-balance", found, text + table(found), folder=options.out)
    print(table(found))


if __name__ == "__main__":
    main()
