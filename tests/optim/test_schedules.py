"""Durations, what is due when, and the learning rate of each step."""

import math
from fractions import Fraction

import pytest

from trainyard.config import check
from trainyard.errors import RecipeError
from trainyard.optim.schedules import Every, Scale, ScheduleConfig, build_schedule

DIGITS = Scale(epoch=1433, step=64, run=640 * 64)


@pytest.mark.parametrize(
    ("duration", "samples"),
    [
        ("1 step", Fraction(64)),
        ("300 steps", Fraction(300 * 64)),
        ("2 epochs", Fraction(2 * 1433)),
        ("0.5 epoch", Fraction(1433, 2)),
        ("1000 samples", Fraction(1000)),
        ("10%", Fraction(64 * 64)),
        ("0.1 %", Fraction(64 * 640, 1000)),  # exact, though 0.1 is no binary fraction
        ("  5steps ", Fraction(5 * 64)),
    ],
)
def test_durations_are_exact(duration: str, samples: Fraction) -> None:
    assert DIGITS.samples(duration) == samples


@pytest.mark.parametrize(
    ("duration", "steps"),
    [("1 epoch", 23), ("64 samples", 1), ("65 samples", 2), ("0 steps", 0), ("100%", 640)],
)
def test_steps_cover_a_duration(duration: str, steps: int) -> None:
    assert DIGITS.steps(duration) == steps


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("eval_every", "5"),
        ("eval_every", "epochs"),
        ("eval_every", "-1 epoch"),
        ("eval_every", "1 epoch or so"),
        ("length", "10%"),
        ("length", "0 epochs"),
        ("length", "0.0 steps"),
    ],
)
def test_what_is_no_duration_is_refused_by_name(key: str, text: str) -> None:
    with pytest.raises(RecipeError, match=rf"run\.{key} = "):
        check({"run": {key: text}})


def dues(every: Every, num_steps: int) -> list[int]:
    return [step for step in range(1, num_steps + 1) if every.due(step)]


def test_every_few_steps() -> None:
    assert dues(Every(Fraction(5 * 64), batch=64), 21) == [5, 10, 15, 20]


def test_every_step() -> None:
    assert dues(Every(Fraction(64), batch=64), 4) == [1, 2, 3, 4]


def test_never() -> None:
    assert dues(Every(Fraction(0), batch=64), 100) == []


def test_an_epoch_is_over_at_the_first_step_that_completes_it() -> None:
    # 1433 / 64 = 22.39…: each due step is the first one at or after its border, without drift.
    expected = [math.ceil(epoch * 1433 / 64) for epoch in range(1, 25)]
    assert dues(Every(DIGITS.samples("1 epoch"), batch=64), expected[-1]) == expected


def test_exactly_at_an_epoch_border() -> None:
    assert dues(Every(Fraction(1280), batch=64), 61) == [20, 40, 60]


def test_more_often_than_every_step_is_every_step() -> None:
    assert dues(Every(Fraction(10), batch=64), 5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stretch", ["0.3 epoch", "7%", "100 samples", "3 steps"])
def test_as_often_as_multiples_lie_in_the_run(stretch: str) -> None:
    samples = DIGITS.samples(stretch)
    assert len(dues(Every(samples, batch=64), 640)) == min(640 * 64 // samples, 640)


def rates(lr: float, num_steps: int, **config: object) -> list[float]:
    scale = Scale(epoch=1000, step=10, run=num_steps * 10)
    schedule = build_schedule(ScheduleConfig.model_validate(config), lr=lr, scale=scale)
    return [schedule(step) for step in range(num_steps)]


def test_warm_up_then_cosine() -> None:
    found = rates(0.8, 100, warmup="20 steps", min_lr=0.01)
    rise = [0.8 * (step + 1) / 20 for step in range(20)]
    fall = [
        0.01 + 0.79 * 0.5 * (1 + math.cos(math.pi * (step - 19) / 80)) for step in range(20, 100)
    ]
    assert found == pytest.approx(rise + fall, rel=1e-12)
    assert max(found) == found[19] == 0.8  # the peak is the last step of the warm-up
    assert found[-1] == pytest.approx(0.01)


def test_warm_up_of_no_whole_number_of_steps() -> None:
    found = rates(1.0, 40, warmup="25 samples")  # two and a half steps
    assert found[:2] == pytest.approx([1 / 2.5, 2 / 2.5])
    assert found[2] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5 / 37.5)))


def test_cosine_without_warm_up() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * (step + 1) / 8)) for step in range(8)]
    assert rates(1.0, 8) == pytest.approx(expected)


def test_constant() -> None:
    found = rates(0.3, 10, name="constant", warmup="30%")
    assert found == pytest.approx([0.1, 0.2, 0.3, *[0.3] * 7])


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_all_warm_up(name: str) -> None:
    expected = [0.25, 0.5, 0.75, 1.0]
    assert rates(1.0, 4, name=name, warmup="100%") == pytest.approx(expected)
