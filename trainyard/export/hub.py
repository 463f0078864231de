"""A folder in the layout of timm's hub, for timm.create_model("local-dir:…")."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from trainyard.export.check import Exported
from trainyard.export.description import Description
from trainyard.export.formats import FORMATS
from trainyard.image_size import height_width

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
MARK = "trainyard"
"""A key of config.json that marks exports of Trainyard; other programs ignore it."""


def write_hub(model: nn.Module, about: Description, folder: Path) -> None:
    """Write weights and configuration, without the card."""
    FORMATS["safetensors"].write(model, about, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(_config(model, about), indent=2) + "\n")


def load_hub(folder: Path) -> Exported:
    """The model of a folder that `export --hub` wrote, loaded by timm."""
    import timm

    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()


def is_ours(folder: Path) -> bool:
    """True if a folder is an export of Trainyard."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and MARK in config


def _config(model: Any, about: Description) -> dict[str, Any]:
    """The configuration for timm 1.0.31 (timm/models/_hub.py) and earlier versions."""
    known, count = model.pretrained_cfg, len(about.classes)
    kept = {key: known.get(key) for key in ("first_conv", "classifier", "fixed_input_size")}
    config = {
        "architecture": about.architecture,
        "num_classes": count,
        "num_features": model.num_features,
        "label_names": about.classes,
        "pretrained_cfg": {
            **kept,
            "pool_size": None,
            "custom_load": False,
            "num_classes": count,
            "input_size": [about.channels, *height_width(about.image_size)],
            "interpolation": about.interpolation,
            "crop_pct": about.crop_pct,
            "crop_mode": "center",
            "mean": about.mean,
            "std": about.std,
        },
        MARK: {"step": about.step, "weights": about.weights, "evaluation": about.evaluation},
    }
    return config | ({"model_args": about.model_args} if about.model_args else {})
