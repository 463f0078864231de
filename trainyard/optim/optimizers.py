"""Optimizers by name."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from trainyard.errors import RecipeError
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
    """Peak learning rate for the whole global batch; no automatic scaling."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay. Norms, biases and other vectors have none by default; see `decay`."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd, lars and muon."""
    nesterov: bool = False
    """Nesterov momentum of sgd, lars and muon. With muon, vectors, embeddings and the classifier
    then use NAdamW instead of AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the moments; schedule_free_sgd uses only the first."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator, in optimizers with moments and in lars."""
    accum_iter: int = Field(4, ge=1)
    """Steps between two updates of the moments, for accum_adam and accum_adamw."""
    trust_coefficient: float = Field(1e-3, gt=0)
    """Factor of lars' trust ratio."""
    trust_clip: bool = False
    """Clip the trust ratio of lamb and lars at 1."""
    bias_correction: bool = True
    """Bias correction of the moments, for lamb."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: matrices and kernels, unless the model exempts them, or all."""
    decay_scale: tuple[PatternFactor, ...] = ()
    """Factors of the weight decay by parameter name: ["*.gamma: 0", "head.*: 2"]. The last match
    applies and overrides `decay`."""
    lr_scale: tuple[PatternFactor, ...] = ()
    """Factors of the learning rate by parameter name: ["stem.*: 0.1"]. The last match applies, in
    addition to `backbone_lr` and `layer_decay`."""
    backbone_lr: float = Field(1.0, ge=0)
    """Factor of the learning rate of all layers except the classifier."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Factor of the learning rate from each layer (as timm groups them) to the previous one."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest norm of the whole gradient; no clipping if not set."""
    clip_agc: float | None = Field(None, gt=0)
    """Adaptive clipping (Brock et al. 2021): largest norm of a unit's gradient, as a share of the
    norm of its weight. The classifier is not clipped."""
    compile: bool = False
    """Compile the update with torch.compile."""

    @field_validator("nesterov")
    @classmethod
    def _has_momentum(cls, nesterov: bool, others: ValidationInfo) -> bool:
        if nesterov and others.data.get("momentum") == 0:
            raise ValueError("needs optim.momentum above 0")
        return nesterov

    @field_validator("betas")
    @classmethod
    def _has_an_average(cls, betas: tuple[float, float], others: ValidationInfo) -> object:
        if betas[0] == 0 and str(others.data.get("name")).startswith("schedule_free"):
            raise ValueError("the first must be above 0 for a schedule-free optimizer")
        return betas

    @field_validator("clip_agc")
    @classmethod
    def _clips_once(cls, clip_agc: float | None, others: ValidationInfo) -> float | None:
        if clip_agc is not None and others.data.get("clip_norm") is not None:
            raise ValueError("there is optim.clip_norm already: clip in one way")
        return clip_agc

    @field_validator("compile")
    @classmethod
    def _compiles(cls, compile: bool, others: ValidationInfo) -> bool:
        name = str(others.data.get("name"))
        if compile and name.startswith(("accum", "schedule_free")):
            raise ValueError(f"an update of {name} counts its steps in ways that do not compile")
        return compile


Groups = list[dict[str, Any]]


def build_optimizer(model: "nn.Module", config: OptimConfig) -> "optim.Optimizer":
    """The optimizer over `model`'s trainable parameters, which must not be replaced later.

    It uses torch's fused kernels if there are any. With `compile`, the learning rates of groups are
    tensors, to be filled in place: a number would trigger a new compilation in every step.
    """
    from trainyard.optim.groups import parameter_groups

    optimizer = _BUILDERS[config.name](parameter_groups(model, config), config)
    return _compiled(optimizer) if config.compile else optimizer


def _compiled(optimizer: "optim.Optimizer") -> "optim.Optimizer":
    import torch

    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign, assignment]
    return optimizer


def _sgd(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    import torch

    fused = not config.compile and not _is_sharded(groups)  # torch has no fused kernel for DTensors
    optimizer = torch.optim.SGD(
        groups, config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
    )
    return with_momenta(optimizer) if fused and config.momentum else optimizer


def _is_sharded(groups: Groups) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in groups[0]["params"])


def with_momenta(optimizer: "optim.SGD") -> "optim.SGD":
    """Allocates a fused SGD's momenta: torch's are uninitialised if the first update skips."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _adam(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    from torch import optim

    kind = optim.AdamW if config.name == "adamw" else optim.Adam
    fused = not config.compile
    return kind(groups, config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _accum_adam(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    from trainyard.optim.accum_adam import AccumAdam

    return AccumAdam(
        groups,
        config.lr,
        betas=config.betas,
        eps=config.eps,
        accum_iter=config.accum_iter,
        decoupled=config.name == "accum_adamw",
    )


def _lamb(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    """timm's LAMB; bias_correction = trust_clip = false and decay = "all" make it Colossal-AI's."""
    from timm.optim.lamb import Lamb

    optimizer: optim.Optimizer = Lamb(
        groups,
        config.lr,
        betas=config.betas,
        eps=config.eps,
        bias_correction=config.bias_correction,
        trust_clip=config.trust_clip,
        always_adapt=config.decay == "all",
        max_grad_norm=None,  # the update clips, for all optimizers alike
    )
    return optimizer


def _lars(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    from timm.optim.lars import Lars

    optimizer: optim.Optimizer = Lars(
        groups,
        config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        eps=config.eps,
        trust_coeff=config.trust_coefficient,
        trust_clip=config.trust_clip,
        always_adapt=config.decay == "all",
    )
    return optimizer


def _lion(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    from timm.optim.lion import Lion

    optimizer: optim.Optimizer = Lion(groups, config.lr, betas=config.betas)
    return optimizer


def _muon(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    from timm.optim.muon import Muon

    optimizer: optim.Optimizer = Muon(
        groups,
        config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        betas=config.betas,
        eps=config.eps,
    )
    return optimizer


def _schedule_free(groups: Groups, config: OptimConfig) -> "optim.Optimizer":
    try:
        import schedulefree
    except ImportError:
        raise RecipeError(
            f"optim.name = {config.name!r} needs a package: pip install 'trainyard[schedulefree]'"
        ) from None
    optimizer: Any
    if config.name == "schedule_free_sgd":
        optimizer = schedulefree.SGDScheduleFree(groups, config.lr, momentum=config.betas[0])
    else:
        optimizer = schedulefree.AdamWScheduleFree(
            groups, config.lr, betas=config.betas, eps=config.eps
        )
    optimizer.train()
    return cast("optim.Optimizer", optimizer)


_BUILDERS: dict[str, Callable[[Groups, OptimConfig], "optim.Optimizer"]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adam,
    "lamb": _lamb,
    "lars": _lars,
    "lion": _lion,
    "muon": _muon,
    "accum_adam": _accum_adam,
    "accum_adamw": _accum_adam,
    "schedule_free_sgd": _schedule_free,
    "schedule_free_adamw": _schedule_free,
}
