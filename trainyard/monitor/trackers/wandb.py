"""Weights & Biases: a resumed run continues its W&B run, on any machine."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainyard.errors import RecipeError
from trainyard.files import RunDirectory
from trainyard.monitor.reports import Report
from trainyard.monitor.trackers.tracker import BestEvaluation, TrackerIds, numbers, reason

_PATIENCE_S = 300.0  # for unsent data at the end of a run; `wandb sync` sends the rest
_INIT_S = 20.0  # for an answer; the end of a process waits for the rest of it


class WandbTracker:
    """Numbers are plotted against "step", a number of Trainyard's.

    W&B's own step counter only increases, and rejects steps that are repeated after a kill.
    """

    def __init__(self, folder: RunDirectory, recipe: dict[str, Any]) -> None:
        """RecipeError if W&B rejects the settings or nobody is logged in."""
        import wandb

        watch = recipe["watch"]
        silent = wandb.Settings(silent=True)
        wandb.setup(settings=silent)  # otherwise W&B would ask for a key and wait
        try:
            with _without_arguments():
                self._run = wandb.init(
                    project=watch["project"],
                    id=_identity(folder),
                    name=folder.path.resolve().name,
                    config=recipe,
                    resume="allow",
                    dir=os.environ.get("WANDB_DIR") or str(folder.path),
                    settings=wandb.Settings(
                        silent=True,
                        console="off",
                        reinit="create_new",  # leaves alone other runs of this process
                        init_timeout=_INIT_S,
                        finish_timeout=_PATIENCE_S,
                    ),
                )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise RecipeError(
                "tracker.wandb-refused",
                "watch.wandb: {reason} (WANDB_MODE=offline keeps the run on this machine)",
                reason=reason(error),
            ) from None
        self._teardown = wandb.teardown
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._checkpoint = folder.checkpoints / "best" if watch["artifacts"] else None
        self._is_complete = False
        self._best = BestEvaluation(folder.metrics, recipe["run"]["best_by"])

    def write(self, report: Report) -> None:
        if report["kind"] == "event":
            return
        self._run.log(numbers(report))
        if report["kind"] == "val":
            # "best/step" and so on: W&B itself puts the latest "step" into the summary.
            self._run.summary.update(self._best.after(report))

    def complete(self) -> None:
        if self._checkpoint is not None:
            self._upload(self._checkpoint.resolve())
        self._is_complete = True

    def close(self) -> None:
        try:
            self._run.finish(exit_code=0 if self._is_complete else 1)
        except Exception:
            with suppress(Exception):
                self._teardown(1)  # otherwise it retries at exit and prints the failure
            raise

    def _upload(self, checkpoint: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"run-{self._run.id}-best", "model", metadata=self._best.report)
        # Immutable: otherwise W&B keeps a copy until the upload is done.
        artifact.add_dir(str(checkpoint), policy="immutable")
        self._run.log_artifact(artifact, aliases=["best"])


@contextmanager
def _without_arguments() -> Iterator[None]:
    """W&B records and uploads the command line, whose locations of data may have logins."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def _identity(folder: RunDirectory) -> str:
    memory = TrackerIds(folder.path)
    known = memory.recall("wandb")
    if known is None:
        known = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        memory.keep("wandb", known)
    return known
