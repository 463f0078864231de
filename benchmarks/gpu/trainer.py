"""The whole trainer, from JPEGs of photographs: images a second, and what bounds them.

A ResNet-50 at bf16, compiled; the same images as JPEGs decoded on the CPU, on the GPU, and packed,
with a random crop and with RandAugment, erasing and mixing. The speed is the median of the reports
after the first two. The last column is the trainer's own judgement.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.findings import Findings, Timer, run_part
from benchmarks.loaders.photographs import make_photographs

_HEAVY = {
    "augment.randaugment": "rand-m9-mstd0.5-inc1",
    "augment.erasing": "0.25",
    "augment.mixup": "0.8",
    "augment.cutmix": "1.0",
}
_COMMON = {
    "data.image_size": "224",
    "model.name": "resnet50",
    "model.channels_last": "true",
    "model.compile": "default",
    "batch.precision": "bf16",
    "batch.size": "256",
    "optim.lr": "0.01",
    "run.length": "200 steps",
    "run.log_every": "20 steps",
    "run.eval_every": "0 steps",
    "run.save_every": "200 steps",
    "watch.bounds_minutes": "0.15",
}
_TINY = {
    "data.image_size": "32",
    "model.name": "test_resnet",
    "model.compile": "off",
    "batch.precision": "fp32",
    "batch.size": "8",
    "run.length": "8 steps",
    "run.log_every": "2 steps",
}


def measure(findings: Findings, dry: bool) -> None:
    count = 64 if dry else 6400
    with TemporaryDirectory() as name:
        folder = Path(name)
        jpegs, packed = folder / "jpegs", folder / "packed"
        with Timer() as timer:
            make_photographs(jpegs / "train", count, workers=len(os.sched_getaffinity(0)))
            shutil.copytree(jpegs / "train", jpegs / "val")
        findings.add("Preparation", {"what": f"{count} photographs", "seconds": timer.seconds})
        with Timer() as timer:
            _trainyard("data", "pack", str(jpegs), str(packed), "--format", "packed",
                       "--short", "256")  # fmt: skip
        findings.add("Preparation", {"what": "packed, 256 pixels", "seconds": timer.seconds})
        for way, options in _ways(jpegs, packed).items():
            if dry and "decoded on the GPU" in way:
                continue
            run = folder / way.replace(" ", "-")
            changes = _COMMON | options | (_TINY if dry else {})
            keys = ((f"--{key}" if "." in key else key, value) for key, value in changes.items())
            words = [word for pair in keys for word in pair]
            recipe = folder / "recipe.toml"
            recipe.write_text("")
            try:
                _trainyard("train", str(recipe), "--run", str(run), *words)
                row = _row(run)
            except subprocess.CalledProcessError as error:
                if dry:
                    raise
                row = {"bound": f"exit code {error.returncode}"}
            findings.add("ResNet-50, 256 images of 224 pixels a step", {"way": way} | row)


def _ways(jpegs: Path, packed: Path) -> dict[str, dict[str, str]]:
    plain, small = {"--data": str(jpegs)}, {"--data": str(packed)}
    return {
        "JPEGs": plain,
        "packed": small,
        "JPEGs, decoded on the GPU": plain | {"data.decode": "gpu"},
        "packed, 8 threads": small | {"data.threads": "8"},
        "packed, RandAugment, erasing, mixing": small | _HEAVY,
        "JPEGs, RandAugment, erasing, mixing": plain | _HEAVY,
    }


def _trainyard(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "trainyard", *words], check=True)


def _row(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"][2:]
    bounds = [line for line in lines if line.get("event") == "bounds"]
    return {
        "images/s": statistics.median(line["images_per_s"] for line in trained),
        "data wait": f"{statistics.median(line['data_wait'] for line in trained):.1%}",
        "mfu": _median(trained, "mfu"),
        "GPU use": _median(trained, "gpu_use"),
        "bound": bounds[-1]["message"] if bounds else "not judged",
    }


def _median(lines: list[dict[str, Any]], key: str) -> str | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{statistics.median(values):.1%}" if values else None


if __name__ == "__main__":
    run_part(measure)
