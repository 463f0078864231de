"""Means and rates over a stretch of training."""

import json
import mmap
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from tests.runs import curve, events, of_digits, train
from tests.spawn import spawn
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.config import load_recipe
from trainyard.course import Course, build_course
from trainyard.monitor.bounds import Bounds, judge
from trainyard.monitor.clock import Clock
from trainyard.monitor.devices import DeviceReadings, Gauge, _nvml, peak_flops
from trainyard.monitor.eta import Eta
from trainyard.monitor.meters import Meter, StepStats
from trainyard.monitor.reports import Report
from trainyard.world import World

CPU = torch.device("cpu")


def stats(
    loss_sum: float,
    correct: float,
    count: float,
    grad_norm: float = 0,
    *,
    skipped: bool = False,
) -> StepStats:
    sums = torch.tensor([loss_sum, correct, count], dtype=torch.float32)
    norm = torch.tensor(float(grad_norm))
    return StepStats(sums[0], sums[1], sums[2], norm, torch.tensor(float(skipped)))


def meter_of(world: World, *args: Any) -> Meter:
    return Meter(world, CPU, *args, add_up=AllReduce(AverageConfig(), world).add_up)


def test_means_and_rates(now: list[float]) -> None:
    clock = Clock()
    meter = meter_of(World(), clock)
    now[0] += 3
    meter.add(stats(20, 4, 10, grad_norm=7), capacity=60)
    with clock.phase("data"):
        now[0] += 1
    meter.add(stats(10, 2, 5, grad_norm=8), capacity=20)
    meter.add(stats(0, 0, 0, grad_norm=8))  # of a loader that does not know it
    report = meter.report()
    assert report.pop("memory") > 0
    assert report == {
        "loss": 2.0,
        "top1": 0.4,
        "grad_norm": 8.0,  # of the last step
        "skipped": 0,
        "images_per_s": 15 / 4,
        "images_per_s_device": 15 / 4,
        "images_per_s_loader": 30,  # a batch takes a third of the time of the other
        "mfu": None,
        "data_wait": 1 / 4,
        "gpu_use": None,
        "gpu_power": None,
        "world_size": 1,
    }


def test_the_share_of_the_peak(now: list[float]) -> None:
    """At its peak the device would take 0.1 s for each of the 15 images: 1.5 s of 4."""
    meter = meter_of(World(), Clock(), lambda: 0.1)
    now[0] += 4
    meter.add(stats(20, 4, 15))
    assert meter.report()["mfu"] == pytest.approx(1.5 / 4)


@pytest.mark.parametrize("before", ["phases", "checkpoint", "report"])
def test_what_is_no_training_time(before: str, now: list[float]) -> None:
    """Evaluations, checkpoints, what earlier processes took, and what was reported."""
    clock = Clock()
    if before == "checkpoint":
        clock.load_state_dict({"total": 5000.0, "data": 1000.0, "eval": 2000.0})
    meter = meter_of(World(), clock)
    for phase in ("eval", "save") if before == "phases" else ():
        with clock.phase(phase):
            now[0] += 1000
    if before == "report":
        now[0] += 1
        meter.add(stats(1000, 1000, 1000))
        meter.report()
    now[0] += 4
    with clock.phase("data"):
        now[0] += 1
    meter.add(stats(15, 0, 10))
    report = meter.report()
    assert (report["loss"], report["top1"]) == (1.5, 0)
    assert (report["images_per_s"], report["data_wait"]) == (2, 0.2)


def test_only_bad_samples(now: list[float]) -> None:
    meter = meter_of(World(), Clock())
    now[0] += 1
    meter.add(stats(0, 0, 0))
    report = meter.report()
    assert (report["loss"], report["top1"], report["images_per_s"]) == (0, 0, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_skipped_steps_count_as_such_and_as_time(bad: float, now: list[float]) -> None:
    """Their losses are no numbers; their images were computed with."""
    meter = meter_of(World(), Clock())
    now[0] += 2
    meter.add(stats(20, 4, 10, grad_norm=7))
    meter.add(stats(bad, 3, 10, grad_norm=bad, skipped=True))
    meter.add(stats(40, 2, 10, grad_norm=bad, skipped=True))  # another rank's was no number
    report = meter.report()
    assert (report["loss"], report["top1"], report["skipped"]) == (2, 0.4, 2)
    assert report["grad_norm"] == 7
    assert report["images_per_s"] == 15
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_stretch_without_an_update_can_be_written_down(now: list[float]) -> None:
    meter = meter_of(World(), Clock())
    now[0] += 1
    meter.add(stats(float("nan"), 0, 10, grad_norm=float("nan"), skipped=True))
    keys = list(meter.report())
    now[0] += 1
    meter.add(stats(float("inf"), 0, 10, grad_norm=float("inf"), skipped=True))
    report = meter.report()
    assert list(report) == keys
    assert (report["loss"], report["skipped"], report["images_per_s"]) == (0, 1, 10)
    json.dumps(report, allow_nan=False)


def test_sums_are_exact_over_millions() -> None:
    meter = meter_of(World(), Clock())
    meter.add(stats(2**25, 2**24, 2**24))
    for _ in range(3):
        meter.add(stats(1, 1, 1))  # float32 would lose each
    report = meter.report()
    assert report["loss"] == (2**25 + 3) / (2**24 + 3)
    assert report["top1"] == 1


def _report(world: World) -> dict[str, float]:
    meter = meter_of(world, Clock(), lambda: 0.1)
    if world.rank == 0:
        meter.add(stats(30, 1, 3), capacity=8)
    else:
        meter.add(stats(10, 1, 1), capacity=8)
    meter.add(stats(0, 0, 0, skipped=True))
    return meter.report()


def test_ranks_add_up() -> None:
    for report in spawn(_report, 2):
        assert (report["loss"], report["top1"]) == (10, 0.5)  # weighted by the counts
        assert (report["world_size"], report["skipped"]) == (2, 1)
        assert report["images_per_s_loader"] == 16
        assert report["images_per_s_device"] == report["images_per_s"] / 2
        assert report["mfu"] == pytest.approx(0.1 * report["images_per_s_device"])


# --- where the time of a run goes, over all its restarts ---


def test_phases_add_up(now: list[float]) -> None:
    clock = Clock()
    for seconds in (1.0, 2.0):
        with clock.phase("data"):
            now[0] += seconds
        now[0] += 10
    with clock.phase("save"):
        now[0] += 4
    assert clock.seconds("data") == 3
    assert clock.seconds("save") == 4
    assert clock.seconds("eval") == 0
    assert clock.total == 27


def test_a_phase_that_fails_is_counted(now: list[float]) -> None:
    clock = Clock()
    with pytest.raises(ValueError), clock.phase("data"):
        now[0] += 1
        raise ValueError
    assert clock.seconds("data") == 1


def test_a_restart_goes_on_where_the_checkpoint_was(now: list[float]) -> None:
    clock = Clock()
    with clock.phase("data"):
        now[0] += 5
    now[0] += 5
    saved = clock.state_dict()
    now[0] += 1000  # lost: after the checkpoint, and until the restart
    restarted = Clock()
    now[0] += 3  # until the checkpoint is loaded
    restarted.load_state_dict(saved)
    now[0] += 2
    with restarted.phase("data"):
        now[0] += 1
    assert restarted.total == 13
    assert restarted.seconds("data") == 6
    assert restarted.seconds("eval") == 0


def test_what_is_no_training(now: list[float]) -> None:
    clock = Clock()
    now[0] += 1
    for phase in ("data", "eval", "save"):
        with clock.phase(phase):
            now[0] += 10
    assert clock.training == 11


# --- whether data bounds a run, judged by its training reports ---


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


# --- how long a run will take from here ---


def course(length: str = "10 epochs", **options: object) -> Course:
    """Ten steps an epoch."""
    return build_course(length, epoch_samples=100, batch=10, image_size=32, **options)  # type: ignore[arg-type]


def test_by_the_pace_of_late(now: list[float]) -> None:
    clock, eta = Clock(), Eta(course(), course().every("0 steps"))
    now[0] += 50  # until the first report, with all that is done only once
    assert eta.after(10, clock) == {"eta_epoch": None, "eta": None}
    now[0] += 6  # 3 steps of 2 seconds
    assert eta.after(13, clock) == {"eta_epoch": 7 * 2, "eta": 87 * 2}
    now[0] += 2 * 4
    assert eta.after(17, clock) == {"eta_epoch": 3 * 2, "eta": 83 * 2}


def test_evaluations_that_are_to_come_take_what_those_before_took(now: list[float]) -> None:
    clock, eta = Clock(), Eta(course(), course().every("2 epochs"))
    for step in range(10, 30, 10):
        now[0] += 10  # a second a step
        eta.after(step, clock)
    with clock.phase("eval"):  # after step 20, the first of five
        now[0] += 7
    with clock.phase("save"):
        now[0] += 1
    now[0] += 5
    assert eta.after(25, clock) == {"eta_epoch": 5, "eta": 75 + 4 * 8}
    now[0] += 10
    assert eta.after(35, clock) == {"eta_epoch": 5 + 8, "eta": 65 + 4 * 8}
    now[0] += 5
    assert eta.after(40, clock)["eta"] == 60 + 4 * 8  # the evaluation of this step is to come


def test_the_last_evaluation_comes_whether_it_is_due_or_not(now: list[float]) -> None:
    clock, eta = Clock(), Eta(course("10 epochs"), course().every("3 epochs"))
    eta.after(25, clock)
    now[0] += 5
    eta.after(30, clock)
    with clock.phase("eval"):
        now[0] += 8
    now[0] += 60
    assert eta.after(90, clock)["eta"] == pytest.approx(10 + 8 / 2 * 2)  # at 90 and at 100
    now[0] += 10
    assert eta.after(100, clock)["eta"] == pytest.approx(8 / 3)


def test_larger_images_take_longer(now: list[float]) -> None:
    """Four times as long at twice the size, and nothing else is known of it."""
    growing = course(size_stages=["5 epochs: 64"])
    clock, eta = Clock(), Eta(growing, growing.every("0 steps"))
    eta.after(10, clock)
    now[0] += 10
    assert eta.after(20, clock)["eta"] == 30 * 1 + 50 * 4


def test_a_run_that_went_back_has_no_pace_at_first(now: list[float]) -> None:
    clock, eta = Clock(), Eta(course(), course().every("0 steps"))
    for step in (10, 20):
        now[0] += 10
        eta.after(step, clock)
    now[0] += 100
    assert eta.after(15, clock)["eta"] is None
    now[0] += 5
    assert eta.after(20, clock)["eta"] == 80


def test_what_a_run_did_before_it_was_resumed_counts_for_evaluations_alone(
    now: list[float],
) -> None:
    clock = Clock()
    clock.load_state_dict({"total": 1000.0, "eval": 30.0})  # three of them
    eta = Eta(course(), course().every("1 epoch"))
    eta.after(35, clock)
    now[0] += 1
    assert eta.after(36, clock)["eta"] == 64 + 7 * 10


# --- what a device says of itself ---


def test_a_cpu_has_the_memory_of_this_process() -> None:
    before = Gauge(CPU).read()
    with mmap.mmap(-1, 2**26) as kept:  # of no allocator's: it could have had it all along
        kept.write(b"1" * 2**26)
        after = Gauge(CPU).read()
    assert after.memory - before.memory > 0.9 * 2**26
    assert before == DeviceReadings(before.memory, gpu_use=None, gpu_power=None)


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(CPU, "bf16") is None


def test_without_a_driver_there_is_no_answer() -> None:
    """The library is there and says that there is no driver, or answers where there is one."""
    if torch.cuda.is_available():
        gauged = Gauge(torch.device("cuda", 0)).read()
        assert gauged.gpu_power is None or gauged.gpu_power > 0
        assert gauged.gpu_use is None or 0 <= gauged.gpu_use <= 1
    else:
        assert _nvml(pynvml.nvmlInit) is None
        assert _nvml(lambda: pynvml.nvmlDeviceGetHandleByIndex(0)) is None
