"""`python -m tests.launch.noting train …`: a rank that notes the samples of each step it begins.

In the folder $NOTES. In step $DIE_AT, counted from 0, rank $DIE_RANK is killed, in the first start
by its torchrun, with which it dies if $DIE_AGENT is set. Of the very first start of a run a step
takes $STEP_S seconds more.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from trainyard.__main__ import command
from trainyard.monitor.meters import StepStats
from trainyard.training.step import TrainStep


def note_steps() -> None:
    folder = Path(os.environ["NOTES"])
    pause = 0.0 if any(folder.iterdir()) else float(os.environ.get("STEP_S", "0"))
    notes = folder / f"{time.time():.3f}-{os.getpid()}.jsonl"
    place = [
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
    ]
    update = TrainStep.__call__

    def note_and_update(self: TrainStep, batch: Any, step: int, rates: Any) -> StepStats:
        with open(notes, "a") as file:
            file.write(json.dumps([step, *place, batch.ids.tolist()]) + "\n")
        if str(step) == os.environ.get("DIE_AT") and dies(place[0]):
            if "DIE_AGENT" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
        return update(self, batch, step, rates)

    TrainStep.__call__ = note_and_update  # type: ignore[method-assign]


def dies(rank: int) -> bool:
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    return is_first_start and os.environ.get("DIE_RANK", str(rank)) == str(rank)


if __name__ == "__main__":
    note_steps()
    command()
