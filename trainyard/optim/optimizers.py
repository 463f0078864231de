"""Optimizers by name, over parameter groups with and without weight decay."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from trainyard.section import Section

if TYPE_CHECKING:
    from torch import nn, optim


Beta = Annotated[float, Field(ge=0, lt=1)]


def _checked_factor(text: str) -> str:
    if not re.fullmatch(r"\S+\s*:\s*\d+(\.\d+)?(e-?\d+)?", text.strip()):
        raise ValueError('write a pattern of parameter names and a factor: "head.*: 10"')
    return text


PatternFactor = Annotated[str, AfterValidator(_checked_factor)]


class OptimConfig(Section):
    name: Literal[
        "sgd",
        "adam",
        "adamw",
        "lamb",
        "lars",
        "lion",
        "muon",
        "accum_adam",
        "accum_adamw",
        "schedule_free_sgd",
        "schedule_free_adamw",
    ] = "sgd"
    """The optimizer."""
    lr: float = Field(0.1, gt=0)
    """Peak learning rate, for the global batch as a whole; never scaled behind your back."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decay of weights; norms, biases and other vectors have none, see `decay`."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of sgd, lars and muon."""
    nesterov: bool = False
    """Of sgd, lars and muon."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Of those with moments; the first alone of schedule_free_sgd."""
    eps: float = Field(1e-8, gt=0)
    """Of those with moments, and of lars."""
    accum_iter: int = Field(4, ge=1)
    """Of accum_adam and accum_adamw: steps between two updates of the moments."""
    trust_coefficient: float = Field(1e-3, gt=0)
    """Of lars."""
    trust_clip: bool = False
    """Of lamb and lars: no trust ratio above 1."""
    bias_correction: bool = True
    """Of lamb."""
    decay: Literal["matrices", "all"] = "matrices"
    """What decays: matrices and kernels but for those that the model exempts, or everything."""
    decay_scale: tuple[PatternFactor, ...] = ()
    """Weight decay of some parameters, as factors: ["*.gamma: 0", "head.*: 2"]; the last match
    counts, and takes the place of `decay`."""
    lr_scale: tuple[PatternFactor, ...] = ()
    """Learning rate of some parameters, as factors: ["stem.*: 0.1"]; the last match counts."""
    backbone_lr: float = Field(1.0, ge=0)
    """Learning rate of all but the classifier, as a factor."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Factor of the learning rate from each layer to the one before it."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest norm of the whole gradient; no clipping if not given."""
    clip_agc: float | None = Field(None, gt=0)
    """Adaptive clipping (Brock et al. 2021): largest norm of a unit's gradient, as a share of its
    weight's; the classifier's is not clipped."""
    compile: bool = False
    """Compile the update with torch.compile."""

    @field_validator("nesterov")
    @classmethod
    def _has_momentum(cls, nesterov: bool, others: ValidationInfo) -> bool:
        if nesterov and others.data.get("momentum") == 0:
            raise ValueError("needs optim.momentum above 0")
        return nesterov


def build_optimizer(model: "nn.Module", config: OptimConfig) -> "optim.Optimizer":
    """The optimizer over `model`'s trainable parameters."""
    return _BUILDERS[config.name](parameter_groups(model, config.weight_decay), config)


def parameter_groups(model: "nn.Module", weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and kernels with weight decay; vectors and what the model itself exempts without."""
    exempt: set[str] = getattr(model, "no_weight_decay", set)()
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = parameter.ndim > 1 and name not in exempt
            (decayed if plain else undecayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "lr_scale": 1.0, "decay_scale": 1.0},
        {"params": undecayed, "weight_decay": 0.0, "lr_scale": 1.0, "decay_scale": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _sgd(groups: list[dict[str, Any]], config: OptimConfig) -> "optim.Optimizer":
    from torch import optim

    return optim.SGD(groups, config.lr, momentum=config.momentum, nesterov=config.nesterov)


def _adamw(groups: list[dict[str, Any]], config: OptimConfig) -> "optim.Optimizer":
    from torch import optim

    return optim.AdamW(groups, config.lr, betas=config.betas, eps=config.eps)


_BUILDERS: dict[str, Callable[[list[dict[str, Any]], OptimConfig], "optim.Optimizer"]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}
