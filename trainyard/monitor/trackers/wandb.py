"""Weights & Biases: the same run there, whenever and wherever ours goes on."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainyard.errors import RecipeError
from trainyard.files import RunDirectory
from trainyard.monitor.history import read_history, score
from trainyard.monitor.trackers.tracker import Memory, Report, figures

_PATIENCE_S = 300.0  # for what has not been sent when the run ends; `wandb sync` sends the rest


class WandbTracker:
    """Figures are drawn against "step", a figure of our own.

    W&B's own count of steps only goes up, and refuses those that are made again after a kill.
    """

    def __init__(
        self, folder: RunDirectory, recipe: dict[str, Any], *, project: str, artifacts: bool
    ) -> None:
        """RecipeError where W&B does not take what it is given, or nobody is logged in."""
        import wandb

        silent = wandb.Settings(silent=True)
        wandb.setup(settings=silent)  # else it would ask for a key, and wait
        try:
            self._run = wandb.init(
                project=project,
                id=_identity(folder),
                name=folder.path.resolve().name,
                config=recipe,
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or str(folder.path),
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    reinit="create_new",  # not the run of a program that trains by our library
                    finish_timeout=_PATIENCE_S,
                ),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise RecipeError(
                f"watch.wandb: {error} (WANDB_MODE=offline keeps the run on this machine)"
            ) from None
        self._teardown = wandb.teardown
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._checkpoint = folder.checkpoints / "best" if artifacts else None
        self._is_complete = False
        self._best: Report = {}
        for report in _evaluations(folder.metrics):
            self._note_best(report)

    def write(self, report: Report) -> None:
        if report["kind"] == "event":
            return
        self._run.log(figures(report))
        if report["kind"] == "val":
            self._note_best(report)

    def complete(self) -> None:
        if self._checkpoint is not None:
            self._give(self._checkpoint.resolve())
        self._is_complete = True

    def close(self) -> None:
        try:
            self._run.finish(exit_code=0 if self._is_complete else 1)
        except Exception:
            with suppress(Exception):
                self._teardown(1)  # else it tries again when Python ends, and prints how it fails
            raise

    def _note_best(self, report: Report) -> None:
        if score(report) > score(self._best):
            self._best = report
            best = figures(report | {"kind": "best"})
            # Under a name of its own each: W&B puts the newest "step" into the summary by itself.
            self._run.summary.update(
                {f"best/{key.removeprefix('best/')}": value for key, value in best.items()}
            )

    def _give(self, checkpoint: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"run-{self._run.id}-best", "model", metadata=self._best)
        # Immutable: else W&B keeps a copy of its own until it has been sent.
        artifact.add_dir(str(checkpoint), policy="immutable")
        self._run.log_artifact(artifact, aliases=["best"])


def _identity(folder: RunDirectory) -> str:
    memory = Memory(folder.path)
    known = memory.recall("wandb")
    if known is None:
        known = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        memory.keep("wandb", known)
    return known


def _evaluations(metrics: Path) -> list[Report]:
    """Those that a run had before it went on."""
    return read_history(metrics).val if metrics.exists() else []
