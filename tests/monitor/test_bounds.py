"""Whether data bounds a run, judged by its training reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import curve, events, of_digits, train
from trainyard.config import load_recipe
from trainyard.monitor.bounds import Bounds, judge
from trainyard.monitor.clock import Clock
from trainyard.monitor.reports import Report
from trainyard.world import World


def train_report(real: float, loader: float | None, wait: float) -> Report:
    speeds = {"images_per_s": real, "images_per_s_loader": loader}
    return {"kind": "train", "data_wait": wait, **speeds}


@pytest.mark.parametrize(
    ("report", "bound", "words"),
    [
        (train_report(1900, 4100, 0.04), "device or ranks", ["not bound", "could make 4,100"]),
        (train_report(1900, None, 0.0), "device or ranks", ["not bound", "(1,900 images/s)"]),
        (train_report(1000, 1010, 0.5), "data", ["50%", "bench loader", "could make 1,010"]),
        (train_report(1000, None, 0.2), "data", ["20%", "bench loader"]),
        # the host is ahead of a GPU
        (train_report(1900, 8000, 0.9), "device or ranks", ["90%", "device is busy"]),
    ],
)
def test_whether_data_bounds_a_run(report: Report, bound: str, words: list[str]) -> None:
    event = judge(report)
    assert (event["kind"], event["event"], event["bound"]) == ("event", "bounds", bound)
    assert [word for word in words if word not in event["message"]] == []
    json.dumps(event, allow_nan=False)


def judged(every_s: float, reports: list[tuple[float, dict[str, Any]]], now: list[float]) -> str:
    """ "v" for reports that a judgement follows, else "-". Times are since the start."""
    passed_on: list[Report] = []
    bounds = Bounds(passed_on.append, Clock(), every_s)
    text, start = "", now[0]
    for seconds, report in reports:
        now[0] = start + seconds
        before = len(passed_on)
        bounds(report)
        assert passed_on[before] == report
        text += "v" if passed_on[before + 1 :] else "-"
    return text


def test_when_a_judgement_comes(now: list[float]) -> None:
    """After a minute, but not at the first report; then after the time that the recipe names."""
    train, other = train_report(10, 10, 0.5), {"kind": "val"}
    times = [(50.0, train), (61.0, other), (62.0, train), (300.0, train), (663.0, train)]
    assert judged(600, times, now) == "--v-v"
    assert judged(600, times[2:], now) == "-v-"
    assert judged(1e-9, times, now) == "--vvv"


def test_a_run_reports_it_and_is_the_same_without(digits: Path, tmp_path: Path) -> None:
    """At every training report but the first, with an interval of nothing."""
    for minutes in ("1e-9", "0"):
        options = {"run.length": "4 steps", "run.log_every": "1 step", "run.eval_every": "0 steps"}
        given = {"watch.bounds_minutes": minutes, "data.threads": "1"}
        train(
            World(), load_recipe("debug", of_digits(digits) | options | given), tmp_path / minutes
        )
    judged, plain = tmp_path / "1e-9", tmp_path / "0"
    assert [event["step"] for event in events(judged, "bounds")] == [2, 3, 4]
    assert {event["bound"] for event in events(judged, "bounds")} <= {"data", "device or ranks"}
    assert events(plain, "bounds") == []
    assert curve(judged, "train", "loss") == curve(plain, "train", "loss")
