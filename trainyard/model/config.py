"""The [model] section of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from trainyard.errors import RecipeError
from trainyard.section import Section, refused

PIXELS = ("mean", "std", "interpolation", "crop_pct", "fit", "range", "background", "bands")
"""Keys of [data] that weights bring: how their images were prepared."""

Decay = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    NEEDS = (
        ("ema_warmup", "ema_decay"),
        ("ema_cpu", "ema_decay"),
        ("class_names", "checkpoint"),
    )

    name: str = "resnet50"
    """Name of a timm model, or "module:function" in the working directory for one of your own."""
    drop_path: float | None = Field(None, ge=0, lt=1)
    """Rate of stochastic depth; the model's own default if not set."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further options of the model, such as {ls_init_value = 1e-6}."""
    checkpoint: str | None = None
    """Initial weights: "timm" for timm's pretrained ones, a run (its best checkpoint), a
    checkpoint, or a file (.safetensors, .pth). The classifier keeps the rows of classes that are in
    both, by name, ImageNet's too; those of other classes are new."""
    class_names: dict[str, str] = Field(default_factory=dict)
    """Classes of `model.checkpoint` that have other names here: {"old name" = "new name"}."""
    checkpoint_key: str | None = None
    """Entry of a .pth file that holds the weights; detected by default."""
    checkpoint_prefix: str = ""
    """Prefix of the names in the file that the model's names lack, such as "module."."""
    linear_probe: bool = False
    """Start from the best linear classifier on the features of `model.checkpoint`: a logistic
    regression on the training images, at most 10,000 of them, in place of a classifier that the
    weights may have. Its accuracy is that of the evaluation at step 0."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters to freeze, such as ["stem.*", "stages.0.*"]."""
    freeze_statistics: bool = False
    """Have all batch norms normalise by the statistics of `model.checkpoint`, in training too: a
    few small batches would give others, and the features would not be those of the weights."""
    ema_decay: Decay | Annotated[tuple[Decay, ...], Field(min_length=1)] | None = None
    """Decay of the exponential moving average of the weights, which is evaluated beside the
    weights; no average if not set. Or several, such as [0.999, 0.9999]: an average of each, of
    which every evaluation chooses the best."""
    ema_warmup: bool = False
    """Raise the decay to its value over the first steps, for short runs."""
    ema_cpu: bool = False
    """Keep the moving average in host memory."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, 25 to 33% more time."""
    compile: Literal["off", "auto", "default", "reduce-overhead", "max-autotune"] = "off"
    """Mode of torch.compile; reduce-overhead uses CUDA graphs. auto: default for models that are
    known to train faster with it on CUDA (timm's VisionTransformer, so far), else off."""
    channels_last: bool = True
    """Memory format channels_last for images and weights, which is faster for convolutions."""

    @field_validator("ema_decay")
    @classmethod
    def _differ(cls, decays: float | tuple[float, ...] | None) -> object:
        if isinstance(decays, tuple) and len(set(decays)) < len(decays):
            raise ValueError("names a decay twice")
        return decays

    @property
    def averages(self) -> dict[str, float]:
        """Decays of the moving averages, by name: "ema" for a single one, or "ema-0.999", …"""
        if self.ema_decay is None:
            return {}
        if isinstance(self.ema_decay, float):
            return {"ema": self.ema_decay}
        return {f"ema-{decay}": decay for decay in sorted(self.ema_decay)}

    @field_validator("checkpoint_key", "checkpoint_prefix")
    @classmethod
    def _is_of_a_file(cls, text: str | None, others: ValidationInfo) -> str | None:
        if text and others.data.get("checkpoint") in (None, "timm"):
            raise ValueError("needs model.checkpoint to be a file")
        return text

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """Keys that need weights to begin with, or images that can be seen before."""
        scratch = {"model.checkpoint = none, weights that are random,": self.checkpoint is None}
        join = {"data.order = 'join'": recipe.data.order == "join"}
        if self.linear_probe:
            hint = "set model.linear_probe = false"
            yield from refused(scratch | join, "model.linear_probe", hint)
        if self.freeze_statistics:
            hint = "set model.freeze_statistics = false"
            yield from refused(scratch, "model.freeze_statistics", hint)
