"""Recipe section for trackers, the profiler and bottleneck reports."""

import re
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from trainyard.section import Section


class WatchConfig(Section):
    """Reports of a run. No key of this section changes the training.

    A tracker is a switch with the class of monitor/trackers/KEY.py that it stands for. KEY is also
    the name of the package that the class needs, and of Trainyard's extra.
    """

    wandb: Annotated[bool, "WandbTracker"] = False
    """Report to Weights & Biases. A restart continues the same run there. `WANDB_MODE=offline`
    keeps the run on this machine."""
    tensorboard: Annotated[bool, "TensorboardTracker"] = False
    """Write TensorBoard's event files into the run directory."""
    mlflow: Annotated[bool, "MlflowTracker"] = False
    """Report to MLflow, at the server that `MLFLOW_TRACKING_URI` names. A restart continues the
    same run there."""
    project: str = "trainyard"
    """Project name for Weights & Biases; MLflow's experiment."""
    artifacts: bool = False
    """Upload the best checkpoint to Weights & Biases and MLflow at the end of the run."""
    profile: str | None = None
    """Steps that torch's profiler records on the first rank: "64:72" for the 8 steps after 64."""
    bounds_minutes: float = Field(10.0, ge=0)
    """Minutes between log lines that say whether data bounds the run. 0 for none."""

    def trackers(self) -> dict[str, str]:
        """The classes of the trackers that are on, by their keys."""
        fields = type(self).model_fields.items()
        return {
            key: kind
            for key, field in fields
            for kind in field.metadata
            if isinstance(kind, str) and getattr(self, key)
        }

    @field_validator("artifacts")
    @classmethod
    def _check_artifacts(cls, is_on: bool, info: ValidationInfo) -> bool:
        if is_on and not (info.data.get("wandb", True) or info.data.get("mlflow", True)):
            raise ValueError("is for watch.wandb = true or watch.mlflow = true")
        return is_on

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, text: str | None) -> str | None:
        if text is not None:
            window_of(text)
        return text


def window_of(text: str) -> tuple[int, int]:
    """The first step that "64:72" records, and the one after the last, both counted from 0."""
    match = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError('write the first step and the one after the last: "64:72" for eight steps')
    return int(match[1]), int(match[2])
