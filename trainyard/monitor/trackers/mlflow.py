"""MLflow: a run at the server of $MLFLOW_TRACKING_URI; a resumed run continues it."""

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trainyard.errors import RecipeError
from trainyard.files import RunDirectory
from trainyard.installation import VERSION
from trainyard.monitor.reports import Report
from trainyard.monitor.trackers.tracker import BestEvaluation, TrackerIds, figures

_START_S = 20.0  # for an answer before training starts; then the server may take longer
_PATIENCE_S = 300.0  # for unsent data at the end of a run
_MOST_METRICS = 1000  # in one request: limits of MLflow's REST API
_MOST_PARAMS = 100
_LOGIN = re.compile(r"://[^/\s\"<>]*@")


class MlflowTracker:
    """Figures are metrics at Trainyard's steps.

    A thread talks to the server, because MLflow repeats a failed request for minutes.
    """

    def __init__(
        self,
        folder: RunDirectory,
        recipe: dict[str, Any],
        *,
        project: str,
        artifacts: bool,
        best_by: str,
    ) -> None:
        """RecipeError if the server rejects the settings or does not know a resumed run."""
        for name in ("DISABLE_TELEMETRY", "SUPPRESS_PRINTING_URL_TO_STDOUT"):
            os.environ.setdefault(f"MLFLOW_{name}", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient  # here, for an error before the thread

        self._make = MlflowClient
        self._checkpoint = folder.checkpoints / "best" if artifacts else None
        self._best = BestEvaluation(folder.metrics, best_by)
        self._pending: deque[tuple[str, float, int, int]] = deque()
        self._is_complete = False
        self._thread = _Jobs()
        self._thread.add(lambda: self._open(folder.path, recipe, project))
        self._thread.wait(_START_S)

    def write(self, report: Report) -> None:
        if report["kind"] == "event":
            return
        self._note(figures(report))
        if report["kind"] == "val" and self._best.is_improved_by(report):
            best = figures(report | {"kind": "best"})
            self._note({key: best[key] for key in best if key.startswith("best/") or key == "step"})
        self._thread.add(self._send)

    def complete(self) -> None:
        self._is_complete = True
        if self._checkpoint is not None:
            path = str(self._checkpoint.resolve())
            self._thread.add(lambda: self._client.log_artifacts(self._id, path, "best"))

    def close(self) -> None:
        status = "FINISHED" if self._is_complete else "KILLED"
        self._thread.add(lambda: self._client.set_terminated(self._id, status))
        try:
            if not self._thread.wait(_PATIENCE_S):
                raise TimeoutError(f"unsent figures after {_PATIENCE_S:.0f} seconds")
        finally:
            self._thread.end()

    def _note(self, numbers: dict[str, float]) -> None:
        now, step = int(time.time() * 1000), int(numbers.pop("step"))
        self._pending.extend((key, float(value), now, step) for key, value in numbers.items())

    # --- in the thread ---

    def _open(self, folder: Path, recipe: dict[str, Any], project: str) -> None:
        memory = TrackerIds(folder)
        known = memory.recall("mlflow") or os.environ.get("MLFLOW_RUN_ID")
        with _rejections(known):
            self._client = self._make()
            if known is None:
                known = self._created(project, folder.resolve().name)
            run = self._client.get_run(known)
            self._id: str = known
            memory.keep("mlflow", known)
            self._client.update_run(known, status="RUNNING")
            # Parameters cannot be changed: those of the first start remain.
            self._send_params(_flat(recipe), run.data.params)

    def _created(self, project: str, name: str) -> str:
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        tags = {
            "mlflow.source.name": "trainyard",
            "trainyard.version": VERSION,
        }
        run = self._client.create_run(experiment, tags=tags, run_name=name)
        return str(run.info.run_id)

    def _send_params(self, params: dict[str, str], known: dict[str, str]) -> None:
        from mlflow.entities import Param

        new = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_PARAMS])

    def _send(self) -> None:
        """Send what is there, of several reports if the server is slow."""
        from mlflow.entities import Metric

        count = min(len(self._pending), _MOST_METRICS)
        if count:
            metrics = [Metric(*self._pending.popleft()) for _ in range(count)]
            self._client.log_batch(self._id, metrics=metrics)


class _Jobs:
    """Does jobs in their order in a thread, until one fails.

    The thread does not keep a process alive.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | threading.Event | None] = SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._work, name="mlflow", daemon=True).start()

    def add(self, job: Callable[[], object]) -> None:
        """Raises the error of an earlier job."""
        if self._error is not None:
            raise self._error
        self._jobs.put(job)

    def wait(self, seconds: float) -> bool:
        """Whether all jobs were done in time. Raises the error of a job."""
        done = threading.Event()
        self._jobs.put(done)
        is_done = done.wait(seconds)
        if self._error is not None:
            raise self._error
        return is_done

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                if self._error is None:
                    job()
            except RecipeError as error:
                self._error = error
            except Exception as error:
                self._error = RuntimeError(_shown(error))


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
        of_run = f" run {run}, which trackers.json or MLFLOW_RUN_ID names:" if run else ""
        raise RecipeError(
            f"watch.mlflow:{of_run} {_shown(error)} (MLFLOW_TRACKING_URI names the server)"
        ) from None


def _shown(error: Exception) -> str:
    """The first line of a message, which may quote the server's address, without its login."""
    first = f"{error}".strip().partition("\n")[0] or type(error).__name__
    return _LOGIN.sub("://", first)


def _flat(recipe: dict[str, Any]) -> dict[str, str]:
    """Keys as on the command line: "optim.lr"."""
    return {
        f"{section}.{key}": value if isinstance(value, str) else json.dumps(value)
        for section, values in recipe.items()
        for key, value in values.items()
    }
