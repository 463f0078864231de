"""The last line of a run."""

import json

from trainyard.monitor.outcome import Outcome


def test_values_are_those_that_chose_the_best() -> None:
    """The higher ones of the weights and their moving average, or another value."""
    last, best = {"step": 30, "top1": 0.7, "ema_top1": 0.8}, {"step": 20, "top1": 0.6}
    best["ema_top1"] = 0.9
    sentence = Outcome("runs/a", 30, 75.4, last, best, None).sentence()
    assert {"80.00%", "90.00%", "20)", "0:01:15;"} <= set(sentence.replace("(", " ").split())
    last, best = {"step": 30, "map": 0.7, "top1": 0.9}, {"step": 20, "map": 0.75, "top1": 0.1}
    sentence = Outcome("runs/a", 30, 1, last, best, None, best_by="map").sentence()
    assert "70.00%" in sentence and "75.00%" in sentence


def test_json_has_no_number_that_json_lacks() -> None:
    """`train --json` of a run whose loss was NaN could not be read by others."""
    outcome = Outcome("runs/a", 30, 1, {"loss": float("nan")}, {"loss": float("inf")}, None)
    tree = json.loads(json.dumps(outcome.as_dict(), allow_nan=False))
    assert tree["last"] == tree["best"] == {"loss": None}
