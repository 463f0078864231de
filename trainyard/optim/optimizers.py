"""Optimizers by name: timm's, accumulated Adam, and schedule-free ones."""

from inspect import signature
from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from trainyard.errors import RecipeError
from trainyard.installation import install_hint
from trainyard.optim.config import OptimConfig
from trainyard.optim.groups import is_muon, parameter_groups

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> optim.Optimizer:
    """The optimizer over `model`'s trainable parameters, which must not be replaced later.

    Keys that are not set have the defaults of the optimizer's library. It uses torch's fused
    kernels if there are any. With `compile`, the learning rates of groups are tensors, to be filled
    in place: a number would trigger a new compilation in every step. RecipeError if a package is
    missing.
    """
    groups = parameter_groups(model, config)
    if config.name.startswith("accum"):
        return _accum_adam(groups, config)
    if config.name.startswith("schedule_free"):
        return _schedule_free(groups, config)
    optimizer = _from_timm(groups, config)
    return _compiled(optimizer) if config.compile else optimizer


def _from_timm(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    """An optimizer of timm's factory; LAMB with bias_correction = false and decay = "all" is
    Colossal-AI's.
    """
    from timm.optim import create_optimizer_v2, get_optimizer_class

    kind = get_optimizer_class(config.name, bind_defaults=False)
    parameters = signature(kind).parameters
    given = _set(
        momentum=config.momentum,
        nesterov=config.nesterov,
        betas=config.betas,
        eps=config.eps,
        trust_coeff=config.trust_coefficient,
        trust_clip=config.trust_clip,
        bias_correction=config.bias_correction,
        always_adapt=config.decay == "all",
    )
    options = {key: value for key, value in given.items() if key in parameters}
    if config.name == "sgd":  # timm's has Nesterov momentum
        options["nesterov"] = bool(config.nesterov)
    if is_muon(config.name):  # timm's factory has 0.9 for all optimizers
        options.setdefault("momentum", parameters["momentum"].default)
    if "max_grad_norm" in parameters:  # the update clips, for all optimizers alike
        options["max_grad_norm"] = None
    if kind in (optim.SGD, optim.Adam, optim.AdamW):
        # Torch has no fused SGD for DTensors.
        is_split = any(isinstance(p, DTensor) for p in groups[0]["params"])
        options["fused"] = not config.compile and not (kind is optim.SGD and is_split)
    made: optim.Optimizer = create_optimizer_v2(groups, opt=config.name, lr=config.lr, **options)
    has_momenta = isinstance(made, optim.SGD) and options["fused"] and made.defaults["momentum"]
    return with_momenta(made) if has_momenta else made


def with_momenta(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Allocates a fused SGD's momenta: torch's are uninitialised if the first update skips."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _compiled(optimizer: optim.Optimizer) -> optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign, assignment]
    return optimizer


def _accum_adam(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    from trainyard.optim.accum_adam import AccumAdam

    return AccumAdam(
        groups,
        config.lr,
        accum_iter=config.accum_iter,
        decoupled=config.name == "accum_adamw",
        **_set(betas=config.betas, eps=config.eps),
    )


def _schedule_free(groups: Groups, config: OptimConfig) -> optim.Optimizer:
    try:
        import schedulefree
    except ImportError:
        raise RecipeError(
            "recipe.needs-package",
            "optim.name = {value!r} needs a package: {hint}",
            value=config.name,
            hint=install_hint("schedulefree"),
        ) from None
    optimizer: Any
    options = _set(r=config.schedule_free_r)
    if config.name == "schedule_free_sgd":
        options |= _set(momentum=config.betas and config.betas[0])
        optimizer = schedulefree.SGDScheduleFree(groups, config.lr, **options)
    else:
        options |= _set(betas=config.betas, eps=config.eps)
        optimizer = schedulefree.AdamWScheduleFree(groups, config.lr, **options)
    optimizer.train()
    return cast(optim.Optimizer, optimizer)


def _set(**values: Any) -> dict[str, Any]:
    """The values that are set."""
    return {key: value for key, value in values.items() if value is not None}
