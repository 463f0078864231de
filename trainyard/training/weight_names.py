"""Names of the weights of a run: "" for its own, "ema" for their moving average, "ema-0.99" for one
of several, by decay. A name is that of the file in a checkpoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def prefix_of(weights: str) -> str:
    """The prefix of metrics of these weights: "", "ema_" or "ema_0.99_"."""
    return f"{weights.replace('-', '_', 1)}_" if weights else ""


def label_of(prefix: str) -> str:
    """The name in tables of the weights with this prefix of metrics: raw, EMA or EMA 0.99."""
    return prefix.replace("ema", "EMA").replace("_", " ").strip() or "raw"


def with_best_average(
    report: Mapping[str, Any], averages: Sequence[str], by: str
) -> dict[str, Any]:
    """An evaluation with the values of the best of several averages under ema_… too.

    Its decay is "ema_decay". The best has the highest value of `by`; of equal ones, the first.
    """
    if not averages or averages == ["ema"]:
        return dict(report)
    best = max(averages, key=lambda name: float(report[f"{prefix_of(name)}{by}"]))
    prefix = prefix_of(best)
    keys = [key for key in report if key.startswith(prefix)]
    as_single = {f"ema_{key.removeprefix(prefix)}": report[key] for key in keys}
    return {**report, **as_single, "ema_decay": float(best.partition("-")[2])}
