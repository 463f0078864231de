"""The order that a recipe asks for, from its keys and an index."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.data.tars import counted_shards, write_files
from tests.errors import raises
from trainyard.config import load_recipe
from trainyard.data.config import DataConfig
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.order import training_plan
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import (
    BalancedPlan,
    EndlessPlan,
    Ids,
    RepeatedPlan,
    ResampledPlan,
    ShuffledPlan,
    WeightedPlan,
)
from trainyard.errors import RecipeError


def write_folder(folder: Path, size: int) -> str:
    return write_files(folder, [f"one/{number:05d}.jpg" for number in range(size)])


@pytest.fixture
def merged(tmp_path: Path) -> Index:
    """A merged index of 11 and 40 images."""
    return open_merged([write_folder(tmp_path / f"of {n}", n) for n in (11, 40)], None)


def plan_of(index: Index, **keys: object) -> EndlessPlan:
    config = DataConfig.model_validate(keys)
    return training_plan(config, index, global_batch=8, seed=3)


def drawn(plan: EndlessPlan, count: int) -> Ids:
    assert isinstance(plan, ResampledPlan)
    return dataclasses.replace(plan, global_batch=count).batch(0)


def test_the_plain_order_is_the_default(tmp_path: Path) -> None:
    index = open_index(write_folder(tmp_path / "a", 50))
    assert plan_of(index) == ShuffledPlan(50, 8, 3)
    assert plan_of(index, locality=16) == ShuffledPlan(50, 8, 3, locality=16)


def test_shards_and_runs(tmp_path: Path) -> None:
    index = open_index(counted_shards(tmp_path / "shards", [30, 30, 2, 30, 40, 1]))
    plan = plan_of(index, order="resample")
    assert isinstance(plan, ResampledPlan)
    assert plan.run == 133 // 6
    # The shards of 2 and of 1, too short for a run, are one with a neighbour.
    assert plan.shards.tolist() == [0, 30, 60, 92, 133]
    assert plan.epoch_samples == 133
    plan = plan_of(open_index(counted_shards(tmp_path / "large", [200, 130])), order="resample")
    assert isinstance(plan, ResampledPlan)
    assert (plan.run, plan.shards.tolist()) == (64, [0, 200, 330])  # no longer than need be


def test_more_shards_than_samples(tmp_path: Path) -> None:
    index = open_index(counted_shards(tmp_path / "shards", [0, 1, 0, 0, 2, 0]))
    plan = plan_of(index, order="resample")
    assert isinstance(plan, ResampledPlan)
    assert (plan.run, plan.shards.tolist()) == (1, [0, 3])
    assert set(drawn(plan, 1000).tolist()) == {0, 1, 2}
    for keys in ({"locality": 1}, {"locality": 100}, {"weights": (2.0,), "locality": 100}):
        plan = plan_of(index, **keys)
        steps = 3 if "weights" not in keys else 6
        seen = np.concatenate([plan.batch(step) for step in range(steps)])
        assert set(np.bincount(seen).tolist()) == {8 * steps // 3}
    reader = Reader(index)
    assert [reader.read(sample) for sample in range(3)] == [b"image 0", b"image 1", b"image 2"]


def test_a_folder_is_drawn_image_by_image(tmp_path: Path) -> None:
    index = open_index(write_folder(tmp_path / "a", 500))
    plan = plan_of(index, order="resample")
    assert isinstance(plan, ResampledPlan)
    assert plan.run == 1
    ids = drawn(plan, 10_000)
    together = np.abs(np.diff(ids)) == 1
    assert np.mean(together) == pytest.approx(2 / 500, abs=0.003)  # as often as any two


def test_shards_of_different_parts_are_different(tmp_path: Path) -> None:
    places = [counted_shards(tmp_path / name, [25, 35]) for name in ("a", "b")]
    plan = plan_of(open_merged(places, None), order="resample", weights=(1.0, 3.0))
    assert isinstance(plan, ResampledPlan)
    assert plan.shards.tolist() == [0, 60, 120]  # each part's shard of 25 is shorter than a run
    assert (plan.run, plan.draws, plan.epoch_samples) == (30, (60, 180), 240)
    ids = drawn(plan, 10**6)
    assert np.mean(ids >= 60) == pytest.approx(0.75, abs=0.01)
    assert np.ptp(np.bincount(ids)[60:]) < 0.1 * np.mean(np.bincount(ids)[60:])


def test_fewer_draws_than_samples_leave_none_out(tmp_path: Path) -> None:
    places = [write_folder(tmp_path / name, 100) for name in ("a", "b")]
    plan = plan_of(open_merged(places, None), order="resample", weights=(1.0, 0.5))
    counts = np.bincount(drawn(plan, 80_000))
    assert len(counts) == 200
    assert counts[:100].mean() == pytest.approx(2 * counts[100:].mean(), rel=0.02)
    assert counts[100:].min() > 150


def test_weights(merged: Index) -> None:
    assert plan_of(merged) == ShuffledPlan(51, 8, 3)
    assert plan_of(merged, weights=(2.0, 0.3)) == WeightedPlan((11, 40), (22, 12), 8, 3)
    assert plan_of(merged, weights=(0.5, 1.0), locality=8) == (
        WeightedPlan((11, 40), (6, 40), 8, 3, locality=8)
    )


@pytest.mark.parametrize(
    "keys", [{}, {"locality": 8}, {"weights": (2.0, 0.3)}, {"order": "resample"}], ids=str
)
def test_repeats(merged: Index, keys: dict[str, object]) -> None:
    plain, repeated = plan_of(merged, **keys), plan_of(merged, **keys, repeats=3)
    assert isinstance(repeated, RepeatedPlan)
    assert (repeated.repeats, repeated.global_batch) == (3, 8)
    assert repeated.epoch_samples == plain.epoch_samples
    once = dataclasses.replace(plain, global_batch=50).batch(0)  # type: ignore[type-var]
    thrice = dataclasses.replace(repeated, global_batch=150).batch(0)
    assert thrice.tolist() == np.repeat(once, 3).tolist()
    assert type(plan_of(merged, **keys, repeats=1)) is type(plain)


@pytest.mark.parametrize(
    ("keys", "code", "fields"),
    [
        ({"weights": (1.0, 2.0, 3.0)}, "recipe.wrong-weight-count", {"num_weights": 3}),
        ({"weights": (0.01, 1.0)}, "recipe.weight-too-small", {"value": 0.01}),
        ({"order": "resample", "locality": 5}, "recipe.locality-with-resample", {"value": 5}),
    ],
)
def test_keys_that_do_not_fit(
    merged: Index, keys: dict[str, object], code: str, fields: dict[str, object]
) -> None:
    with raises(code, **fields):
        plan_of(merged, **keys)


def test_balance(merged: Index) -> None:
    plan = plan_of(merged, balance=1.0)
    assert isinstance(plan, BalancedPlan)
    assert plan_of(merged, balance=0.0) == plan_of(merged)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.order", "resample"),
        ("data.locality", "9"),
        ("data.weights", "[1]"),
        ("loss.class_weights", "balanced"),
    ],
)
def test_what_balance_cannot_go_with(key: str, value: str) -> None:
    with raises("recipe.keys-conflict", other="data.balance = 0.5") as caught:
        load_recipe("debug", {key: value, "data.balance": "0.5"})
    assert str(caught.value.fields["setting"]).startswith(key)


def test_weights_of_a_single_location(tmp_path: Path) -> None:
    index = open_index(write_folder(tmp_path, 11))
    with raises("recipe.wrong-weight-count", num_weights=2, num_locations=1):
        plan_of(index, weights=(1.0, 2.0), order="resample")


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("order", "any", "data.order = \"any\": expected 'exact', 'resample' or 'join'"),
        ("locality", "-1", "data.locality = -1: input should be greater than or equal to 0"),
        ("weights", "2,0", "data.weights = 0: input should be greater than 0"),
        ("balance", "1.5", "data.balance = 1.5: input should be less than or equal to 1"),
        ("weights", "[]", "data.weights = []: tuple should have at least 1 item"),
        ("train", "[]", "data.train = []: "),
        ("train", "['a', 1]", 'data.train = ["a", 1]: input should be a valid string'),
    ],
)
def test_wrong_values(key: str, text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("debug", {f"data.{key}": text})
    assert words in str(caught.value)
