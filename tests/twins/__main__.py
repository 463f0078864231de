"""Runs this code and that of another commit side by side, and compares to the last bit.

make twins [BASE=COMMIT] [ROWS="PART ..."]: the default is the last commit on main. That commit is a
worktree in build/twins, with an extension of its own and this environment's packages. Each row is
commands that both run in a folder of its own beside the data, which the other code has made; what
they print counts, and reports, weights and predictions of runs, without what is measured.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from safetensors.numpy import load_file
from tfrecord.writer import TFRecordWriter

from tests.twins.prints import digest

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build/twins"
_SHOWN = 4  # differences of a row
_MEASURED = {
    *("seconds", "time", "eta", "eta_epoch", "images_per_s", "images_per_s_device", "data_wait"),
    *("memory", "mfu", "gpu_use", "gpu_power", "version", "commit", "started", "host", "machine"),
    *("images_per_s_loader", "update_ratio"),
}
"""Keys of values that are measured, or that name the code."""

_STEPS = "data.threads=1 run.length='24 steps' run.eval_every='8 steps' run.save_every='8 steps'"
_RUNS = {
    "all-reduce, 2 ranks": "digits@2",
    "gossip, 4 ranks": "digits@4 average.name=gossip",
    "local SGD, 2 ranks": "digits@2 average.name=periodic average.every=4 average.outer_lr=0.7 "
    "average.outer_momentum=0.9",
    "sharded, 2 ranks": "debug@2 average.name=sharded",
    "virtual ranks": "digits batch.virtual_ranks=2",
    "sgd, step schedule, bf16": "debug optim.name=sgd optim.nesterov=true schedule.name=step "
    """schedule.milestones='["50%"]' batch.precision=bf16""",
    "lamb, clipped": "debug optim.name=lamb optim.clip_norm=1.0",
    "lars, resnet": "debug model.name=test_resnet optim.name=lars",
    "lion, layer decay": "debug optim.name=lion optim.layer_decay=0.8",
    "muon": "debug optim.name=muon schedule.name=linear",
    "accumulated adam": "debug optim.name=accum_adam optim.accum_iter=4",
    "schedule-free": "debug model.name=test_resnet optim.name=schedule_free_adamw "
    "schedule.name=constant run.bn_samples=256",
    "locality": "debug data.locality=256",
    "balance, repeats": "debug data.balance=0.5 data.repeats=3",
    "resample": "debug:webdataset data.order=resample",
    "join, 3 ranks": "debug@3: data.val=../data/digits/val data.order=join data.samples=1433 "
    "'data.train=../data/webdataset/imagenet-train-{000000..000003}.tar'",
    "moving averages": "digits model.ema_decay=[0.9,0.99] model.ema_warmup=true",
    "stages of batch and image size": """digits 'schedule.batch_size=["12 steps: 96"]' """
    """'schedule.image_size=["8 steps: 40"]' batch.micro=40""",
    "several labels": "debug: data.train=../data/lists/train.csv data.val=../data/lists/val.csv "
    "loss.name=bce run.best_by=map",
    "one channel": "fashion-mnist batch.size=128",
    "four channels": "debug:arrays data.channels=4 data.mean=[0.5,0.5,0.5,0.5] "
    "data.std=[0.3,0.3,0.3,0.3]",
    "rand augment": "debug augment.randaugment=rand-m9-mstd0.5-inc1",
    "3-augment, jitter, erasing, mixing": "debug augment.randaugment=3a augment.translate=2 "
    "augment.color_jitter=[0.4,0.4,0.4] augment.erasing=0.25 augment.mixup=0.8 augment.cutmix=1.0",
}
"""RECIPE[@RANKS][:DATA] and keys of a training."""
_FORMATS = {
    "folder": "digits/train",
    "photographs": "photographs/train",
    "arrays": "arrays/train",
    "list": "lists/train.csv",
    "WebDataset": "webdataset/imagenet-train-{000000..000003}.tar",
    "TFRecord": "tfrecord/train",
    "HDF5": "hdf5/imagenet-train-{00000..00003}.h5",
    "packed": "packed/imagenet-train-{000000..000003}.packed",
    "Parquet": "parquet/data/train-*.parquet",
}
_PACKED = ("webdataset", "hdf5", "packed", "parquet")
_OF_A_RUN = {
    "evaluate": "evaluate run --per-class 3 --confusions 3; "
    "evaluate run --data ../data/three/val --flip",
    "predict, export": "predict run ../data/digits/val/3; export run model.safetensors",
    "export to torch and ONNX": "export run model.pt2; export run model.onnx; "
    "prints.py model.pt2; prints.py model.onnx",
    "export for timm": "export run --hub hub; prints.py hub",
}
"""Commands after a training of the digits."""
_PRINTS = {
    "recipes": "recipes",
    "recipes NAME": "recipes resnet50-a1",
    "recipes --keys": "recipes --keys",
    "recipes --params": "recipes convnext-tiny --params",
    "estimate": "estimate resnet50-a3 --device h100-sxm --gpus 8",
    "data show": "data show ../data/digits",
    "data verify": "data verify ../data/digits --deep",
}


class Row(NamedTuple):
    commands: list[list[str]]
    killed_at: int | None = None
    """The step at which the first command is killed; it is then given again."""


def train(line: str, run: str = "run") -> list[str]:
    """The command of a line of `_RUNS`, which trains in the folder `run`."""
    what, *keys = shlex.split(f"{line.split()[0]} {_STEPS} run.log_every='4 steps' {line}")
    keys.remove(what)
    what, _, data = what.partition(":") if ":" in what else (what, "", "digits")
    recipe, _, ranks = what.partition("@")
    given = dict(key.split("=", 1) for key in keys)
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    start = ["launch", "local", "--ranks", ranks] if ranks else ["train"]
    where = ["--data", f"../data/{data}"] if data else []
    return [*start, recipe, *where, "--run", run, "--json", *words]


def rows() -> dict[str, Row]:
    first = train("digits")
    again = train("debug loss.teacher=run", "other")
    fine = train("digits:three model.checkpoint=run optim.backbone_lr=0.1", "other")
    return {
        **{name: Row([train(line)]) for name, line in _RUNS.items()},
        "resumed after a kill, 2 ranks": Row([train("digits@2")], killed_at=13),
        "distillation": Row([first, again]),
        "fine-tuning with another head": Row([first, fine]),
        **{name: Row([first, *_commands(line)]) for name, line in _OF_A_RUN.items()},
        **{
            f"batches: {name}": Row([["prints.py", f"../data/{location}"]])
            for name, location in _FORMATS.items()
        },
        **{name: Row([*_commands(line)]) for name, line in _PRINTS.items()},
    }


def _commands(line: str) -> Iterator[list[str]]:
    for each in line.split("; "):
        words = shlex.split(each)
        yield words if words[0].endswith(".py") else [*words, "--json"]


class Code(NamedTuple):
    """The code in a folder, with its own extension in C."""

    name: str
    root: Path

    def outcome(self, row: Row, folder: Path) -> dict[str, Any]:
        """JSON, reports, weights and predictions, by name. `folder` is new, beside the data."""
        folder.mkdir(parents=True)
        found: dict[str, Any] = {}
        for number, words in enumerate(row.commands):
            if row.killed_at is not None and not number:
                self._killed(words, folder, row.killed_at)
            printed = self.printed(words, folder).replace(str(folder), ".")
            try:
                found[f"output {number}"] = plain(json.loads(printed))
            except ValueError:
                found[f"output {number}"] = printed
        for run in sorted(path.parent for path in folder.glob("*/recipe.toml")):
            found[run.name] = _of_run(run)
        for path in sorted(folder.glob("*.safetensors")):
            found[path.name] = _digests(path)
        return found

    def printed(self, words: list[str], folder: Path) -> str:
        done = subprocess.run(capture_output=True, text=True, **self._start(words, folder))
        if done.returncode:
            raise ValueError(f"{self.name}: {shlex.join(words)}: {done.stderr.strip()[-300:]}")
        return str(done.stdout)

    def _start(self, words: list[str], folder: Path) -> dict[str, Any]:
        own = [str(Path(__file__).with_name(words[0]))] if words[0].endswith(".py") else []
        args = [*own, *words[1:]] if own else ["-m", "trainyard", *words]
        variables = {"PYTHONPATH": str(self.root), "COLUMNS": "100", "NO_COLOR": "1"}
        return {
            "args": [sys.executable, "-P", *args],
            "cwd": folder,
            "env": os.environ | variables,
        }

    def _killed(self, words: list[str], folder: Path, step: int) -> None:
        """Kills the command and all of its processes once it has reported a step."""
        with subprocess.Popen(
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._start(words, folder)
        ) as process:
            reports = folder / "run/metrics.jsonl"
            while not any(row.get("step", 0) >= step for row in _lines(reports)):
                if process.poll() is not None:
                    raise ValueError(f"{self.name}: the run was over before it could be killed")
                time.sleep(0.02)
            for pid in [*_children(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from _children(child)


def _of_run(run: Path) -> dict[str, Any]:
    reports = [row for row in _lines(run / "metrics.jsonl") if row.get("kind") in ("train", "val")]
    latest = (run / "checkpoints/latest").resolve()
    with np.load(run / "predictions.npz") as arrays:
        predictions = {key: digest(arrays[key]) for key in sorted(arrays)}
    return {
        "reports": {f"{row['kind']} {row['step']}": plain(row) for row in reports},
        "checkpoint": latest.name,
        "predictions": predictions,
        **{path.name: _digests(path) for path in sorted(latest.glob("*.safetensors"))},
    }


def _digests(path: Path) -> dict[str, str]:
    return {name: digest(array) for name, array in sorted(load_file(path).items())}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be being written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def plain(value: Any) -> Any:
    """A value without what is measured."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in _MEASURED}
    return [plain(part) for part in value] if isinstance(value, list) else value


def differences(one: Any, other: Any, *where: str) -> Iterator[str]:
    """Where two outcomes differ, as texts."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(one.get(key), other.get(key), *where, key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, parts in enumerate(zip(one, other, strict=True)):
            yield from differences(*parts, *where, str(number))
    elif one != other:
        yield f"{' / '.join(where)}: {one!r:.80} is now {other!r:.80}"


def make_data(code: Code, folder: Path) -> None:
    """The small data sets that rows read, one for each format."""
    folder.mkdir(parents=True)
    code.printed(["data", "prepare", "digits", "digits"], folder)
    for name in _PACKED:
        words = ("--format", name, "--shard-samples", "400")
        code.printed(["data", "pack", "digits", name, *words], folder)
    (folder / "tfrecord/train").mkdir(parents=True)
    records = TFRecordWriter(str(folder / "tfrecord/train/train-00000-of-00001"))
    rng = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"train": ["path,labels"], "val": ["path,labels"]}
    for path in sorted(folder.glob("digits/*/*/*.png")):
        split, label, number = path.parts[-3], path.parts[-2], int(path.stem)
        kind = "odd" if int(label) % 2 else "even"
        lines[split].append(f"images/{split}/{label}/{path.name},{label}|{kind}")
        if split == "train":
            labels = (int(label) + 1, "int")
            records.write(
                {"image/encoded": (path.read_bytes(), "byte"), "image/class/label": labels}
            )
        grey = np.asarray(Image.open(path))
        target = folder / f"arrays/{split}/{label}/{path.stem}.npy"
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, np.stack([grey, grey.T, 255 - grey, grey // 2], axis=2))
        if number % 5 == 0:
            target = folder / f"photographs/{split}/{label}/{path.stem}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            _photograph(path, number, rng, target)
        if label in "012":
            target = folder / f"three/{split}/{label}/{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    records.close()
    shutil.copytree(folder / "digits", folder / "lists/images")
    for split, texts in lines.items():
        (folder / f"lists/{split}.csv").write_text("\n".join([*texts, ""]))


def _photograph(path: Path, number: int, rng: np.random.Generator, target: Path) -> None:
    """A JPEG of some size; a few are grey, or turned."""
    height, width = rng.integers(40, 120, 2)
    noise = rng.integers(0, 60, (height, width, 3))
    digit = np.asarray(Image.open(path).resize((width, height)).convert("RGB"))
    image = Image.fromarray((digit * 0.75 + noise).astype(np.uint8))
    exif = Image.Exif()
    exif[0x112] = 6 if number % 25 == 0 else 1
    image.convert("L" if number % 35 == 0 else "RGB").save(target, quality=87, exif=exif)


def worktree(base: str) -> Path:
    """A worktree of a commit, with its extension built."""
    commit = _git("rev-parse", "--verify", f"{base}^{{commit}}")
    path = BUILD / commit[:12]
    if not path.exists():
        _git("worktree", "prune")
        _git("worktree", "add", "--quiet", "--detach", str(path), commit)
    if not list(path.glob("trainyard/data/_native/core*.so")):
        build = "import setuptools; setuptools.setup()"
        subprocess.run([sys.executable, "-c", build, "-q", "build_ext", "-i"], cwd=path, check=True)
    return path


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def main(base: str, parts: list[str]) -> int:
    """The exit code: 1 if a row differs."""
    begin = time.monotonic()
    now, before = Code("now", ROOT), Code("before", worktree(base))
    chosen = [(n, name) for n, name in enumerate(rows()) if any(p in name for p in parts or [""])]
    for path in (BUILD / "now", BUILD / "before"):
        shutil.rmtree(path, ignore_errors=True)
    make_data(before, BUILD / "before/data")
    shutil.copytree(BUILD / "before/data", BUILD / "now/data")  # each has indexes of its own

    def compare(number: int, name: str) -> list[str]:
        row, folder = rows()[name], f"{number:02}"
        try:
            one, other = (code.outcome(row, BUILD / code.name / folder) for code in (before, now))
        except ValueError as error:
            return [str(error)]
        return list(differences(one, other))

    num_different = 0
    with ThreadPoolExecutor(2) as pool:
        for (_, name), found in zip(chosen, pool.map(lambda c: compare(*c), chosen), strict=True):
            num_different += bool(found)
            print("DIFFERS" if found else "equal  ", name, flush=True)
            for text in found[:_SHOWN]:
                print(f"          {text}")
            if len(found) > _SHOWN:
                print(f"          and {len(found) - _SHOWN} more")
    minutes = (time.monotonic() - begin) / 60
    print(f"{num_different} of {len(chosen)} rows differ from {base}; {minutes:.1f} minutes")
    return int(num_different > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.twins")
    parser.add_argument("--base", required=True)
    parser.add_argument("parts", nargs="*")
    given = parser.parse_args()
    sys.exit(main(given.base, given.parts))
