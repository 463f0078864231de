"""MLflow: a run at the server of $MLFLOW_TRACKING_URI; a resumed run continues it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainyard.errors import RecipeError
from trainyard.files import RunDirectory
from trainyard.installation import VERSION
from trainyard.monitor.reports import Report
from trainyard.monitor.trackers.tracker import BestEvaluation, TrackerIds, numbers, reason
from trainyard.printable import as_text


class MlflowTracker:
    """Numbers are metrics at Trainyard's steps, keys of the recipe are parameters."""

    def __init__(self, folder: RunDirectory, recipe: dict[str, Any]) -> None:
        """RecipeError if the server rejects the settings or does not know a resumed run."""
        for name in ("DISABLE_TELEMETRY", "SUPPRESS_PRINTING_URL_TO_STDOUT"):
            os.environ.setdefault(f"MLFLOW_{name}", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        watch = recipe["watch"]
        self._metric = Metric
        self._checkpoint = folder.checkpoints / "best" if watch["artifacts"] else None
        self._best = BestEvaluation(folder.metrics, recipe["run"]["best_by"])
        self._status = "KILLED"
        ids = TrackerIds(folder.path)
        known = ids.recall("mlflow") or os.environ.get("MLFLOW_RUN_ID")
        with _rejections(known):
            self._client = MlflowClient()
            self._id = known or self._created(watch["project"], folder.path.resolve().name)
            params = self._client.get_run(self._id).data.params
            ids.keep("mlflow", self._id)
            self._client.update_run(self._id, status="RUNNING")
            # Parameters cannot be changed: those of the first start remain.
            new = [Param(*item) for item in _flat(recipe).items() if item[0] not in params]
            self._client.log_batch(self._id, params=new)

    def write(self, report: Report) -> None:
        if report["kind"] == "event":
            return
        values = numbers(report)
        now, step = int(time.time() * 1000), int(values.pop("step"))
        if report["kind"] == "val":
            # With every evaluation: MLflow shows the value of the highest step, even if undone.
            values |= self._best.after(report)
        metrics = [self._metric(key, float(value), now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def complete(self) -> None:
        self._status = "FINISHED"
        if self._checkpoint is not None:
            self._client.log_artifacts(self._id, str(self._checkpoint.resolve()), "best")

    def close(self) -> None:
        self._client.set_terminated(self._id, self._status)

    def _created(self, project: str, name: str) -> str:
        existing = self._client.get_experiment_by_name(project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(project)
        tags = {"mlflow.source.name": "trainyard", "trainyard.version": VERSION}
        return str(self._client.create_run(experiment, tags=tags, run_name=name).info.run_id)


@contextmanager
def _rejections(run: str | None) -> Iterator[None]:
    """Turns what the user can fix, not a server that fails or is away, into a RecipeError."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        status: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
        if not 400 <= status < 500:
            raise
        if run:
            raise RecipeError(
                "tracker.mlflow-run-refused",
                "watch.mlflow: run {name}, which trackers.json or MLFLOW_RUN_ID names: {reason} "
                "(MLFLOW_TRACKING_URI names the server)",
                name=run,
                reason=reason(error),
            ) from None
        raise RecipeError(
            "tracker.mlflow-refused",
            "watch.mlflow: {reason} (MLFLOW_TRACKING_URI names the server)",
            reason=reason(error),
        ) from None


def _flat(recipe: dict[str, Any]) -> dict[str, str]:
    """Keys as on the command line: "optim.lr"."""
    return {
        f"{section}.{key}": as_text(value)
        for section, values in recipe.items()
        for key, value in values.items()
    }
