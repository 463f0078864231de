"""Saved predictions of a run's best weights for each validation sample."""

import io
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError
from trainyard.files import atomic_write
from trainyard.monitor.reports import Report
from trainyard.training.label_scores import LabelScores
from trainyard.training.predictions import NOWHERE, Predictions

_COLUMN = {"rank_of_truth": "place"}  # names in the file that are not those of the fields


class Recorded(NamedTuple):
    step: int
    weights: str  # prefix of metrics: "": the weights themselves, "ema_": their moving average
    labels: NDArray[Any]
    """By sample number of the validation data: int32[samples], or bool[samples, classes]."""
    scores: Any
    """Predictions, or LabelScores for images with lists of labels."""
    classes: tuple[str, ...] = ()
    """Names by class number, where they are known."""
    files: tuple[str, ...] = ()
    """Paths or URLs by sample number; empty where the data is not there or has changed."""

    def is_of(self, best: Report) -> bool:
        """False if these predictions belong to an evaluation that a rollback removed."""
        return not best or bool(best["step"] == self.step)


def record(
    path: Path,
    step: int,
    labels: NDArray[Any],
    scores: Predictions | LabelScores,
    *,
    weights: str,
) -> None:
    """Save the predictions of the weights, or of their moving average, over those saved before."""
    columns = {_COLUMN.get(name, name): column for name, column in asdict(scores).items()}
    packed = io.BytesIO()
    np.savez_compressed(
        packed, step=np.int64(step), weights=np.str_(weights), labels=labels, **columns
    )
    with atomic_write(path, packed.tell()) as file:
        file.write(packed.getbuffer())


def load_recorded(path: Path) -> Recorded | None:
    """The saved predictions; None if there are none. DataError if the file holds something else."""
    if not path.exists():
        return None
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as columns:
            kind = LabelScores if "logits" in columns else Predictions
            scores = kind(*(columns[_COLUMN.get(each.name, each.name)] for each in fields(kind)))
            step, weights = int(columns["step"]), str(columns["weights"])
            recorded = Recorded(step, weights, columns["labels"], scores)
            _check(recorded)
            return recorded
    except Exception as error:  # a damaged file raises many kinds of errors
        raise DataError(
            "run.predictions-unreadable",
            "{path}: cannot be read ({reason}): remove it",
            path=path,
            reason=str(error),
        ) from None


def _check(recorded: Recorded) -> None:
    """ValueError unless each column has its kind, its length and its range."""
    labels, scores = recorded.labels, recorded.scores
    samples = scores.is_read().shape[:1]
    if isinstance(scores, LabelScores):
        classes = scores.logits.shape[:1]
        _check_column("read", scores.read, "b", samples)
        _check_column("logits", scores.logits, "f", classes + samples)
        _check_column("labels", labels, "b", samples + classes)
        return
    _check_column("labels", labels, "i", samples, bounds=(0, NOWHERE))
    _check_column("place", scores.rank_of_truth, "f", samples, bounds=(0, NOWHERE))
    _check_column("guess", scores.guess, "f", samples, bounds=(-1, NOWHERE))
    _check_column("confidence", scores.confidence, "f", samples, bounds=(0, 1 + 1e-3))  # rounded
    _check_column("loss", scores.loss, "f", samples)  # not finite, where a logit is not


def _check_column(
    name: str,
    column: NDArray[Any],
    kind: str,
    shape: tuple[int, ...],
    *,
    bounds: tuple[float, float] | None = None,
) -> None:
    if column.dtype.kind != kind or column.shape != shape or 0 in shape[:-1]:
        raise ValueError(f"{name} is {column.dtype}{list(column.shape)}")
    if bounds and not ((column >= bounds[0]) & (column <= bounds[1])).all():
        raise ValueError(f"{name} is not between {bounds[0]} and {bounds[1]:g}")
