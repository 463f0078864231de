"""`trainyard recipes NAME --params`: training settings of each parameter of a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainyard.commands.loading import loading

if TYPE_CHECKING:
    from trainyard.config import RunConfig


def parameter_rows(config: "RunConfig", num_classes: int = 1000) -> list[dict[str, Any]]:
    """A row for each parameter, in the model's order.

    Columns: parameter, shape, number (of weights), lr and decay (factors of the learning rate and
    of weight decay), update (the optimizer, adamw for parameters that Muon does not update, or
    frozen). The model is built without memory for its weights. RecipeError for patterns that match
    nothing, and the like.
    """
    with loading():
        import torch

        from trainyard.run.build import build_run_model
    from trainyard.optim.groups import GroupRates, parameter_shares

    with torch.device("meta"):
        model = build_run_model(config, num_classes)
    shares = parameter_shares(model, config.optim)
    rows = []
    for name, parameter in model.named_parameters():
        share = shares[name] if parameter.requires_grad else GroupRates(0.0, 0.0, "frozen")
        rows.append(
            {
                "parameter": name,
                "shape": list(parameter.shape),
                "number": parameter.numel(),
                "lr": share.lr_scale,
                "decay": share.decay_scale,
                "update": share.rule,
            }
        )
    return rows


def group_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per group of `parameter_rows` with its counts, the largest factors first."""
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("update", "lr", "decay")}
        group = groups.setdefault(tuple(key.values()), {**key, "parameters": 0, "number": 0})
        group["parameters"] += 1
        group["number"] += row["number"]
    return sorted(groups.values(), key=lambda group: (-group["lr"], -group["decay"]))
