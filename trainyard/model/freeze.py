"""Parameters that are not trained, by patterns of their names."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainyard.errors import RecipeError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take gradients from the parameters that match one of `patterns`.

    A batch norm of which nothing is trained keeps its statistics too: it normalises with them,
    in training as in evaluation. RecipeError if a pattern matches nothing, or all match.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            raise RecipeError(
                f"model.freeze: no parameter matches {pattern!r}{_near(pattern, list(parameters))}"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in parameters.values()):
        raise RecipeError("model.freeze: nothing is left to train: take fewer patterns")
    for module in model.modules():
        if isinstance(module, _BatchNorm) and _is_frozen(module):
            module.train = MethodType(_stay, module)  # type: ignore[method-assign]
            module.eval()


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of Module.train(), which whoever evaluates the whole model calls afterwards."""
    return nn.Module.train(module, False)


def _near(pattern: str, names: list[str]) -> str:
    stem = pattern.rstrip("*.")
    if any(name.startswith(f"{stem}.") for name in names):
        return f"; did you mean '{stem}.*'?"
    modules = {name[:end] for name in names for end, c in enumerate(name) if c == "."}
    close = difflib.get_close_matches(stem, sorted(modules | set(names)), n=1)
    if not close:
        return f"; the first is {names[0]!r}"
    return f"; did you mean {close[0] if close[0] in names else close[0] + '.*'!r}?"
