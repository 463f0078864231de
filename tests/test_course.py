"""Durations, phases of batch and image size, and what is due when."""

import math
from bisect import bisect_left
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from trainyard.config import check
from trainyard.course import Course, Phase, build_course
from trainyard.errors import RecipeError
from trainyard.image_size import ImageSize


def course(
    length: str = "640 steps",
    batches: tuple[str, ...] = (),
    sizes: tuple[str, ...] = (),
    *,
    epoch_samples: int = 1433,
    batch: int = 64,
) -> Course:
    """A run on the digits, unless told otherwise."""
    return build_course(
        length,
        epoch_samples=epoch_samples,
        batch=batch,
        image_size=32,
        batch_stages=batches,
        size_stages=sizes,
    )


def brief(course: Course) -> list[tuple[int, int, int, ImageSize]]:
    return [(p.start, p.first_sample, p.batch, p.image_size) for p in course.phases]


# --- durations ---


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        ("0 steps", Fraction(0)),
        ("1 step", Fraction(1)),
        ("300 steps", Fraction(300)),
        ("2.5 steps", Fraction(5, 2)),
        ("1 epoch", Fraction(1433, 64)),
        ("0.5 epoch", Fraction(1433, 128)),
        ("64 samples", Fraction(1)),
        ("65 samples", Fraction(65, 64)),
        ("10%", Fraction(64)),
        ("0.1 %", Fraction(64, 100)),  # exact, though 0.1 is no binary fraction
        ("100%", Fraction(640)),
        ("  5steps ", Fraction(5)),
        ("1000 steps", Fraction(1000)),  # beyond the run
    ],
)
def test_durations_are_exact(duration: str, steps: Fraction) -> None:
    assert course().at(duration) == steps
    assert course().epochs(duration) == steps * 64 / 1433


def test_durations_across_a_change_of_batch() -> None:
    # 10 steps of 64, then steps of 128: sample 640 is the border.
    changing = course(batches=("10 steps: 128",))
    assert changing.at("640 samples") == 10
    assert changing.at("704 samples") == Fraction(21, 2)
    assert changing.at("576 samples") == 9
    assert changing.epochs("12 steps") == Fraction(640 + 256, 1433)
    assert changing.epochs("10.5 steps") == Fraction(640 + 64, 1433)
    assert changing.epochs("1 epoch") == 1


@pytest.mark.parametrize(
    ("length", "num_steps"),
    [("7 steps", 7), ("6.5 steps", 7), ("1 epoch", 23), ("64 samples", 1), ("65 samples", 2)],
)
def test_the_steps_of_a_run_cover_its_length(length: str, num_steps: int) -> None:
    assert course(length).num_steps == num_steps


def test_a_percentage_is_of_the_length_in_its_own_unit() -> None:
    """Of steps where the length is in steps, of samples where it is in epochs or samples."""
    changes = ("10 steps: 192",)
    by_steps = course("20 steps", changes)
    assert by_steps.at("75%") == 15
    by_samples = course("2560 samples", changes)  # 640 in ten steps, 1920 in ten more
    assert by_samples.num_steps == 20
    assert by_samples.at("25%") == 10
    assert by_samples.at("75%") == 10 + Fraction(1280, 192)
    by_epochs = course("2 epochs", epoch_samples=1280, batches=changes)
    assert by_epochs.at("75%") == by_samples.at("75%")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("run.eval_every", "5"),
        ("run.eval_every", "epochs"),
        ("run.eval_every", "-1 epoch"),
        ("run.eval_every", "1 epoch or so"),
        ("run.eval_every", "1e3 steps"),
        ("run.length", "10%"),
        ("run.length", "0 epochs"),
        ("run.length", "0.0 steps"),
        ("schedule.warmup", "five epochs"),
    ],
)
def test_what_is_no_duration_is_refused_by_name(key: str, text: str) -> None:
    section, _, name = key.partition(".")
    with raises("recipe.invalid-value", key=key, value=f'"{text}"'):
        check({section: {name: text}})


@pytest.mark.parametrize(
    "text", ["160", "5 epochs", "5 epochs 160", "5 epochs: 0", "5 epochs: 1.5", "5: 160", "a%: 2"]
)
@pytest.mark.parametrize("key", ["image_size", "batch_size"])
def test_what_is_no_stage_is_refused_by_name(key: str, text: str) -> None:
    with raises("recipe.invalid-value", key=f"schedule.{key}", value=f'"{text}"'):
        check({"schedule": {key: [text]}})


# --- phases ---


def test_a_run_without_stages_is_one_phase() -> None:
    assert course("10 steps").phases == (Phase(0, 10, 0, 64, 32),)


def test_stages_begin_with_the_first_step_at_or_after_their_duration() -> None:
    # 1433 / 64 = 22.39
    assert brief(course("3 epochs", sizes=("1 epoch: 48", "2 epochs: 64"))) == [
        (0, 0, 64, 32),
        (23, 23 * 64, 64, 48),
        (45, 45 * 64, 64, 64),
    ]


@pytest.mark.parametrize("begin", ["10 steps", "640 samples", "0.5 epochs", "25%"])
def test_stages_in_any_unit(begin: str) -> None:
    found = course("2 epochs", (f"{begin}: 128",), (f"{begin}: 40",), epoch_samples=1280)
    assert brief(found) == [(0, 0, 64, 32), (10, 640, 128, 40)]
    assert found.num_steps == 25  # ten of 64 and fifteen of 128: 2560


def test_the_place_of_a_later_stage_depends_on_the_batches_before_it() -> None:
    found = course("100 steps", ("10 steps: 128", "1024 samples: 256", "20 steps: 64"))
    assert brief(found) == [
        (0, 0, 64, 32),
        (10, 640, 128, 32),
        (13, 1024, 256, 32),
        (20, 2816, 64, 32),
    ]
    sized = course("100 steps", ("10 steps: 128",), ("641 samples: 48",))
    assert brief(sized) == [(0, 0, 64, 32), (10, 640, 128, 32), (11, 768, 128, 48)]


def test_batches_and_sizes_that_change_at_different_times() -> None:
    found = course("40 steps", ("10 steps: 16", "30 steps: 8"), ("20 steps: 48", "30 steps: 64"))
    assert [(p.start, p.stop, p.batch, p.image_size) for p in found.phases] == [
        (0, 10, 64, 32),
        (10, 20, 16, 32),
        (20, 30, 16, 48),
        (30, 40, 8, 64),
    ]


def test_a_stage_at_once_replaces_the_first_values() -> None:
    assert brief(course("5 steps", ("0 steps: 8",), ("0%: 16",))) == [(0, 0, 8, 16)]


def test_a_short_run_leaves_out_the_stages_after_it() -> None:
    """What a trial of a long recipe does."""
    assert brief(course("5 steps", ("5 steps: 8",), ("6 epochs: 160",))) == [(0, 0, 64, 32)]


def test_of_stages_that_begin_with_the_same_step_the_last_one_holds() -> None:
    """Two steps of a recipe whose stages are percentages."""
    found = course("2 steps", ("10%: 128", "20%: 256"), ("30%: 40", "40%: 48", "60%: 56"))
    assert brief(found) == [(0, 0, 64, 32), (1, 64, 256, 48)]


@pytest.mark.parametrize(
    ("batches", "sizes", "key"),
    [
        (("10 steps: 8", "10 steps: 16"), (), "batch_size"),
        (("2 epochs: 8", "1 epoch: 16"), (), "batch_size"),
        ((), ("640 samples: 48", "10 steps: 64"), "image_size"),
        ((), ("50%: 48", "320 steps: 64"), "image_size"),
    ],
)
def test_stages_that_are_not_in_order_are_refused(
    batches: tuple[str, ...], sizes: tuple[str, ...], key: str
) -> None:
    second = (batches + sizes)[1]
    with raises("recipe.not-in-order", key=f"schedule.{key}", value=second):
        course(batches=batches, sizes=sizes)


amounts = st.one_of(
    st.tuples(st.integers(1, 60), st.just("steps")),
    st.tuples(st.integers(1, 1000), st.just("samples")),
    st.tuples(st.decimals("0.01", "3", places=2), st.just("epochs")),
)
durations = amounts.map("{0[0]} {0[1]}".format)
stages = st.lists(
    st.tuples(durations, st.integers(1, 300)).map("{0[0]}: {0[1]}".format), max_size=4
).map(tuple)


@settings(deadline=None, max_examples=300)
@given(
    length=durations,
    epoch_samples=st.integers(1, 400),
    batch=st.integers(1, 300),
    batches=stages,
    sizes=stages,
    every=amounts,
)
def test_any_course_holds_together(
    length: str,
    epoch_samples: int,
    batch: int,
    batches: tuple[str, ...],
    sizes: tuple[str, ...],
    every: tuple[int | Decimal, str],
) -> None:
    try:
        found = course(length, batches, sizes, epoch_samples=epoch_samples, batch=batch)
    except RecipeError:
        return  # not in order
    phases = found.phases
    assert phases[0].start == phases[0].first_sample == 0
    assert phases[-1].stop == found.num_steps == math.ceil(found.at(length))
    for one, other in pairwise(phases):
        assert one.start < one.stop == other.start
        assert other.first_sample == one.first_sample + (one.stop - one.start) * one.batch
    seen = [0]  # samples of the first so many steps; the last batch goes on past the end
    for step in range(found.num_steps + 3):
        phase = found.phase(step)
        assert phase.start <= step < phase.stop or phase is phases[-1]
        assert found.samples(step) == seen[-1]
        assert found.epoch(step) == seen[-1] / epoch_samples
        assert found.at(f"{seen[-1]} samples") == step
        assert found.epochs(f"{step} steps") == Fraction(seen[-1], epoch_samples)
        seen.append(seen[-1] + phase.batch)
    number, unit = Fraction(every[0]), every[1]
    amount = number * epoch_samples if unit == "epochs" else number
    position = list(range(len(seen))) if unit == "steps" else seen
    multiples = [amount * n for n in range(1, int(position[-1] / amount) + 1)]
    expected = {bisect_left(position, multiple) for multiple in multiples}
    due = found.every(f"{every[0]} {unit}").due
    assert [step for step in range(1, len(seen)) if due(step)] == sorted(expected)


# --- what is due ---


def dues(course: Course, duration: str) -> list[int]:
    every = course.every(duration)
    return [step for step in range(1, course.num_steps + 1) if every.due(step)]


@pytest.mark.parametrize(
    ("length", "duration", "expected"),
    [
        ("21 steps", "5 steps", [5, 10, 15, 20]),
        ("4 steps", "1 step", [1, 2, 3, 4]),
        ("5 steps", "10 samples", [1, 2, 3, 4, 5]),  # more often than every step
        *(("100 steps", never, []) for never in ("0 steps", "0 epochs", "0%", "0.0 samples")),
    ],
)
def test_steps_at_which_something_is_due(length: str, duration: str, expected: list[int]) -> None:
    assert dues(course(length), duration) == expected
