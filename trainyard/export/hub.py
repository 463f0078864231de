"""A folder in the layout of timm's hub, for timm.create_model("local-dir:…")."""

from pathlib import Path
from typing import Any

import timm
from torch import nn

from trainyard.export.check import Exported
from trainyard.export.description import Description
from trainyard.export.formats import FORMATS, Format
from trainyard.files import read_json
from trainyard.image_size import height_width
from trainyard.model.weights import CROP_MODES

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
MARK = "trainyard"
"""A key of config.json that marks exports of Trainyard; other programs ignore it."""
# What timm's configuration has besides, such as a license, is of timm's own weights.
_OF_ARCHITECTURE = (
    "architecture",
    "classifier",
    "first_conv",
    "fixed_input_size",
    "input_size",
    "pool_size",
)


def _write_hub(model: Any, about: Description, folder: Path) -> None:
    known = model.pretrained_cfg
    model.pretrained_cfg = {key: known[key] for key in _OF_ARCHITECTURE if key in known}
    mark = {"step": about.step, "weights": about.weights, "evaluation": about.evaluation}
    timm.models.save_for_hf(
        model,
        str(folder),
        model_config={"label_names": about.classes, MARK: mark},
        model_args=about.model_args,
        data_config={
            "input_size": (about.channels, *height_width(about.image_size)),
            "interpolation": about.interpolation,
            "crop_pct": about.crop_pct,
            "crop_mode": CROP_MODES[about.fit],
            "mean": about.mean,
            "std": about.std,
        },
        safe_serialization=True,
    )
    # Once more, with the header that a recipe's model.checkpoint reads.
    FORMATS["safetensors"].write(model, about, folder / WEIGHTS)


def _load_hub(folder: Path) -> Exported:
    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()


HUB = Format(_write_hub, _load_hub, lambda folder: FORMATS["safetensors"].about(folder / WEIGHTS))
"""The format of a folder, without the card."""


def is_ours(folder: Path) -> bool:
    """True if a folder is an export of Trainyard."""
    try:
        return MARK in read_json(folder / CONFIG)
    except (OSError, ValueError):
        return False
