"""Python reads this first where its folder is on PYTHONPATH: it notes what real ranks train on.

In $TRAINYARD_TEST_LOG, `ids-RANK.jsonl` gets a line for each step that a rank has made: its number
and the samples. While there is a file `slow` steps take longer; `kill-RANK` kills a rank, once.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_STEP_S = 0.4


class _Observer(MetaPathFinder):
    """Trainyard's step is imported as ever, and then changed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "trainyard.training.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_observe(module: ModuleType) -> None:
            execute(module)
            _observe(module.TrainStep, Path(os.environ["TRAINYARD_TEST_LOG"]))

        spec.loader.exec_module = execute_and_observe  # type: ignore[method-assign]
        return spec


def _observe(step_type: Any, folder: Path) -> None:
    update = step_type.__call__
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]

    def update_and_note(self: Any, batch: Any, step: int, rates: Any) -> Any:
        stats = update(self, batch, step, rates)
        with open(folder / f"ids-{rank}.jsonl", "a") as file:
            file.write(json.dumps([step + 1, batch.ids.tolist()]) + "\n")
        if (folder / "slow").exists():
            time.sleep(_STEP_S)
        if (folder / f"kill-{rank}").exists():
            (folder / f"kill-{rank}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return stats

    step_type.__call__ = update_and_note


if "TRAINYARD_TEST_LOG" in os.environ:
    sys.meta_path.insert(0, _Observer())
