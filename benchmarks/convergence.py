"""Where replicas end that agree by all-reduce, by gossip, and now and then: four of them.

python -m benchmarks.convergence FOLDER [--hardware NAME] [--out benchmarks/results]
    [--only NAME ...] [--data digits photographs] [--epochs 10] [--lr 0.1]
    [--seeds 5] [--known JSON]
python -m benchmarks.convergence FOLDER --make-data

Two small real problems: scikit-learn's scanned digits, and tiles of photographs of scikit-learn's
and scikit-image's, to be told from which photograph they are. The `digits` recipe by SGD with
another [average] section, and nothing else changed: the same images in the same order. Four ranks
of two nodes, by gloo; FOLDER is for the data and the runs. 30 minutes on two cores. What an earlier
result has of the same epochs and learning rate is not run again. --make-data makes FOLDER/digits
and FOLDER/photographs, and nothing else.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.saving import save
from trainyard.datasets.prepare.digits import prepare_digits

RANKS, RANKS_PER_NODE = 4, 2
FIRST_PORT = 21_000  # below those that the kernel gives to anyone
EXPONENTIAL = {"name": "gossip", "topology": "one-peer-exponential"}
DILOCO = {"name": "periodic", "every": 8, "outer_lr": 0.7, "outer_momentum": 0.9}
# Keys of [average].
CONTENDERS: dict[str, dict[str, Any]] = {
    "all-reduce": {"name": "allreduce"},
    "gossip, complete": {"name": "gossip", "topology": "complete"},
    "gossip, ring": {"name": "gossip", "topology": "ring"},
    "gossip, one-peer exponential": EXPONENTIAL,
    "the same, no overlap": EXPONENTIAL | {"overlap": False},
    "the same, sent as bf16": EXPONENTIAL | {"compress": "bf16"},
    "gossip, alternating exponential ring": {
        "name": "gossip",
        "topology": "alternating-exponential-ring",
    },
    "gossip between nodes, all-reduce inside": EXPONENTIAL | {"hierarchical": True},
    "periodic, every 8 steps": {"name": "periodic", "every": 8},
    "periodic, every 8, DiLoCo's momentum": DILOCO,
    "periodic, every 8, overlapped, int8": {
        "name": "periodic",
        "every": 8,
        "overlap": True,
        "compress": "int8",
    },
}
PHOTOGRAPHS = "astronaut brick camera cell chelsea coffee grass gravel hubble_deep_field retina"
_TILE = 32  # pixels
_STRIDES = {"train": 28, "val": 16}

Run = dict[str, Any]
Job = tuple[str, str, int]  # data, contender, seed


# --- the photographs ---


def prepare_photographs(folder: Path) -> None:
    """Tiles of photographs, a folder for each; every fourth stretch of columns is to validate."""
    if (folder / "val").exists():
        return
    for name, pixels in photographs():
        for split, stride in _STRIDES.items():
            rows, columns = (range(0, size - _TILE, stride) for size in pixels.shape[:2])
            for y, x in itertools.product(rows, columns):
                # None that shows pixels of both.
                if {split_of(column) for column in (x, x + _TILE - 1)} == {split}:
                    tile = folder / split / name / f"{y}-{x}.png"
                    tile.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels[y : y + _TILE, x : x + _TILE]).save(tile)


def split_of(column: int) -> str:
    return "val" if (column // 64) % 4 == 3 else "train"


def photographs() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and pixels, half of their size and no wider than 400."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    samples = load_sample_images()
    images = dict(zip(("china", "flower"), samples.images, strict=True))
    images |= {name: getattr(data, name)() for name in PHOTOGRAPHS.split()}
    for name, pixels in images.items():
        image = Image.fromarray(pixels).convert("RGB")
        image.thumbnail((400, 400))
        yield name, np.asarray(image)


# --- the runs ---


def overrides(folder: Path, job: Job, epochs: int, lr: float) -> dict[str, str]:
    data, contender, seed = job
    keys: dict[str, Any] = {
        **{f"average.{key}": value for key, value in CONTENDERS[contender].items()},
        "optim.name": "sgd",
        "optim.lr": lr,
        "optim.weight_decay": 1e-3,
        "data.train": f"{folder}/{data}/train",
        "data.val": f"{folder}/{data}/val",
        "data.threads": 1,
        "run.length": f"{epochs} epochs",
        "run.seed": seed,
        "run.eval_every": "0 steps",
        "run.save_every": "0 steps",
    }
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()
    }


def train_all(
    rank: int, jobs: list[Job], folder: Path, epochs: int, lr: float, results: Any
) -> None:
    """What each of the ranks does: one run after another."""
    import torch
    from rich.console import Console

    from trainyard.config import load_recipe
    from trainyard.run.train import train
    from trainyard.world import World

    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    node, local_rank = divmod(rank, RANKS_PER_NODE)
    world = World(rank, RANKS, local_rank, RANKS_PER_NODE, node, RANKS // RANKS_PER_NODE)
    torch.set_num_threads(1)
    for number, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = str(FIRST_PORT + number)
        started = time.perf_counter()
        run_folder = folder / "run" / f"{number}"
        config = load_recipe("digits", overrides(folder, job, epochs, lr))
        outcome = train(config, run_folder, world=world, console=Console(quiet=True))
        if rank == 0:
            lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").open()]
            train_loss = next(line["loss"] for line in reversed(lines) if line["kind"] == "train")
            results.put(
                {
                    **dict(zip(("data", "contender", "seed"), job, strict=True)),
                    "steps": outcome.step,
                    "top1": outcome.last["top1"],
                    "val_loss": outcome.last["loss"],
                    "train_loss": train_loss,
                    "curve": [line["loss"] for line in lines if line["kind"] == "train"],
                    "consensus_distance": outcome.last.get("consensus_distance"),
                    "seconds": time.perf_counter() - started,
                }
            )


def known(options: argparse.Namespace) -> list[Run]:
    """Runs of an earlier result."""
    if options.known is None:
        return []
    result = json.loads(options.known.read_text())
    for key in ("epochs", "lr"):
        if result[key] != getattr(options, key):
            raise SystemExit(f"{options.known} has {key} = {result[key]}")
    return list(result["runs"])


def runs(options: argparse.Namespace) -> list[Run]:
    import torch.multiprocessing as multiprocessing

    found = known(options)
    done = {(one["data"], one["contender"], one["seed"]) for one in found}
    wanted = itertools.product(options.data, range(options.seeds), options.only)
    jobs = [(data, name, seed) for data, seed, name in wanted if (data, name, seed) not in done]
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for data in options.data:
            (Path(scratch) / data).symlink_to((options.folder / data).resolve())
        results = multiprocessing.get_context("spawn").Queue()
        arguments = (jobs, Path(scratch), options.epochs, options.lr, results)
        context = multiprocessing.spawn(train_all, arguments, nprocs=RANKS, join=False)  # type: ignore[no-untyped-call]
        for _ in jobs:
            while results.empty():
                context.join(timeout=1)  # raises where a rank has failed
            found.append(results.get())
            write(found, options)  # what there is, should a later run fail
            one = found[-1]
            print(
                f"{one['data']}, {one['contender']}, seed {one['seed']}: {one['top1']:.2%}, "
                f"{one['seconds']:.0f} s",
                flush=True,
            )
    return found


# --- the table ---


def table(found: list[Run]) -> str:
    lines = [
        "| data | averager | seeds | top-1, % | against all-reduce | loss | training loss "
        "| distance |",
        "|---|---|---|---|---|---|---|---|",
    ]
    places = {(one["data"], list(CONTENDERS).index(one["contender"])) for one in found}
    for data, name in ((data, list(CONTENDERS)[place]) for data, place in sorted(places)):
        same = [one for one in found if (one["data"], one["contender"]) == (data, name)]
        base = [one for one in found if (one["data"], one["contender"]) == (data, "all-reduce")]
        top1 = [one["top1"] * 100 for one in same]
        distances = [one["consensus_distance"] for one in same]
        distance = "" if None in distances else f"{statistics.median(distances):.3f}"
        lines.append(
            f"| {data} | {name} | {len(same)} "
            f"| {statistics.mean(top1):.2f} ({min(top1):.1f} to {max(top1):.1f}) "
            f"| {gap(same, base)} | {mean(same, 'val_loss'):.3f} | {mean(same, 'train_loss'):.3f} "
            f"| {distance} |"
        )
    return "\n".join(lines) + "\n"


def gap(found: list[Run], base: list[Run]) -> str:
    """Points of top-1 above `base`, mean and standard error of the differences by seed."""
    top1 = {one["seed"]: one["top1"] for one in base}
    gaps = [100 * (one["top1"] - top1[one["seed"]]) for one in found if one["seed"] in top1]
    if found == base or len(gaps) < 2:
        return ""
    return f"{statistics.mean(gaps):+.2f} ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.2f}"


def mean(found: list[Run], key: str) -> float:
    return float(statistics.mean(one[key] for one in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware", default=f"{os.cpu_count()}-core CPU")
    parser.add_argument("--out", type=Path, help="folder for the table and the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--data", nargs="+", default=["digits", "photographs"])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--known", type=Path, metavar="JSON", help="a result to add to")
    parser.add_argument("--make-data", action="store_true", help="no runs")
    options = parser.parse_args()
    prepare_digits(options.folder / "digits")
    prepare_photographs(options.folder / "photographs")
    if options.make_data:
        return
    found = runs(options)
    print(table(found))


def write(found: list[Run], options: argparse.Namespace) -> None:
    if options.out is None:
        return
    about = {
        "hardware": options.hardware,
        "epochs": options.epochs,
        "lr": options.lr,
        "average": CONTENDERS,
    }
    heading = (
        f"# Four replicas, {options.hardware}\n\n"
        f"{options.epochs} epochs, SGD with a learning rate of {options.lr}, 16 images per replica "
        "and step. Top-1 is of the mean of "
        "the replicas: mean over the seeds (least to most), and its difference from all-reduce of "
        "the same seed in points, with its standard error. Distance: root mean square over the "
        "replicas of how far their weights lie from the mean, at the end.\n\n"
    )
    name = f"{options.hardware}-convergence"
    save(name, {**about, "runs": found}, heading + table(found), folder=options.out)


if __name__ == "__main__":
    main()
