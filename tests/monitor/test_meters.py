"""Means and rates over a stretch of training."""

import json
from typing import Any

import pytest
import torch

from tests.spawn import spawn
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.monitor.clock import Clock
from trainyard.monitor.meters import Meter, StepStats
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
