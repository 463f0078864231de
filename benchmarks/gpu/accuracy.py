"""The digits trained to 97%: seconds from the start of the command, and of training alone."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.findings import Findings, Timer, run_part

_WANTED = 0.97
_PLAIN = ["--run.eval_every", "1 epoch", "--run.save_every", "24 epochs"]
_WAYS = {
    "fp32": [],
    "bf16, channels last": ["--batch.precision", "bf16", "--model.channels_last", "true"],
    "bf16, compiled": ["--batch.precision", "bf16", "--model.compile", "default"],
    "fp16, CUDA graphs": ["--batch.precision", "fp16", "--model.compile", "reduce-overhead"],
}


def measure(findings: Findings, dry: bool) -> None:
    with TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        _trainyard("data", "prepare", "digits", str(data))
        for way, options in [*_WAYS.items()][: 1 if dry else None]:
            run = Path(folder) / f"run-{len(list(Path(folder).iterdir()))}"
            length = ["--run.length", "2 epochs"] if dry else []
            with Timer() as timer:
                _trainyard("train", "digits", "--data", str(data), "--run", str(run),
                           *_PLAIN, *options, *length)  # fmt: skip
            findings.add(f"Digits to {_WANTED:.0%}", {"way": way} | _row(run, timer.seconds))


def _trainyard(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "trainyard", *words], check=True)


def _row(run: Path, seconds: float) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "val"]
    reached = next((line for line in found if line["top1"] >= _WANTED), None)
    return {
        "seconds to it": reached["time"] if reached else "not reached",
        "epochs to it": reached["epoch"] if reached else None,
        "last top-1": f"{found[-1]['top1']:.4f}",
        "epochs": found[-1]["epoch"],
        "seconds of the command": seconds,
    }


if __name__ == "__main__":
    run_part(measure)
