"""Optimizers by name, over parameter groups with and without weight decay."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from trainyard.section import Section

if TYPE_CHECKING:
    from torch import nn, optim


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    name: Literal["sgd", "adamw"] = "sgd"
    """The optimizer."""
    lr: float = Field(0.1, gt=0)
    """Peak learning rate, for the global batch as a whole; never scaled behind your back."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decay of weights; norms, biases and other vectors have none."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of sgd."""
    nesterov: bool = False
    """Of sgd."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Of adamw."""
    eps: float = Field(1e-8, gt=0)
    """Of adamw."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest norm of the whole gradient; no clipping if not given."""

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
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
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
