"""Processor seconds of this working tree and of another one, in turns.

python -m benchmarks.trees FOLDER --base CHECKOUT [--pairs 5] [--hardware NAME]

FOLDER is for 100,000 small files in 1,000 class folders, 1,500 photographs and a list of them.
CHECKOUT is another working tree, built. Processor seconds, of a program and its children, hold on
a busy machine too.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
from compileall import compile_dir
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLASSES, FILES, PHOTOGRAPHS, BATCHES = 1000, 100_000, 1500, 40
INDEX = "from trainyard import open_index; print(len(open_index({place!r})))"
LOOP = """
from trainyard import Loader, LoaderSpec, RandomResizedCrop, ShuffledPlan, open_index
index = open_index({place!r})
plan = ShuffledPlan(len(index), global_batch=64, seed=0)
crop = RandomResizedCrop(seed=0, scale=(0.08, 1.0), ratio=(0.75, 1.3333), flip=0.5)
spec = LoaderSpec(plan=plan, crop=crop, image_size=224, stop={batches}, threads=1)
with Loader(index, spec) as loader:
    print(sum(int(batch.images_BHWC[:, 0, 0, 0].sum()) for batch in loader))
"""
TRAIN = (
    "train debug --model.name test_resnet --data {place} --run {run} --batch.size 8 "
    "--data.threads 1"
)


def prepare(folder: Path) -> None:
    """Makes what is not there yet."""
    from benchmarks.loaders.photographs import make_photographs

    files, photographs = folder / "files", folder / "photographs"
    for number in range(CLASSES if not files.exists() else 0):
        place = files / f"n{number:08d}"
        place.mkdir(parents=True)
        for each in range(FILES // CLASSES):
            (place / f"{each:05d}.JPEG").write_bytes(random.Random(each).randbytes(64))
    made = make_photographs(photographs / "train", PHOTOGRAPHS)
    make_photographs(photographs / "val", 100)
    rows = [f"{each.name},{each.name.split('/')[0]}" for each in made]
    (folder / "list.csv").write_text("\n".join(["path,label", *rows]))


def programs(folder: Path) -> dict[str, list[str]]:
    """The arguments of Python for each row of the table."""
    files, photographs = str(folder / "files"), str(folder / "photographs")
    train = [
        *TRAIN.format(place=photographs, run=folder / "run").split(),
        "--run.length",
        "2 steps",
    ]
    loop = LOOP.format(place=f"{photographs}/train", batches=BATCHES)
    return {
        "trainyard --help": ["-m", "trainyard", "--help"],
        f"index of {FILES:,} files in {CLASSES:,} classes": ["-c", INDEX.format(place=files)],
        f"index of a list of {PHOTOGRAPHS:,}": [
            "-c",
            INDEX.format(place=f"{folder}/list.csv#root={photographs}/train"),
        ],
        "a new run of two steps": ["-m", "trainyard", *train],
        f"{BATCHES} batches of 64 photographs": ["-c", loop],
    }


def seconds(arguments: list[str], tree: Path, folder: Path) -> float:
    """Processor seconds of a program and its children, without indices and runs of before."""
    for left in ("cache", "run"):
        shutil.rmtree(folder / left, ignore_errors=True)
    about = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(folder / "cache")}
    few = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | about | few,
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--hardware", default="")
    options = parser.parse_args()
    folder = options.folder.resolve()
    prepare(folder)
    trees, rows = (options.base.resolve(), ROOT), {}
    for tree in trees:
        compile_dir(tree / "trainyard", quiet=1)
    print(f"{'processor seconds':44} {'before':>8} {'after':>8} {'ratio':>7}  smallest to largest")
    for name, arguments in programs(folder).items():
        pairs = []
        for number in range(options.pairs):
            turns = trees[:: -1 if number % 2 else 1]
            taken = {tree: seconds(arguments, tree, folder) for tree in turns}
            pairs.append([taken[tree] for tree in trees])
        old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(after / before for before, after in pairs)
        ratio = statistics.median(ratios)
        print(f"{name:44} {old:8.2f} {new:8.2f} {ratio:7.3f}  {ratios[0]:.3f} to {ratios[-1]:.3f}")
        rows[name] = pairs
    print(json.dumps({"hardware": options.hardware, "load": os.getloadavg(), "pairs": rows}))


if __name__ == "__main__":
    main()
