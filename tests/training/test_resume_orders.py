"""A run in any order of its data is cut off and goes on as if nothing had happened."""

import shutil
import signal
import tarfile
from pathlib import Path

import pytest

from tests.spawn import spawn
from tests.training.test_resume import (
    NUM_STEPS,
    OPTIONS,
    assert_same_end,
    exit_code,
    interleaved,
    noted,
    train_on,
)
from trainyard.config import RunConfig, load_recipe
from trainyard.data.index.merge import open_merged
from trainyard.data.order import training_plan
from trainyard.data.sampler.plan import EndlessPlan

ORDERS = {
    "locality": {"data.locality": "300"},
    "resample": {"data.train": "shards/digits-*.tar", "data.order": "resample"},
    "weights": {"data.train": "['low','high']", "data.weights": "1.5,0.5"},
}


@pytest.fixture(scope="module")
def data(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits, in two halves as well, and as shards of 150."""
    folder = tmp_path_factory.mktemp("orders")
    for split in ("train", "val"):
        (folder / split).symlink_to(digits / split)
    for half, numbers in (("low", "0123456"), ("high", "56789")):
        (folder / half).mkdir()
        for number in numbers:
            (folder / half / number).symlink_to(digits / "train" / number)
    (folder / "shards").mkdir()
    images = sorted((digits / "train").glob("*/*.png"), key=lambda path: path.name)
    for start in range(0, len(images), 150):
        with tarfile.open(folder / "shards" / f"digits-{start:04d}.tar", "w") as shard:
            for image in images[start : start + 150]:
                shard.add(image, f"{image.stem}.png")
                label = folder / "label"
                label.write_text(image.parent.name)
                shard.add(label, f"{image.stem}.cls")
    return folder


def options(order: str) -> dict[str, str]:
    return OPTIONS | {"data.train": "train", "data.val": "val"} | ORDERS[order]


def command(order: str, folder: Path) -> list[str]:
    words = [word for key, value in options(order).items() for word in (f"--{key}", value)]
    return ["train", "debug", "--run", str(folder), "--json", *words]


def plan_of(config: RunConfig) -> EndlessPlan:
    train = config.data.train
    assert train is not None
    index = open_merged([train] if isinstance(train, str) else train, None)
    return training_plan(config.data, index, global_batch=config.batch.size, seed=config.run.seed)


@pytest.mark.parametrize("order", ORDERS)
def test_killed_in_the_midst_of_an_epoch(
    order: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank: weights, optimizer and evaluations are the same, bit for bit."""
    monkeypatch.chdir(data)
    assert exit_code(command(order, tmp_path / "whole")) == 0
    arguments = command(order, tmp_path / "run")
    assert exit_code(arguments, stop_at=13, number=signal.SIGKILL) == -signal.SIGKILL
    assert exit_code(arguments) == 0
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("order", ORDERS)
def test_two_ranks_go_on_as_three(
    order: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The global batches are those of the plan, whoever takes which share of them."""
    monkeypatch.chdir(data)
    config = load_recipe("debug", options(order))
    plan = plan_of(config)
    expected = {step: plan.batch(step).tolist() for step in range(NUM_STEPS)}
    (tmp_path / "two").mkdir()
    with pytest.raises(AssertionError):
        spawn(train_on, 2, config, tmp_path / "two" / "run", 13)
    before = noted(tmp_path / "two")
    assert before == {step: expected[step] for step in range(13)}
    shutil.copytree(tmp_path / "two" / "run", tmp_path / "run", symlinks=True)
    resumed = interleaved(spawn(train_on, 3, config, tmp_path / "run", None))
    assert resumed == {step: expected[step] for step in range(10, NUM_STEPS)}
