"""The last line of a run."""

from trainyard.errors import Stopped
from trainyard.monitor.outcome import Outcome


def test_values_are_those_that_chose_the_best() -> None:
    """The higher ones of the weights and their moving average, which is the best here."""
    last, best = {"step": 30, "top1": 0.7, "ema_top1": 0.8}, {"step": 20, "top1": 0.6}
    best["ema_top1"] = 0.9
    outcome = Outcome("runs/a", 30, 75.4, last, best, None)
    expected = "top-1 80.00% (best 90.00% at step 20) in 0:01:15; the run is in runs/a"
    assert outcome.sentence() == expected


def test_without_an_average_and_by_another_value() -> None:
    last, best = {"step": 30, "map": 0.7, "top1": 0.9}, {"step": 20, "map": 0.75, "top1": 0.1}
    outcome = Outcome("runs/a", 30, 1, last, best, None, best_by="map")
    assert outcome.sentence().startswith("mAP 70.00% (best 75.00% at step 20) in ")


def test_a_run_that_was_stopped() -> None:
    said = Outcome("runs/a", 1234, 60, {}, {}, Stopped).sentence()
    assert said == "stopped at step 1,234 after 0:01:00; the same command resumes"
