"""How long a run will take from here."""

import pytest

from trainyard.course import Course, build_course
from trainyard.monitor.clock import Clock
from trainyard.monitor.eta import Eta


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
