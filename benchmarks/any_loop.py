"""timm's train.py and torchvision's reference with their loader and with ours, whole epochs.

python -m benchmarks.any_loop FOLDER --timm CHECKOUT --vision CHECKOUT
    [--images 1024] [--rounds 3] [--networks small resnet18] [--hardware NAME]

The changes are those of docs/other-loops.md. Photographs of full size are made in FOLDER; the page
cache has them. An epoch is the second of two, with the evaluation of a tenth of the images before
it: from the last update of the first epoch to that of the second. Loaders have one or two workers,
ours as many threads; the network computes in one thread; all share the cores of the machine. The
turns are interleaved. The last table is of the loader alone: the wrapper beside Loader, and the
first batch on an indexed set.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.head_to_head import Problem, missing_runs, reference, spread, timm_train
from benchmarks.loaders.measure import cpu_seconds
from benchmarks.loaders.photographs import make_photographs
from benchmarks.saving import save
from tests.any_loop.patched import FILES, patched
from trainyard import Loader, LoaderSpec, RandomResizedCrop, ShuffledPlan, open_index
from trainyard.torch import loader

ROOT = Path(__file__).parent.parent
NETWORKS = {
    "small": Problem("test_vit", 160, 64, 2, 0.01, {}),
    "resnet18": Problem("resnet18", 128, 64, 2, 0.01, {}),
}
SHARES = {"small": 1, "resnet18": 4}  # the latter has a quarter of the images
PROGRAMS = {"timm": timm_train, "vision": reference}
NAMES = {"timm": "timm's `train.py`", "vision": "torchvision's reference"}
BATCH, BATCHES, ALONE = 64, 60, 5  # of the loader alone
Run = dict[str, Any]


def prepare(folder: Path, images: int) -> None:
    for network, share in SHARES.items():
        place = folder / network
        if not place.exists():
            make_photographs(place / "train", images // share)
            for path in sorted((place / "train").glob("*/*"))[::10]:
                to = place / "val" / path.parent.name
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)


def run(job: Run, options: argparse.Namespace) -> Run:
    """The second epoch of one run."""
    program, network, cores, ours = (job[key] for key in ("program", "network", "cores", "ours"))
    of, data = NETWORKS[network], options.folder / network
    place = options.folder / "runs" / f"{program}-{network}-{cores}-{ours}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    words = PROGRAMS[program](of, data, place, options)
    if ours:
        script = patched(program, getattr(options, program), place)
        text = script.read_text()
        for given in ("args.data_dir, args.batch_size, ", "args.data_path, args.batch_size, "):
            text = text.replace(given, f"{given}threads={cores}, ")
        script.write_text(text)
        words[0] = str(script)
    steps = options.images // SHARES[network] // of.batch
    marks = f"{steps},{steps + steps // 2},{2 * steps}"
    watched = ["-m", "benchmarks.head.epochs", str(place / "marks"), "0", marks]
    with (place / "log").open("w") as log:
        subprocess.run(
            [sys.executable, *watched, *words, f"--workers={cores}"],
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    begun, middle, ended = map(json.loads, (place / "marks").read_text().splitlines())
    return {
        **job,
        "epoch_s": ended["time"] - begun["time"],
        "cpu_s": ended["cpu_s"] - begun["cpu_s"],
        "memory_mb": middle["anonymous_mb"],
        "load": os.getloadavg()[0],
    }


# --- the loader alone ---


def alone(data: Path, rounds: int) -> dict[str, float]:
    """Images for each CPU second of Loader and of the wrapper, in turns; first batch, s."""
    index = open_index(data / "train")
    plan = ShuffledPlan(len(index), global_batch=BATCH, seed=0)
    crop = RandomResizedCrop(seed=0, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)
    spec = LoaderSpec(plan=plan, crop=crop, image_size=224, threads=1, stop=2 * BATCHES)
    keys: dict[str, Any] = {"dtype": torch.uint8, "threads": 1}
    makers: dict[str, Callable[[], Any]] = {
        "Loader": lambda: Loader(index, spec),
        "wrapper": lambda: loader(data, BATCH, **keys, channels_last=True),
        "planes": lambda: loader(data, BATCH, **keys),
    }
    rates: dict[str, list[float]] = {name: [] for name in makers}
    firsts = []
    for _, (name, make) in product(range(rounds), makers.items()):
        begun = time.perf_counter()
        with make() as source:
            batches = itertools.chain.from_iterable(itertools.repeat(source))
            next(batches)
            firsts += [time.perf_counter() - begun] if name == "wrapper" else []
            cpu = cpu_seconds()
            for _ in itertools.islice(batches, BATCHES):
                pass
            rates[name].append(BATCHES * BATCH / (cpu_seconds() - cpu))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {**medians, "first_batch_s": statistics.median(firsts)}


# --- the tables ---


def text_of(found: list[Run], measured: dict[str, float], options: argparse.Namespace) -> str:
    rows = []
    for program, network, cores in product(PROGRAMS, NETWORKS, (1, 2)):
        case = {"program": program, "network": network, "cores": cores}
        both = [
            [one for one in found if {**one, **case, "ours": mine} == one] for mine in (False, True)
        ]
        if all(both):
            theirs, ours = (statistics.median(o["epoch_s"] for o in same) for same in both)
            ratio = ours / theirs
            for name, same in zip(("theirs", "ours"), both, strict=True):
                figures = " | ".join(
                    spread([one[key] for one in same]) for key in ("epoch_s", "cpu_s", "memory_mb")
                )
                share = f"{ratio:.2f} x" if name == "ours" else ""
                where = f"{NAMES[program]} | {network} | {cores} | {name} | {len(same)}"
                line = f"| {where} | {figures} | {share} |"
                rows.append((-ratio, line))
    rows.sort(key=lambda row: row[0])  # where ours takes longest, first
    loads = [one["load"] for one in found]
    less = {name: 100 * (1 - rate / measured["Loader"]) for name, rate in measured.items()}
    return f"""# The loader in the loops of timm and torchvision, {options.hardware}

Whole second epochs with the evaluation before them, of {options.images:,} JPEGs of full size
(small: test_vit at 160 pixels) and of a quarter of them (resnet18 at 128 pixels), batches of 64;
median (least to most) of rounds in turns. Workers are processes of their loaders, threads of ours.
Other work ran on the machine: its load was {min(loads):.1f} to {max(loads):.1f}. CPU seconds are of
all processes of the run; memory, in MB, is anonymous and in the middle of the epoch. Sorted by what
ours takes of their time.

| program | network | workers | loader | rounds | epoch, s | CPU, s | memory | ours takes |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(line for _, line in rows)}

The loader alone, one thread, pixels of 224, medians of {ALONE} rounds in turns: Loader gives
{measured["Loader"]:,.0f} images for each CPU second, the wrapper {measured["wrapper"]:,.0f} in the
same layout, {less["wrapper"]:.1f}% less, and {measured["planes"]:,.0f} in torch's, a plane for each
colour, {less["planes"]:.1f}% less. The first batch of an indexed set came after
{measured["first_batch_s"]:.2f} s, making the loader included.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm", type=Path, required=True, help="a checkout of timm's repository")
    parser.add_argument("--vision", type=Path, required=True, help="one of torchvision's")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--hardware", default=f"{os.cpu_count()}-core")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    for name, file in FILES.items():
        place = getattr(options, name).absolute()
        if not (place / file).is_file():
            parser.error(f"--{name}: {place / file} is missing: give the folder of a checkout")
        setattr(options, name, place)
    prepare(options.folder, options.images)
    jobs = (
        {"network": network, "round": number, "program": program, "cores": cores, "ours": ours}
        for network, number, program, cores in product(
            options.networks, range(options.rounds), PROGRAMS, (1, 2)
        )
        for ours in (bool(number % 2), not number % 2)
    )
    found = missing_runs(options.folder, jobs, lambda job: run(job, options))
    measured = alone(options.folder / "small", ALONE)
    text = text_of(found, measured, options)
    print(text)
    save(f"{options.hardware}-any-loop", {"runs": found, "alone": measured}, text)


if __name__ == "__main__":
    main()
