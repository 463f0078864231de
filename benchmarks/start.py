"""How long it takes until ranks are under way, and what finding out who they are costs.

python -m benchmarks.start FOLDER [--ranks 2 8 32] [--beside NAME=PYTHON] [--hardware NAME]

Discovery, without processes: the environments that Slurm would give all tasks of a job, eight a
node, are read one after the other, as if each rank's share were done here. Then real ranks of the
`debug` recipe on the digits, all on this machine. FOLDER is for the data and the runs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.saving import RESULTS, save
from trainyard.datasets.prepare.digits import prepare_digits
from trainyard.distributed.launcher_variables import (
    discover,
    meeting_point,
)
from trainyard.world import World

SIZES = (256, 1024, 4096)
PER_NODE = 8
KILL_AFTER = 12  # steps, of which every fifth is saved


def environment(rank: int, size: int) -> dict[str, str]:
    nodes, node = size // PER_NODE, rank // PER_NODE
    return {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[0001-{nodes:04}]",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_GTIDS": ",".join(map(str, range(node * PER_NODE, (node + 1) * PER_NODE))),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % PER_NODE),
    }


def discovery_seconds(size: int) -> float:
    """Of all ranks together."""
    environments = [environment(rank, size) for rank in range(size)]
    started = time.perf_counter()
    worlds = [discover(env) for env in environments]
    points = {meeting_point(*pair) for pair in zip(worlds, environments, strict=True)}
    ended = time.perf_counter()
    assert worlds[-1] == World(
        size - 1, size, PER_NODE - 1, PER_NODE, size // PER_NODE - 1, size // PER_NODE
    )
    assert len(points) == 1
    return ended - started


class Run:
    """`debug` on so many ranks of this machine, by an installed Trainyard."""

    def __init__(self, python: str, folder: Path, ranks: int) -> None:
        self._run, self._ranks = folder / f"{ranks}-ranks-{time.time_ns()}", ranks
        words = ["launch", "local", "debug", "--ranks", ranks, "--restarts", 1, "--run", self._run]
        words += ["--data", folder / "digits", "--data.threads", 1, "--batch.size", 64]
        words += ["--run.length", "1000 epochs", "--run.log_every", "1 step"]
        words += ["--run.eval_every", "0 steps", "--run.save_every", "5 steps"]
        command = [python, "-m", "trainyard", *map(str, words)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet, cwd=folder)

    def seconds(self) -> tuple[float, float]:
        """From the start to the first step; from the death of a rank to the first step after it."""
        begun = time.perf_counter()
        first = self._wait_for(lambda kinds: "train" in kinds) - begun
        self._wait_for(lambda kinds: kinds.count("train") > KILL_AFTER)
        os.kill(self._process_of(self._ranks - 1), signal.SIGKILL)
        killed, seen = time.perf_counter(), len(self._kinds())
        again = self._wait_for(lambda kinds: "resume" in kinds[seen:] and kinds[-1] == "train")
        self._process.terminate()
        self._process.wait()
        return first, again - killed

    def _wait_for(self, condition: Callable[[list[str]], bool]) -> float:
        while not condition(self._kinds()):
            assert self._process.poll() is None
            time.sleep(0.02)
        return time.perf_counter()

    def _kinds(self) -> list[str]:
        """The kinds of the reports so far, with "resume" for the report of a resumed run."""
        with suppress(OSError):
            lines = (self._run / "metrics.jsonl").read_text().splitlines()
            return [_kind(json.loads(line)) for line in lines]
        return []

    def _process_of(self, rank: int) -> int:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes()
                if f"RANK={rank}".encode() in variables and str(self._run).encode() in words:
                    return int(folder.name)
        raise AssertionError(f"there is no rank {rank}")


def _kind(report: dict[str, Any]) -> str:
    return "resume" if report.get("event") == "resumed" else str(report["kind"])


def discovery(found: list[dict[str, Any]]) -> str:
    text = "| ranks | discovery, all | a rank's share |\n|---|---|---|\n"
    for size in SIZES:
        all_s = discovery_seconds(size)
        found.append({"ranks": size, "all_s": all_s})
        text += f"| {size:,} | {all_s * 1e3:.0f} ms | {all_s / size * 1e6:.0f} us |\n"
    return text


def start(
    found: list[dict[str, Any]], folder: Path, numbers: list[int], installed: dict[str, str]
) -> str:
    """Each number of ranks by each installed Trainyard in turn."""
    text = (
        "| Trainyard | `debug` ranks here | first step after | first step after a death "
        "| load before |\n|---|---|---|---|---|\n"
    )
    if not (folder / "digits").exists():
        folder.mkdir(parents=True, exist_ok=True)
        prepare_digits(folder / "digits")
    for ranks in numbers:
        for name, python in installed.items():
            load = os.getloadavg()[0]
            first, again = Run(python, folder, ranks).seconds()
            found.append(
                {"name": name, "ranks": ranks, "first_s": first, "again_s": again, "load": load}
            )
            text += f"| {name} | {ranks} | {first:.1f} s | {again:.1f} s | {load:.1f} |\n"
            print(text.splitlines()[-1], flush=True)
    return text


def named_python(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    return name, python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument(
        "--beside", type=named_python, action="append", default=[], metavar="NAME=PYTHON"
    )
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-start.json and .md")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"discovery": [], "start": []}
    text = discovery(found["discovery"]) + "\n"
    installed = dict(options.beside) | {"this": sys.executable}
    text += start(found["start"], options.folder.absolute(), options.ranks, installed)
    print(text)
    if options.hardware:
        heading = f"# From nothing to the first step, {options.hardware}\n\n"
        save(f"{options.hardware}-start", found, heading + text, folder=options.out)


if __name__ == "__main__":
    main()
