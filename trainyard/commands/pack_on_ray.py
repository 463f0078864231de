"""`trainyard data pack --ray`: parts of a pack as tasks of a Ray cluster."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainyard.datasets.pack.journal import Part, parts_in
from trainyard.errors import TrainyardError
from trainyard.launch.ray import RayOptions, connected
from trainyard.monitor.progress import counter

_PER_NODE = 4  # parts: a node that is lost or slow holds up a quarter of its share
_TRIES = 3  # of a part whose node is lost


def pack_on_ray(words: Sequence[str], destination: Path, options: argparse.Namespace) -> None:
    """Write all parts of a pack; `words` are the command's, without --ray.

    The nodes share the destination, and this folder, in which the command runs on each of them.
    An earlier attempt's number of parts is kept. TrainyardError, with its message, if one fails.
    """
    from rich.console import Console

    with connected(RayOptions(address=options.ray or None)):
        import ray

        alive = sum(node["Alive"] for node in ray.nodes())
        begun = parts_in(destination) if destination.is_dir() else []
        count = begun[0].of if begun else _PER_NODE * alive
        workers = options.workers or 1
        task = ray.remote(num_cpus=workers, scheduling_strategy="SPREAD", max_retries=_TRIES)(_run)
        parts = [Part(number, count) for number in range(1, count + 1)]
        command = [*words, "--workers", f"{workers}", "--part"]
        left = {task.remote([*command, f"{part}"], os.getcwd()): part for part in parts}
        with counter(Console(stderr=True), "packing, parts", count) as progress:
            while left:
                done, _ = ray.wait([*left], timeout=1)
                for one in done:
                    _check(left.pop(one), *ray.get(one))
                progress(count - len(left))


def _check(part: Part, code: int, said: str) -> None:
    if code:
        message = said.strip().rpartition("\n")[2].removeprefix("trainyard: ")
        raise TrainyardError(f"part {part}: {message or f'ended with exit code {code}'}")


def _run(arguments: list[str], folder: str) -> tuple[int, str]:
    """On a node: the exit code of a command, and its messages."""
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr[-2000:]
