"""What an exported model is, and what it takes: written into every file, and into its card."""

import json
import os
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn

from trainyard.classifier import Classifier
from trainyard.config import RunConfig
from trainyard.data.credentials import without_secrets
from trainyard.data.datasets import description
from trainyard.training import checkpoint

INPUT, OUTPUT = "images", "logits"  # names, where a format has them
# Options of timm's that only tell of training.
_OF_TRAINING = ("drop_rate", "drop_path_rate", "drop_block_rate")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Plain data. Sizes are in pixels, `mean` and `std` on a scale of 0 to 1."""

    architecture: str
    """timm's name."""
    model_args: dict[str, Any]
    """What timm.create_model is given besides, so that the weights fit."""
    classes: tuple[str, ...]
    image_size: int
    crop_pct: float
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    parameters: int
    step: int
    weights: str
    """ "ema" for the moving average, "raw" for the weights themselves."""
    precision: str
    """In which it was trained and evaluated; exported models compute in float32."""
    evaluation: dict[str, Any]
    """samples, top1, top5, loss of these weights where they were evaluated; else empty."""
    train: str
    val: str
    recipe: dict[str, dict[str, Any]]
    """The keys that are not as by default."""
    versions: dict[str, str]

    def metadata(self) -> dict[str, str]:
        """For the header of a file: names and texts; what is no text is JSON."""
        values = {
            "architecture": self.architecture,
            "model_args": self.model_args,
            "classes": self.classes,
            "num_classes": len(self.classes),
            "image_size": self.image_size,
            "input": f"float32[batch, 3, {self.image_size}, {self.image_size}], RGB from 0 to 1, "
            "minus mean, by std",
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "step": self.step,
            "weights": self.weights,
            "evaluation": self.evaluation,
            "versions": self.versions,
        }
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in values.items()
        }


def describe(classifier: Classifier) -> Description:
    config, model = classifier.config, classifier.model
    return Description(
        architecture=config.model.name.partition(".")[0],
        model_args=_model_args(model),
        classes=classifier.classes,
        image_size=classifier.image_size,
        crop_pct=config.data.crop_pct,
        interpolation=config.data.interpolation,
        mean=config.data.mean,
        std=config.data.std,
        parameters=sum(weight.numel() for weight in model.parameters()),
        step=classifier.step,
        weights="ema" if classifier.uses_ema else "raw",
        precision=config.batch.precision,
        evaluation=_evaluation(classifier),
        train=_place(description(config.data.train)),
        val=_place(description(config.data.val)),
        recipe=_recipe(config),
        versions={"torch": torch.__version__, "timm": timm.__version__},
    )


def _model_args(model: nn.Module) -> dict[str, Any]:
    """As timm's factory has noted them; what it has not is found out by the check."""
    noted: dict[str, Any] = getattr(model, "_model_args", {})
    own = {key: value for key, value in noted.items() if key not in _OF_TRAINING}
    return {key: value for key, value in own.items() if key != "num_classes"}


def _evaluation(classifier: Classifier) -> dict[str, Any]:
    """Of these weights, if the run evaluated them."""
    last = checkpoint.read_progress(classifier.checkpoint)["last"]
    prefix = "ema_" if classifier.uses_ema else ""
    if last.get("step") != classifier.step or f"{prefix}top1" not in last:
        return {}
    measured = {key: last[f"{prefix}{key}"] for key in ("top1", "top5", "loss")}
    return {"samples": last["samples"], **measured}


def _recipe(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Without what is about this machine."""
    tree = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    tree.pop("watch", None)
    for key in ("train", "val", "threads"):
        tree.get("data", {}).pop(key, None)
    found = {
        section: {key: _place(v) if isinstance(v, str) else v for key, v in values.items()}
        for section, values in tree.items()
    }
    return {section: values for section, values in found.items() if values}


def _place(text: str) -> str:
    """A location as others may see it: of a path on this machine the end alone."""
    shown = without_secrets(text)
    return "/".join(shown.rsplit("/", 2)[-2:]) if os.path.isabs(shown) else shown
