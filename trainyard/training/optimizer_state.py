"""An optimizer's part of a checkpoint: its state, and training weights of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainyard.averaging.sharded import part_like
from trainyard.errors import CheckpointError

# Entries of a parameter group that are state, in timm's LAMB and in schedule-free optimizers.
_COUNTS = frozenset(("step", "k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"))


def has_own_weights(optimizer: Optimizer) -> bool:
    """True if training and evaluation weights differ (schedule-free, Defazio et al. 2024)."""
    return hasattr(optimizer, "eval") and hasattr(optimizer, "train")


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the model has the weights for evaluation and export; then its own again, bit by bit.

    No effect for optimizers without separate weights.
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
        modes.train()  # computes the weights back, up to rounding
        with torch.no_grad():
            for parameter, own in zip(parameters, in_training, strict=True):
                parameter.copy_(own)


def save_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state with the name of its class."""
    return {"kind": type(optimizer).__name__, **optimizer.state_dict()}


def put_optimizer(optimizer: Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Load moments and counts from the checkpoint at `path`; rates and such stay the recipe's."""
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
        number: {key: _moment(value, parameters.get(number)) for key, value in own.items()}
        for number, own in saved["state"].items()
    }
    try:
        optimizer.load_state_dict({"state": state, "param_groups": merged})
    except ValueError as error:
        raise CheckpointError(f"{path}: does not fit the model: {error}") from None


def _moment(value: Any, parameter: nn.Parameter | None) -> Any:
    """This rank's part of a moment, laid out as its parameter: fused kernels rely on that."""
    own = part_like(value, parameter)
    if parameter is None or type(own) is not Tensor or own.shape != parameter.shape:
        return own
    return torch.empty_like(parameter, dtype=own.dtype, device=own.device).copy_(own)
