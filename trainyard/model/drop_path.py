"""Stochastic depth with a rate that changes during training."""

from collections.abc import Callable

from timm.layers import DropPath
from torch import nn

from trainyard.errors import RecipeError


def drop_path_setter(model: nn.Module, built_with: float) -> Callable[[float], None]:
    """A function that sets a model's rate as if the model had been built with it.

    `built_with`: the rate (timm's `drop_path_rate`) of the build, above 0. Every block keeps its
    share of the rate, which grows with depth in most models. RecipeError if the model has none.
    """
    blocks = [block for block in model.modules() if isinstance(block, DropPath)]
    shares = [block.drop_prob / built_with for block in blocks]
    if not any(shares):
        raise RecipeError(
            "model.no-drop-path",
            "schedule.drop_path_start: the model has no stochastic depth (drop path) to change: "
            "leave the key out, or take another model.name",
        )
    now = built_with

    def set_rate(rate: float) -> None:
        nonlocal now
        if rate != now:
            now = rate
            for block, share in zip(blocks, shares, strict=True):
                block.drop_prob = rate * share

    return set_rate
