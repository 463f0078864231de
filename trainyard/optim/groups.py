"""Parameter groups: factors of the learning rate and of weight decay per parameter."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from trainyard.errors import RecipeError
from trainyard.hints import near_pattern
from trainyard.optim.config import OptimConfig


class GroupRates(NamedTuple):
    """The rates of one parameter group, and the rule that updates it."""

    lr_scale: float
    """Factor of the step's learning rate."""
    decay_scale: float
    """Factor of the step's weight decay."""
    rule: str
    """Name of the optimizer; adamw for parameters that Muon does not update."""


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, one per distinct `GroupRates` of trainable parameters.

    Groups have the keys lr_scale and decay_scale besides lr and weight_decay, which are the peaks;
    Muon's also have use_muon. RecipeError for a pattern that matches no parameter, and if no
    parameter is trainable.
    """
    members: dict[GroupRates, list[nn.Parameter]] = {}
    shares = parameter_shares(model, config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members.setdefault(shares[name], []).append(parameter)
    if not members:
        raise RecipeError("model.all-frozen")
    return [_group(share, parameters, config) for share, parameters in members.items()]


def parameter_shares(model: nn.Module, config: OptimConfig) -> dict[str, GroupRates]:
    """The share of every parameter by name, including frozen ones."""
    names = [name for name, _ in model.named_parameters()]
    exempt = _exempt(model, names)
    classifier = {id(parameter) for parameter in classifier_parameters(model)}
    layers = _layer_factors(model, config.layer_decay)
    lr_factors = _overrides("optim.lr_scale", config.lr_scale, names)
    decay_factors = _overrides("optim.decay_scale", config.decay_scale, names)
    shares = {}
    for name, parameter in model.named_parameters():
        in_classifier = id(parameter) in classifier
        is_matrix = parameter.ndim > 1 and not name.endswith(".bias") and name not in exempt
        lr_scale = layers.get(name, 1.0) * lr_factors.get(name, 1.0)
        if not in_classifier:
            lr_scale *= config.backbone_lr
        decay_scale = decay_factors.get(name, float(config.decay == "all" or is_matrix))
        rule = config.name
        # Of a linear map between channels; neither depthwise kernels nor [1, N, C].
        is_map = is_matrix and min(parameter.shape[:2]) > 1
        if is_muon(rule) and (in_classifier or not is_map):
            rule = "adamw"
        shares[name] = GroupRates(lr_scale, decay_scale, rule)
    return shares


def set_group_rates(optimizer: Optimizer, *, lr: float, weight_decay: float) -> None:
    """Set each group's learning rate and weight decay for a step."""
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay * group["decay_scale"]
        if torch.is_tensor(group["lr"]):  # in a compiled update
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]


def is_muon(name: str) -> bool:
    """True for timm's muon, nmuon, adamuon and nadamuon, which leave some parameters to AdamW."""
    return name.endswith("muon")


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of timm's classifier, or of both in a distilled model; empty without one."""
    classifier: Any = getattr(model, "get_classifier", tuple)()
    heads: Iterable[nn.Module] = classifier if isinstance(classifier, tuple) else (classifier,)
    return [parameter for head in heads for parameter in head.parameters()]


def _group(
    share: GroupRates, parameters: list[nn.Parameter], config: OptimConfig
) -> dict[str, Any]:
    group = {
        "params": parameters,
        "lr": config.lr * share.lr_scale,
        "weight_decay": config.weight_decay * share.decay_scale,
        "lr_scale": share.lr_scale,
        "decay_scale": share.decay_scale,
    }
    return group | ({"use_muon": is_muon(share.rule)} if is_muon(config.name) else {})


def _exempt(model: nn.Module, names: list[str]) -> set[str]:
    """Parameters that timm's model exempts from weight decay: position embeddings and the like."""
    patterns: Any = getattr(model, "no_weight_decay", set)()
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _layer_factors(model: nn.Module, decay: float | None) -> dict[str, float]:
    """Factor of each parameter's learning rate; layers are timm's, the last has factor 1."""
    if decay is None:
        return {}
    from timm.models import group_parameters

    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise RecipeError(
            "model.no-layer-decay", "optim.layer_decay: timm does not define layers for this model"
        )
    layers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: decay ** (last - layer) for name, layer in layers.items()}


def _overrides(key: str, texts: tuple[str, ...], names: list[str]) -> dict[str, float]:
    """The factor of each parameter that a "pattern: factor" matches; the last match counts."""
    factors: dict[str, float] = {}
    for text in texts:
        pattern, _, factor = text.rpartition(":")
        fitting = [name for name in names if fnmatchcase(name, pattern.strip())]
        if not fitting:
            raise RecipeError(
                "recipe.pattern-unmatched",
                key=key,
                pattern=pattern.strip(),
                hint=near_pattern(pattern, names),
            )
        factors |= dict.fromkeys(fitting, float(factor))
    return factors
