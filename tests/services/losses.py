"""What a run under any launcher is to report: the same as on two local ranks."""

import json
from pathlib import Path
from typing import Any

SAME = (  # a short run
    *("--run.length", "6 steps", "--run.log_every", "1 steps", "--run.eval_every", "0 steps"),
    *("--data.threads", "1"),
)
Losses = dict[int, float]
"""Of the train data, after so many steps."""


def losses_of(folder: Path) -> Losses:
    return {line["step"]: line["loss"] for line in reports(folder) if line["kind"] == "train"}


def has_gone_on(folder: Path, times: int = 1) -> bool:
    """Whether a run has gone on from a checkpoint so often, and has made a step since."""
    kinds = [line["kind"] for line in reports(folder) if line.get("event") in (None, "resumed")]
    return kinds.count("event") == times and kinds[-1] == "train"


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
