"""Optimizers by name."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from trainyard.errors import RecipeError
from trainyard.installation import install_hint
from trainyard.optim.config import OptimConfig
from trainyard.optim.groups import parameter_groups

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> optim.Optimizer:
    """The optimizer over `model`'s trainable parameters, which must not be replaced later.

    It uses torch's fused kernels if there are any. With `compile`, the learning rates of groups are
    tensors, to be filled in place: a number would trigger a new compilation in every step.
    """
    optimizer = _BUILDERS[config.name](parameter_groups(model, config), config)
    return _compiled(optimizer) if config.compile else optimizer


def _compiled(optimizer: optim.Optimizer) -> optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign, assignment]
    return optimizer


def _sgd(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    fused = not config.compile and not _is_sharded(groups)  # torch has no fused kernel for DTensors
    optimizer = torch.optim.SGD(
        groups, config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
    )
    return with_momenta(optimizer) if fused and config.momentum else optimizer


def _is_sharded(groups: Groups) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in groups[0]["params"])


def with_momenta(optimizer: "optim.SGD") -> "optim.SGD":
    """Allocates a fused SGD's momenta: torch's are uninitialised if the first update skips."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _adam(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    kind = optim.AdamW if config.name == "adamw" else optim.Adam
    fused = not config.compile
    return kind(groups, config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _accum_adam(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    from trainyard.optim.accum_adam import AccumAdam

    return AccumAdam(
        groups,
        config.lr,
        betas=config.betas,
        eps=config.eps,
        accum_iter=config.accum_iter,
        decoupled=config.name == "accum_adamw",
    )


def _lamb(groups: Groups, config: OptimConfig) -> optim.Optimizer:
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


def _lars(groups: Groups, config: OptimConfig) -> optim.Optimizer:
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


def _lion(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    from timm.optim.lion import Lion

    optimizer: optim.Optimizer = Lion(groups, config.lr, betas=config.betas)
    return optimizer


def _muon(groups: Groups, config: OptimConfig) -> optim.Optimizer:
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


def _schedule_free(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    try:
        import schedulefree
    except ImportError:
        raise RecipeError(
            f"optim.name = {config.name!r} needs a package: {install_hint('schedulefree')}"
        ) from None
    optimizer: Any
    if config.name == "schedule_free_sgd":
        optimizer = schedulefree.SGDScheduleFree(
            groups, config.lr, momentum=config.betas[0], r=config.schedule_free_r
        )
    else:
        optimizer = schedulefree.AdamWScheduleFree(
            groups, config.lr, betas=config.betas, eps=config.eps, r=config.schedule_free_r
        )
    optimizer.train()
    return cast(optim.Optimizer, optimizer)


_BUILDERS: dict[str, Callable[[Groups, OptimConfig], optim.Optimizer]] = {
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
