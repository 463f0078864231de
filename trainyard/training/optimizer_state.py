"""What an optimizer adds to a checkpoint: its state, and weights of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainyard.errors import CheckpointError
from trainyard.training.sharding import part_like

# Entries of a parameter group that are state: of timm's LAMB, and of schedule-free optimizers.
_COUNTS = frozenset(("step", "k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"))


def has_own_weights(optimizer: Optimizer) -> bool:
    """Whether the weights in training are not those to evaluate (Defazio et al. 2024)."""
    return hasattr(optimizer, "eval") and hasattr(optimizer, "train")


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Within, the model has the weights to evaluate and to export; then, bit by bit, its own.

    Nothing happens with an optimizer whose weights are one and the same.
    """
    if not has_own_weights(optimizer):
        yield
        return
    modes: Any = optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    in_training = [parameter.detach().clone() for parameter in parameters]
    modes.eval()
    try:
        yield
    finally:
        modes.train()  # computes them back, but for the rounding
        with torch.no_grad():
            for parameter, own in zip(parameters, in_training, strict=True):
                parameter.copy_(own)


def save_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    return {"kind": type(optimizer).__name__, **optimizer.state_dict()}


def put_optimizer(optimizer: Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Moments and counts come from the checkpoint at `path`; rates and such are the recipe's."""
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise CheckpointError(f"{path}: is of {saved['kind']}, the recipe says {kind}")
    groups, own_groups = saved["param_groups"], optimizer.param_groups
    if len(groups) != len(own_groups):
        raise CheckpointError(
            f"{path}: has {len(groups)} groups of parameters, the recipe makes {len(own_groups)}"
        )
    merged = [
        group | {key: own[key] for key in own if key != "params" and key not in _COUNTS}
        for group, own in zip(groups, own_groups, strict=True)
    ]
    parameters = dict(enumerate(p for group in own_groups for p in group["params"]))
    state = {
        number: {key: _part_of(value, parameters.get(number)) for key, value in own.items()}
        for number, own in saved["state"].items()
    }
    try:
        optimizer.load_state_dict({"state": state, "param_groups": merged})
    except ValueError as error:
        raise CheckpointError(f"{path}: does not fit the model: {error}") from None


def _part_of(value: Any, parameter: nn.Parameter | None) -> Any:
    return part_like(value, parameter) if isinstance(value, Tensor) else value
