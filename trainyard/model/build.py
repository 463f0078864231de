"""A timm model by name."""

import difflib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainyard.errors import RecipeError
from trainyard.section import Section

if TYPE_CHECKING:
    from torch import nn


class ModelConfig(Section):
    name: str = "resnet50"
    """Any model of timm."""
    drop_path: float | None = Field(None, ge=0, lt=1)
    """Rate of stochastic depth; the model's own default if not given."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further options of timm's model: {ls_init_value = 1e-6}, say."""
    checkpoint: str | None = None
    """Weights to begin with: "timm" for its pretrained ones, a run, a checkpoint, or a file
    (.safetensors, .pth). The classifier is left out where the classes differ."""
    checkpoint_key: str | None = None
    """Entry of a .pth file that holds the weights; found by itself if not given."""
    checkpoint_prefix: str = ""
    """What names in the file begin with and the model's do not: "module." say."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained: ["stem.*", "stages.0.*"]."""
    ema_decay: float | None = Field(None, ge=0, lt=1)
    """Decay of a moving average of the weights, evaluated beside them; none if not given."""
    ema_warmup: bool = False
    """Whether the decay rises to its value, so that a short run does not average its beginning."""
    ema_cpu: bool = False
    """Whether the average lies in the host's memory."""
    grad_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a
    quarter to a third more time."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """Mode of torch.compile; reduce-overhead uses CUDA graphs."""
    channels_last: bool = True
    """Store images and weights channels last, which convolutions prefer."""


def build_model(
    config: ModelConfig, *, num_classes: int, image_size: int, eval_size: int | None = None
) -> "nn.Module":
    """The model on the CPU, freshly initialised from torch's random state; sizes in pixels."""
    import timm
    import torch

    _check_name(config.name)
    options: dict[str, Any] = {"num_classes": num_classes}
    if config.drop_path is not None:
        options["drop_path_rate"] = config.drop_path
    pretrained_cfg = timm.get_pretrained_cfg(config.name)
    if pretrained_cfg is not None and pretrained_cfg.fixed_input_size:
        if eval_size not in (None, image_size):
            raise RecipeError(
                f"data.eval_size = {eval_size}: {config.name} takes one size only, and "
                f"data.image_size is {image_size}"
            )
        options["img_size"] = image_size
    try:
        model: nn.Module = timm.create_model(config.name, **options)
    except TypeError as error:
        raise RecipeError(f"model.name: {config.name} does not take {_keyword(error)}") from None
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(memory_format=layout)


def _check_name(name: str) -> None:
    import timm

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() has them all"
        raise RecipeError(f"model.name: timm has no model {name!r}; {hint}")


def _keyword(error: TypeError) -> str:
    """The option that a constructor refused, in recipe terms."""
    refused = str(error).rpartition("argument ")[2].strip("'")
    return {"drop_path_rate": "model.drop_path", "img_size": "data.image_size"}.get(
        refused, str(error)
    )
