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
from trainyard.training.predictions import Predictions


class Recorded(NamedTuple):
    step: int
    weights: str  # prefix of metrics: "": the weights themselves, "ema_": their moving average
    labels: NDArray[Any]
    """By sample number of the validation data: int32[samples], or bool[samples, classes]."""
    scores: Any
    """Predictions, or LabelScores for images with lists of labels."""
    classes: tuple[str, ...] = ()
    """Names by class number, where they are known."""

    def is_of(self, best: Report) -> bool:
        """False if the best evaluation is another, as the run went back behind that of these."""
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
    columns = asdict(scores)
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
            scores = kind(**{field.name: columns[field.name] for field in fields(kind)})
            step, weights = int(columns["step"]), str(columns["weights"])
            return Recorded(step, weights, columns["labels"], scores)
    except Exception as error:  # a damaged file raises many kinds of errors
        raise DataError("run.predictions-unreadable", path=path, reason=str(error)) from None
