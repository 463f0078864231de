"""Runs a program and writes down its weights after each step, until a kill.

python -m tests.any_loop.recorded LOG KILL_AFTER PROGRAM [ARGUMENT ...]

LOG gets a checksum of the weights a line, from rank 0. The batches were those of another run if the
weights are the same to the last bit. KILL_AFTER is a number of steps, 0 for none.
"""

import os
import runpy
import signal
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0


def after_step(weights: Iterable[Any]) -> None:
    """Writes down the weights, arrays, and kills this process after its last step, on rank 0."""
    global _steps
    checksum = 0
    for one in weights:
        checksum = zlib.crc32(np.asarray(one).tobytes(), checksum)
    if os.environ.get("RANK", "0") != "0":
        return
    with Path(os.environ["LOG"]).open("a") as log:
        log.write(f"{checksum:08x}\n")
    _steps += 1
    if _steps == int(os.environ["KILL_AFTER"]):
        os.kill(os.getpid(), signal.SIGKILL)


def record_optimizers() -> None:
    """From here on each step of one of torch's optimizers is written down."""

    def after(optimizer: Any, *_: Any) -> None:
        after_step(p.detach().numpy() for group in optimizer.param_groups for p in group["params"])

    register_optimizer_step_post_hook(after)


def main() -> None:
    os.environ["LOG"], os.environ["KILL_AFTER"], *sys.argv = sys.argv[1:]
    record_optimizers()
    torch.manual_seed(0)  # torchvision's reference has no seed
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as of a program
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    from tests.any_loop import recorded  # the module that programs import, too

    recorded.main()
