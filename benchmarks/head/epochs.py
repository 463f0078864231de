"""A program in this process, which notes clock, CPU seconds and memory after some of its updates.

python -m benchmarks.head.epochs FILE SEED STEPS PROGRAM [ARGUMENTS ...]

STEPS are updates, with commas between; FILE gets a line of JSON for each of them.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.head import watched
from benchmarks.loaders.measure import memory, processes


def cpu_seconds() -> float:
    """Of this process and its children, also of those that have ended."""
    ticks = 0
    for pid in processes():
        with suppress(OSError):  # has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    file, steps = sys.argv[1], list(map(int, sys.argv.pop(3).split(",")))
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1
        if count in steps:
            found = {"step": count, "time": time.time(), "cpu_s": cpu_seconds(), **memory()}
            with Path(file).open("a") as lines:
                lines.write(json.dumps(found) + "\n")

    register_optimizer_step_post_hook(note)
    sys.argv[1] = f"{file}.first"
    watched.main()


if __name__ == "__main__":
    main()
