"""The rates of each step, against the written-out formulas of four systems, torch and timm."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
)

from tests.errors import raises
from trainyard.config import check, load_recipe
from trainyard.course import Course, build_course
from trainyard.optim.schedules import Rates, Schedule, build_schedule

Rows = NDArray[np.float64]


def course(length: str, *, steps_per_epoch: int, batch: int = 10, stages: str = "") -> Course:
    """Epochs of whole steps."""
    return build_course(
        length,
        epoch_samples=steps_per_epoch * batch,
        batch=batch,
        image_size=32,
        batch_stages=[stages] if stages else [],
    )


def schedule(
    course: Course,
    *,
    lr: float = 1.0,
    weight_decay: float = 0.0,
    drop_path: float | None = None,
    **keys: Any,
) -> Schedule:
    config = check({"schedule": keys}).schedule
    return build_schedule(config, course, lr=lr, weight_decay=weight_decay, drop_path=drop_path)


def lrs(course: Course, *, lr: float = 1.0, **keys: Any) -> Rows:
    rates = schedule(course, lr=lr, **keys)
    return np.array([rates(step).lr for step in range(course.num_steps)])


def assert_close(found: Rows, expected: Rows | list[float]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0)


# --- system A: ConvNeXt, a table of every step ---

A = course("300 epochs", steps_per_epoch=312, batch=4096)
A_KEYS: dict[str, Any] = {"warmup": "20 epochs", "warmup_ends": "both", "min_lr": 1e-6}


def a_table(first: float, last: float, num_steps: int) -> Rows:
    """Its cosine, which does not quite reach the last value."""
    return np.array(
        [
            last + 0.5 * (first - last) * (1 + math.cos(math.pi * i / num_steps))
            for i in range(num_steps)
        ]
    )


@pytest.mark.parametrize(("epochs", "per_epoch", "warmup"), [(300, 312, 20), (90, 2700, 5)])
def test_system_a(epochs: int, per_epoch: int, warmup: int) -> None:
    """On ImageNet-1k and on 21k."""
    whole = course(f"{epochs} epochs", steps_per_epoch=per_epoch, batch=4096)
    found = lrs(whole, lr=4e-3, **(A_KEYS | {"warmup": f"{warmup} epochs"}))
    rise = np.linspace(0, 4e-3, warmup * per_epoch)
    table = a_table(4e-3, 1e-6, (epochs - warmup) * per_epoch)
    assert_close(found, np.concatenate([rise, table]))
    assert found[0] == 0
    assert found[len(rise) - 1] == found[len(rise)] == 4e-3  # both ends are in the warm-up
    if epochs == 300:
        assert f"{found[-1]:.7e}" == "1.0000013e-06"  # as its table says


def test_weight_decay_of_system_a() -> None:
    rates = schedule(A, weight_decay=0.05, weight_decay_end=0.2, **A_KEYS)
    found = np.array([rates(step).weight_decay for step in range(A.num_steps)])
    assert_close(found, a_table(0.05, 0.2, A.num_steps))  # no warm-up


def test_weight_decay_is_constant_unless_an_end_is_given() -> None:
    rates = schedule(A, weight_decay=0.05, **A_KEYS)
    assert {rates(step).weight_decay for step in range(0, A.num_steps, 1000)} == {0.05}


def test_weight_decay_falls_and_keeps_to_epochs() -> None:
    six = course("6 epochs", steps_per_epoch=5)
    rates = schedule(six, weight_decay=0.1, weight_decay_end=0.0, per="epoch")
    found = np.array([rates(step).weight_decay for step in range(30)])
    assert_close(found, np.repeat(a_table(0.1, 0.0, 6), 5))


# --- system B: torchvision's step schedule ---


def of_torch(
    lr: float, num_steps: int, build: Callable[[torch.optim.Optimizer], LRScheduler]
) -> Rows:
    """The learning rates of a scheduler of torch, step by step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr)
    scheduler = build(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


B_KEYS: dict[str, Any] = {
    "name": "step",
    "milestones": [f"{epoch} epochs" for epoch in (30, 60, 90, 120)],
}


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_system_b(per: str) -> None:
    found = lrs(course("150 epochs", steps_per_epoch=7), lr=0.1, per=per, **B_KEYS)
    theirs = of_torch(0.1, 150, lambda sgd: MultiStepLR(sgd, [30, 60, 90, 120], gamma=0.1))
    assert_close(found, np.repeat(theirs, 7))
    assert_close(found[:: 30 * 7], [0.1, 0.01, 0.001, 1e-4, 1e-5])


def test_milestones_between_steps() -> None:
    """Passed at the first step that begins at or after them; a warm-up comes before."""
    twelve = course("12 steps", steps_per_epoch=4)
    found = lrs(
        twelve, name="step", warmup="2 steps", milestones=["41 samples", "2 epochs"], gamma=0.5
    )
    assert_close(found[1:], [0.5, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


# --- system C: LinearLR, then CosineAnnealingLR ---


C_KEYS: dict[str, Any] = {"lr": 1e-3, "warmup_from": 0.01, "min_lr": 1e-5}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
def test_system_c() -> None:
    found = lrs(course("12 epochs", steps_per_epoch=40), warmup="2 epochs", **C_KEYS)

    def build(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rise = LinearLR(optimizer, start_factor=0.01, total_iters=80)
        fall = CosineAnnealingLR(optimizer, T_max=400, eta_min=1e-5)
        return SequentialLR(optimizer, [rise, fall], milestones=[80])

    # Theirs goes from each value to the next, and gathers an error on the way.
    np.testing.assert_allclose(found, of_torch(1e-3, 480, build), rtol=1e-9)


# --- system D: Colossal-AI, by whole epochs ---


@pytest.mark.parametrize("warmup", [50, 150])  # its code, and its published run
def test_system_d(warmup: int) -> None:
    found = lrs(
        course("300 epochs", steps_per_epoch=39, batch=32_768),
        lr=1.8e-2,
        name="linear",
        per="epoch",
        warmup=f"{warmup} epochs",
        warmup_ends="neither",
    )
    rise = [(epoch + 1) / (warmup + 1) * 1.8e-2 for epoch in range(warmup)]
    fall = [(300 - epoch) / (300 - warmup) * 1.8e-2 for epoch in range(warmup, 300)]
    assert_close(found, np.repeat(rise + fall, 39))


def test_an_epoch_of_no_whole_number_of_steps() -> None:
    """ImageNet in batches of 32,768: rates change with the first step of a new epoch."""
    real = build_course("300 epochs", epoch_samples=1_281_167, batch=32_768, image_size=224)
    keys: dict[str, Any] = {"name": "linear", "warmup": "150 epochs", "warmup_ends": "neither"}
    found = lrs(real, per="epoch", **keys)
    assert len(found) == math.ceil(300 * 1_281_167 / 32_768)
    epochs = [step * 32_768 // 1_281_167 for step in range(len(found))]
    rates = [(e + 1) / 151 if e < 150 else (300 - e) / 150 for e in epochs]
    assert_close(found, rates)
    assert len(set(found)) == 300


# --- big_vision and timm ---


def test_big_vision() -> None:
    """min(1, step / warmup) times half a cosine over the rest; ViT-S/16, 90 epochs at 1024."""
    vit = build_course("90 epochs", epoch_samples=1_281_167, batch=1024, image_size=224)
    found = lrs(vit, lr=1e-3, warmup="10000 steps")
    total = 90 * 1_281_167 / 1024  # theirs is cut to a whole number
    expected = []
    for step in range(vit.num_steps):
        progress = min(max((step - 10_000) / (total - 10_000), 0), 1)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        expected.append(1e-3 * min(1, step / 10_000) * cosine)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def of_timm(num: int, *, by_epoch: bool, warmup: int, prefix: bool) -> Iterator[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.5)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=num - warmup if prefix else num,
        lr_min=1e-3,
        warmup_t=warmup,
        warmup_lr_init=0.005,
        warmup_prefix=prefix,
        t_in_epochs=by_epoch,
    )
    for time in range(num):
        (scheduler.step if by_epoch else scheduler.step_update)(time)
        yield optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_timm(per: str, prefix: bool) -> None:
    keys: dict[str, Any] = {"warmup": "5 epochs", "warmup_from": 0.01, "min_lr": 1e-3}
    keys |= {"warmup_prefix": prefix, "per": per}
    found = lrs(course("30 epochs", steps_per_epoch=8), lr=0.5, **keys)
    if per == "step":
        theirs = list(of_timm(240, by_epoch=False, warmup=40, prefix=prefix))
    else:
        theirs = list(np.repeat(list(of_timm(30, by_epoch=True, warmup=5, prefix=prefix)), 8))
    assert_close(found, theirs)


# --- shapes and ends ---


@pytest.mark.parametrize(
    ("ends", "rise"),
    [
        ("first", [0, 0.25, 0.5, 0.75]),
        ("both", [0, 1 / 3, 2 / 3, 1]),
        ("neither", [0.2, 0.4, 0.6, 0.8]),
    ],
)
@pytest.mark.parametrize("first", [0.0, 0.4])
def test_the_ends_of_the_warm_up(ends: str, rise: list[float], first: float) -> None:
    found = lrs(
        course("10 steps", steps_per_epoch=10),
        name="constant",
        warmup="4 steps",
        warmup_from=first,
        warmup_ends=ends,
    )
    np.testing.assert_allclose(found, [first + (1 - first) * x for x in rise] + [1] * 6)


@pytest.mark.parametrize("ends", ["first", "both", "neither"])
@pytest.mark.parametrize("samples", [1, 5, 10, 11, 15, 19, 20, 25, 31])
def test_no_warm_up_overshoots(ends: str, samples: int) -> None:
    """Whatever part of a step of 10 samples it ends in."""
    ten = course("10 steps", steps_per_epoch=10)
    found = lrs(ten, name="constant", warmup=f"{samples} samples", warmup_ends=ends)
    assert np.all(np.diff(found) >= 0)
    num_steps = math.ceil(samples / 10)
    assert np.all(found[num_steps:] == 1)
    assert found[:num_steps].max() <= 1
    assert ends != "first" or np.all(found[:num_steps] < 1)


def test_warm_up_of_no_whole_number_of_steps() -> None:
    found = lrs(course("4 epochs", steps_per_epoch=10), warmup="25 samples")  # two and a half
    assert_close(found[1:3], [1 / 2.5, 2 / 2.5])
    assert_close(
        found[3:], [0.5 * (1 + math.cos(math.pi * (t - 2.5) / 37.5)) for t in range(3, 40)]
    )


def test_linear_ends_at_min_lr() -> None:
    found = lrs(course("8 steps", steps_per_epoch=8), name="linear", min_lr=0.2)
    assert_close(found, [0.2 + 0.8 * (8 - step) / 8 for step in range(8)])


@pytest.mark.parametrize("name", ["cosine", "linear", "sqrt"])
@pytest.mark.parametrize("decay", ["4 steps", "50%", "0.5 epochs", "40 samples"])
def test_a_constant_rate_before_the_decay(name: str, decay: str) -> None:
    """Warm-up, stable, decay: the decay is that of a run of four steps without a warm-up."""
    eight = course("8 steps", steps_per_epoch=8)
    found = lrs(eight, name=name, warmup="2 steps", decay=decay, min_lr=0.2)
    alone = lrs(course("4 steps", steps_per_epoch=8), name=name, min_lr=0.2)
    assert_close(found[1:], [0.5, 1, 1, *alone])
    assert found[0] == 0


def test_a_cooldown_by_the_square_root() -> None:
    found = lrs(course("100 steps", steps_per_epoch=100), name="sqrt", decay="20%", min_lr=0.1)
    assert np.all(found[:80] == 1)
    assert_close(found[80:], [1 - 0.9 * math.sqrt(step / 20) for step in range(20)])


def test_a_longer_run_has_the_same_rates_up_to_its_decay() -> None:
    keys: dict[str, Any] = {"name": "sqrt", "warmup": "3 steps", "decay": "1 epoch"}
    short = lrs(course("2 epochs", steps_per_epoch=10), **keys)
    long = lrs(course("5 epochs", steps_per_epoch=10), **keys)
    assert_close(short[1:10], long[1:10])
    assert np.all(long[10:40] == 1)
    assert_close(short[10:], long[40:])


def test_a_decay_by_epochs() -> None:
    six = course("6 epochs", steps_per_epoch=5)
    found = lrs(six, name="linear", per="epoch", decay="2 epochs")
    assert_close(found, np.repeat([1, 1, 1, 1, 1, 0.5], 5))


def test_a_decay_counts_from_the_end_where_the_batch_changes() -> None:
    """40 samples are two steps of 20; the steps before were of 10."""
    growing = course("12 steps", steps_per_epoch=10, stages="80 samples: 20")
    assert_close(lrs(growing, name="linear", decay="40 samples"), [1] * 11 + [0.5])
    assert_close(lrs(growing, name="linear", decay="80 samples")[8:], [1, 0.75, 0.5, 0.25])


def test_a_decay_longer_than_the_rest_starts_after_the_warm_up() -> None:
    ten = course("10 steps", steps_per_epoch=10)
    found = lrs(ten, name="linear", warmup="2 steps", decay="2 epochs")
    assert_close(found[1:], lrs(ten, name="linear", warmup="2 steps")[1:])


def milestones(name: str, first: str) -> dict[str, Any]:
    return {"milestones": [first]} if name == "step" else {}


@pytest.mark.parametrize("name", ["step", "constant"])
def test_shapes_without_an_end_have_no_decay(name: str) -> None:
    for key, value in (("decay", "5 steps"), ("warmup_prefix", False)):
        keys = {"name": name, **milestones(name, "2 steps"), key: value}
        with raises("recipe.invalid-value", key=f"schedule.{key}"):
            check({"schedule": keys})


def test_a_decay_of_its_own_begins_there_without_a_prefix_too() -> None:
    keys: dict[str, Any] = {"warmup": "2 steps", "decay": "4 steps", "name": "linear"}
    ten = course("10 steps", steps_per_epoch=10)
    assert_close(lrs(ten, **keys)[2:], lrs(ten, **keys, warmup_prefix=False)[2:])


def test_no_warm_up_begins_with_the_peak() -> None:
    for name in ("cosine", "linear", "sqrt", "constant"):
        assert lrs(course("8 steps", steps_per_epoch=8), name=name)[0] == 1


@pytest.mark.parametrize("name", ["cosine", "linear", "sqrt", "step", "constant"])
@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("length", ["4 steps", "1 step", "3 epochs", "10 samples"])
def test_a_run_shorter_than_its_warm_up_is_cut_off_on_the_way(
    name: str, per: str, length: str
) -> None:
    """What a trial of a long recipe does: it trains as the long run begins."""
    keys: dict[str, Any] = {
        "name": name,
        "per": per,
        "warmup": "5 epochs",
        **milestones(name, "30 epochs"),
    }
    trial = lrs(course(length, steps_per_epoch=10), **keys)
    long = lrs(course("90 epochs", steps_per_epoch=10), **keys)
    assert_close(trial, long[: len(trial)])


def test_all_warm_up() -> None:
    found = lrs(course("4 steps", steps_per_epoch=10), warmup="100%")
    assert_close(found[1:], [0.25, 0.5, 0.75])


def test_steps_count_and_not_samples_where_the_batch_changes() -> None:
    """Progress is in steps, but a duration in epochs ends where its samples do."""
    growing = course("40 steps", steps_per_epoch=10, stages="1 epoch: 20")
    found = lrs(growing, name="linear", warmup="2 epochs")  # ten steps of 10, five of 20
    assert_close(found[1:15], [step / 15 for step in range(1, 15)])
    assert_close(found[15:], [(40 - step) / 25 for step in range(15, 40)])


def test_epochs_pass_faster_with_larger_batches() -> None:
    growing = course("4 epochs", steps_per_epoch=4, stages="2 epochs: 20")
    found = lrs(growing, name="linear", per="epoch")
    assert_close(found, [1] * 4 + [0.75] * 4 + [0.5] * 2 + [0.25] * 2)


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_drop_path_goes_in_a_line_from_the_first_epoch_to_the_last(per: str) -> None:
    rates = schedule(
        course("5 epochs", steps_per_epoch=3), drop_path=0.4, drop_path_start=0.1, per=per
    )
    found = np.array([rates(step).drop_path for step in range(15)])
    assert_close(found, np.repeat([0.1, 0.175, 0.25, 0.325, 0.4], 3))


def test_drop_path_of_a_short_run_and_without_a_start() -> None:
    short = course("2 steps", steps_per_epoch=3)
    rates = schedule(short, drop_path=0.4, drop_path_start=0.0)
    assert [rates(step).drop_path for step in range(2)] == [0, 0]
    rates = schedule(short, drop_path=0.4, weight_decay=0.1)
    assert rates(0) == Rates(lr=1.0, weight_decay=0.1, drop_path=None)


# --- what is refused ---


def test_a_minimum_above_the_peak() -> None:
    two = course("2 steps", steps_per_epoch=2)
    for name in ("cosine", "linear"):
        with raises("recipe.min-lr-above-lr", min_lr=0.2, lr=0.1):
            schedule(two, name=name, lr=0.1, min_lr=0.2)
    with raises("recipe.invalid-value", key="schedule.min_lr"):  # of a schedule without an end
        schedule(two, name="constant", lr=0.1, min_lr=0.2)
    assert lrs(two, lr=0.1, min_lr=0.1).tolist() == [0.1, 0.1]


@pytest.mark.parametrize(("key", "value"), [("milestones", ["2 steps"]), ("gamma", 0.5)])
def test_only_steps_have_milestones(key: str, value: Any) -> None:
    with raises("recipe.invalid-value", key=f"schedule.{key}"):
        check({"schedule": {key: value}})


def test_another_schedule_drops_the_milestones_of_a_recipe() -> None:
    assert load_recipe("resnet50-step").schedule.milestones
    assert not load_recipe("resnet50-step", {"schedule.name": "cosine"}).schedule.milestones


def test_no_milestones() -> None:
    with raises("recipe.invalid-value", key="schedule.milestones", value="[]"):
        check({"schedule": {"name": "step"}})


@pytest.mark.parametrize("second", ["30 epochs", "20 epochs", "300 steps", "10%"])
def test_milestones_that_are_not_in_order(second: str) -> None:
    with raises("recipe.not-in-order", key="schedule.milestones", value=second):
        schedule(
            course("90 epochs", steps_per_epoch=10), name="step", milestones=["30 epochs", second]
        )


@pytest.mark.parametrize("drop_path", [None, 0.0])
def test_no_rate_for_drop_path_to_lead_to(drop_path: float | None) -> None:
    with raises("recipe.drop-path-unset"):
        schedule(course("2 steps", steps_per_epoch=2), drop_path=drop_path, drop_path_start=0.0)
