"""The order that a recipe asks for, from its keys and an index."""

import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from trainyard.config import load_recipe
from trainyard.data.config import DataConfig
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.order import training_plan
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import (
    EndlessPlan,
    Ids,
    RepeatedPlan,
    ResampledPlan,
    ShuffledPlan,
    WeightedPlan,
)
from trainyard.errors import RecipeError


def write_shards(folder: Path, counts: list[int]) -> str:
    """WebDataset shards with so many samples each."""
    folder.mkdir()
    number = 0
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for _ in range(count):
                for suffix, content in ((".jpg", b"image %d" % number), (".cls", b"0")):
                    member = tarfile.TarInfo(f"{number:08d}{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                number += 1
    return str(folder)


def write_folder(folder: Path, count: int) -> str:
    (folder / "one").mkdir(parents=True)
    for number in range(count):
        (folder / "one" / f"{number:05d}.jpg").write_bytes(b"image")
    return str(folder)


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
    index = open_index(write_shards(tmp_path / "shards", [30, 30, 2, 30, 40, 1]))
    plan = plan_of(index, order="resample")
    assert isinstance(plan, ResampledPlan)
    assert plan.run == 133 // 6
    # The shards of 2 and of 1, too short for a run, are one with a neighbour.
    assert plan.shards.tolist() == [0, 30, 60, 92, 133]
    assert plan.epoch_samples == 133


def test_more_shards_than_samples(tmp_path: Path) -> None:
    index = open_index(write_shards(tmp_path / "shards", [0, 1, 0, 0, 2, 0]))
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


def test_runs_are_not_longer_than_need_be(tmp_path: Path) -> None:
    index = open_index(write_shards(tmp_path / "shards", [200, 130]))
    plan = plan_of(index, order="resample")
    assert isinstance(plan, ResampledPlan)
    assert plan.run == 64
    assert plan.shards.tolist() == [0, 200, 330]


def test_a_folder_is_drawn_image_by_image(tmp_path: Path) -> None:
    index = open_index(write_folder(tmp_path / "a", 500))
    plan = plan_of(index, order="resample")
    assert isinstance(plan, ResampledPlan)
    assert plan.run == 1
    ids = drawn(plan, 10_000)
    together = np.abs(np.diff(ids)) == 1
    assert np.mean(together) == pytest.approx(2 / 500, abs=0.003)  # as often as any two


def test_shards_of_different_parts_are_different(tmp_path: Path) -> None:
    places = [write_shards(tmp_path / name, [25, 35]) for name in ("a", "b")]
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


def test_weights(tmp_path: Path) -> None:
    places = [write_folder(tmp_path / name, count) for name, count in (("a", 11), ("b", 40))]
    index = open_merged(places, None)
    assert plan_of(index) == ShuffledPlan(51, 8, 3)
    assert plan_of(index, weights=(2.0, 0.3)) == WeightedPlan((11, 40), (22, 12), 8, 3)
    assert plan_of(index, weights=(0.5, 1.0), locality=8) == (
        WeightedPlan((11, 40), (6, 40), 8, 3, locality=8)
    )


def test_repeats(tmp_path: Path) -> None:
    places = [write_folder(tmp_path / name, count) for name, count in (("a", 11), ("b", 40))]
    index = open_merged(places, None)
    kinds: list[dict[str, object]] = [
        {},
        {"locality": 8},
        {"weights": (2.0, 0.3)},
        {"order": "resample"},
    ]
    for keys in kinds:
        plain, repeated = plan_of(index, **keys), plan_of(index, **keys, repeats=3)
        assert isinstance(repeated, RepeatedPlan)
        assert (repeated.repeats, repeated.global_batch) == (3, 8)
        assert repeated.epoch_samples == plain.epoch_samples
        once = dataclasses.replace(plain, global_batch=50).batch(0)  # type: ignore[type-var]
        thrice = dataclasses.replace(repeated, global_batch=150).batch(0)
        assert thrice.tolist() == np.repeat(once, 3).tolist()
    assert plan_of(index, repeats=1) == ShuffledPlan(51, 8, 3)


def test_keys_that_do_not_fit(tmp_path: Path) -> None:
    places = [write_folder(tmp_path / name, count) for name, count in (("a", 11), ("b", 40))]
    merged = open_merged(places, None)
    with pytest.raises(RecipeError, match=r"data\.weights has 3 numbers, but data\.train 2 loc"):
        plan_of(merged, weights=(1.0, 2.0, 3.0))
    with pytest.raises(RecipeError, match=r"data\.weights has 2 numbers, but data\.train 1 loc"):
        plan_of(open_index(places[0]), weights=(1.0, 2.0), order="resample")
    with pytest.raises(RecipeError, match=r"0\.01 times the 11 samples of location 1 is less"):
        plan_of(merged, weights=(0.01, 1.0))
    with pytest.raises(RecipeError, match=r"data\.locality = 5 is for data\.order = 'exact'"):
        plan_of(merged, order="resample", locality=5)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("order", "any", "data.order = \"any\": expected 'exact', 'resample' or 'join'"),
        ("locality", "-1", "data.locality = -1: input should be greater than or equal to 0"),
        ("weights", "2,0", "data.weights = 0: input should be greater than 0"),
        ("weights", "[]", "data.weights = []: tuple should have at least 1 item"),
        ("train", "[]", "data.train = []: "),
        ("train", "['a', 1]", 'data.train = ["a", 1]: input should be a valid string'),
    ],
)
def test_wrong_values(key: str, text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("debug", {f"data.{key}": text})
    assert words in str(caught.value)
