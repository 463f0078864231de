"""Work on data sets in parts: `--part` and `--ray` of `trainyard data index | pack | …`."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trainyard.children import SAFE_PATH
from trainyard.errors import InputError, TrainyardError

if TYPE_CHECKING:
    from trainyard.datasets.parts import Part

_PER_NODE = 4  # parts: a node that is lost or slow holds up a quarter of its share
_TRIES = 3  # of a part whose node is lost


def add_parts(parser: argparse.ArgumentParser, what: str, shared: str) -> None:
    """Add --part and --ray; `what` a part does, and the folder that the machines share."""
    parser.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        help=f"{what} one of N shares, on machines that share {shared}; then, once all are "
        "done, give the command without --part",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help=f"{what} parts on the nodes of a Ray cluster that share {shared}, then join them",
    )


def _part(text: str) -> "Part":
    from trainyard.datasets.parts import Part

    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    part = Part(int(match[1]), int(match[2])) if match else Part(0, 0)
    if not 1 <= part.number <= part.of:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 1/8, 2/8, … 8/8")
    return part


def print_part(
    options: argparse.Namespace, about: dict[str, Any], samples: int | None = None
) -> None:
    """Print the end of a part, and its number of samples if known."""
    if options.json:
        counted = {} if samples is None else {"samples": samples}
        print(json.dumps(about | {"part": str(options.part)} | counted))
        return
    done = "done" if samples is None else f"{samples:,} samples"
    print(f"part {options.part}: {done}; the same command without --part joins all")


# --- on Ray ---


def words_of(options: argparse.Namespace, *names: str) -> list[str]:
    """Options, by name, as words of the command line."""
    words = []
    for name in names:
        value = getattr(options, name)
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value not in (None, False):
            words.append(f"--{name.replace('_', '-')}={value}")
    return words


def parts_on_ray(
    options: argparse.Namespace, words: Sequence[str], begun: Iterable["Part"]
) -> None:
    """Do all parts of a command on the nodes of a Ray cluster; without --ray, nothing.

    `words` are the command's, without --ray; `begun` are the parts of an earlier attempt, whose
    number is kept. The nodes share this folder, in which the command runs on each of them.
    TrainyardError, with its message, if a part fails.
    """
    from rich.console import Console

    from trainyard.datasets.parts import Part
    from trainyard.launch.ray import RayOptions, connected
    from trainyard.monitor.progress import counter

    if options.ray is None:
        return
    if options.part is not None:
        raise InputError("--part: --ray does all parts, leave one of them out")
    with connected(RayOptions(address=options.ray or None)):
        import ray

        alive = sum(node["Alive"] for node in ray.nodes())
        count = next((part.of for part in begun), _PER_NODE * alive)
        workers = getattr(options, "workers", None) or 1
        if hasattr(options, "workers"):
            words = [*words, f"--workers={workers}"]
        task = ray.remote(num_cpus=workers, scheduling_strategy="SPREAD", max_retries=_TRIES)(_run)
        parts = [Part(number, count) for number in range(1, count + 1)]
        left = {task.remote([*words, f"--part={part}"], os.getcwd()): part for part in parts}
        with counter(Console(stderr=True), "parts", count) as progress:
            while left:
                done, _ = ray.wait([*left], timeout=1)
                for one in done:
                    _check(left.pop(one), *ray.get(one))
                progress(count - len(left))


def _check(part: "Part", code: int, said: str) -> None:
    if code:
        message = said.strip().rpartition("\n")[2].removeprefix("trainyard: ")
        raise TrainyardError(f"part {part}: {message or f'ended with exit code {code}'}")


def _run(arguments: list[str], folder: str) -> tuple[int, str]:
    """On a node: the exit code of a command, and its messages."""
    done = subprocess.run(
        [sys.executable, *SAFE_PATH, "-m", "trainyard", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr[-2000:]
