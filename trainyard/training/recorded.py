"""Saved predictions of a run's best weights for each validation sample."""

import io
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError
from trainyard.files import atomic_write
from trainyard.training.predictions import Predictions


class Recorded(NamedTuple):
    step: int
    weights: str  # "": the weights themselves, "ema_": their moving average
    labels: NDArray[np.int32]  # by sample number of the validation data
    said: Predictions


def record(
    path: Path, step: int, labels: NDArray[np.int32], said: Mapping[str, Predictions]
) -> None:
    """Save the predictions of the weights with the highest top-1, over those saved before.

    If equal, the moving average is taken, as in run/pretrained.py.
    """
    weights = max(said, key=lambda name: (said[name].evaluation().top1, name))
    columns = asdict(said[weights])
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
            said = Predictions(**{field.name: columns[field.name] for field in fields(Predictions)})
            step, weights = int(columns["step"]), str(columns["weights"])
            return Recorded(step, weights, columns["labels"], said)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: cannot be read ({error}): remove it") from None
