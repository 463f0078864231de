"""Exported files of runs beside their checkpoints: size, accuracy, and time in their libraries.

python -m benchmarks.exports FOLDER RUN ... writes the files into FOLDER and prints a table.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainyard.training.reliability import wilson

KINDS: dict[str, tuple[str, ...]] = {"pt2": (), "onnx": (), "int8.onnx": ("--int8",)}
IMAGES = 2000
HEAD = "| run | file | MB | top-1 (95%) | checkpoint | agree | ms of 1 | ms of 32 | in 32 bits |"


def exported(folder: Path, run: Path, kind: str) -> dict[str, Any]:
    """The record of `trainyard export --json`; {"error": …} if it was refused."""
    command = [sys.executable, "-m", "trainyard", "export", str(run)]
    file = folder / f"{run.name}.{kind}"
    asked = [str(file), "--images", str(IMAGES), "--json", *KINDS[kind]]
    said = json.loads(
        subprocess.run([*command, *asked], stdout=subprocess.PIPE, check=False).stdout
    )
    record: dict[str, Any] = said["exports"][0] if "exports" in said else said
    return record


def row(run: Path, kind: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {run.name} | {kind} | refused: {found['error']['message']} |"
    low, high = wilson(found["top1"], found["images"])
    cells = [
        run.name,
        kind,
        f"{found['bytes'] / 1e6:.2f}",
        f"{found['top1']:.2%} ({low:.1%} to {high:.1%})",
        f"{found['checkpoint_top1']:.2%}",
        f"{found['agreement']:.2%}",
        *(f"{found['ms_per_image'][count]:.2f}" for count in ("1", "32")),
        ", ".join(found.get("float_layers", ())) or "none" if "int8" in kind else "all",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for run in map(Path, sys.argv[2:]):
        for kind in KINDS:
            print(row(run, kind, exported(Path(sys.argv[1]), run, kind)), flush=True)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
