"""Frozen parameters, by patterns of their names."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainyard.errors import RecipeError
from trainyard.hints import near_pattern


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match one of `patterns`.

    A batch norm without trainable parameters keeps its statistics too, and normalises with them in
    training as in evaluation. RecipeError if a pattern matches nothing, or all match.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            names = list(parameters)
            hint = near_pattern(pattern, names) or f"; the first is {names[0]!r}"
            raise RecipeError(
                "recipe.pattern-unmatched", key="model.freeze", pattern=pattern, hint=hint
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in parameters.values()):
        raise RecipeError("model.all-frozen")
    freeze_statistics(module for module in model.modules() if _is_frozen(module))


def freeze_statistics(modules: Iterable[nn.Module]) -> None:
    """Have the batch norms among modules keep their statistics, and normalise with them."""
    for module in modules:
        if isinstance(module, _BatchNorm):
            module.train = MethodType(_stay, module)  # type: ignore[method-assign]
            module.eval()


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces Module.train(), which evaluation of the whole model calls afterwards."""
    return nn.Module.train(module, False)
