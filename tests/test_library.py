"""docs/library.md: its programs run as they stand, learn, go on exactly, and share out batches."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainyard
from tests.errors import raises
from tests.spawn import launch
from trainyard.world import World

PAGE = (Path(__file__).parent.parent / "docs" / "library.md").read_text()
BLOCKS = dict(re.findall(r"^<!-- (\w+) -->\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
LOOP = BLOCKS["loop"]
RANKS, STOP = "rank, size = 0, 1\n", "stop = 0, 200\n"
FETCHED = "    for step, batch in enumerate(loader, start=step + 1):\n"

Seen = dict[int, tuple[Any, Any, Any]]


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def here(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the digits where the page has them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(program: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    return program


def looped(note: Callable[[int, Any], None], changes: dict[str, str]) -> Any:
    """The names that the loop leaves; `note` is told each step and its batch."""
    names: dict[str, Any] = {"note": note}
    exec(changed(LOOP, changes | {FETCHED: f"{FETCHED}        note(step, batch)\n"}), names)
    return names


def noting(seen: Seen, *, kill_at: int = 0) -> Callable[[int, Any], None]:
    def note(step: int, batch: Any) -> None:
        if step == kill_at:
            raise Killed
        seen[step] = (batch.ids.copy(), batch.labels.copy(), batch.images_BHWC.copy())

    return note


def assert_same(some: Seen, others: Seen) -> None:
    assert some.keys() == others.keys()
    for step in some:
        for left, right in zip(some[step], others[step], strict=True):
            np.testing.assert_array_equal(left, right)


def test_the_loop_is_short_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(LOOP.splitlines()) <= 34
    exec(LOOP + BLOCKS["evaluation"], {})
    (top1,) = re.findall(r"^top-1 (\S+)%$", capsys.readouterr().out)
    assert float(top1) > 90


@pytest.mark.slow
def test_a_killed_loop_goes_on_with_the_same_batches_to_the_same_weights(here: Path) -> None:
    short = {STOP: "stop = 0, 100\n"}
    whole: Seen = {}
    ended = looped(noting(whole), short)
    (here / "loop.pt").unlink()
    before: Seen = {}
    with pytest.raises(Killed):
        looped(noting(before, kill_at=71), short)
    after: Seen = {}
    again = looped(noting(after), short)
    assert list(before) == list(range(1, 71)) and list(after) == list(range(51, 101))
    assert_same(before | after, whole)
    for name, weights in ended["model"].state_dict().items():
        assert torch.equal(weights, again["model"].state_dict()[name])


@pytest.mark.slow
def test_the_ranks_share_out_the_batches_of_one() -> None:
    shares: list[Seen] = [{}, {}]
    whole: Seen = {}
    short = {STOP: "stop = 0, 25\n"}  # into the second epoch
    looped(noting(whole), short)
    for rank, seen in enumerate(shares):
        looped(noting(seen), short | {RANKS: f"rank, size = {rank}, 2\n"})
    assert_same({step: tuple(c[0::2] for c in seen) for step, seen in whole.items()}, shares[0])
    assert_same({step: tuple(c[1::2] for c in seen) for step, seen in whole.items()}, shares[1])


def run_program(world: World, folder: Path, program: str) -> None:
    """As one of the ranks that torchrun starts, by the variables that it sets."""
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    exec(program, {})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_as_one(here: Path) -> None:
    short = {STOP: "stop = 0, 10\n", "step % 50": "step % 10"}
    several = {
        RANKS: BLOCKS["ranks"],
        "optimizer = torch": f"{BLOCKS['replicas']}optimizer = torch",
    }
    weights = []
    for size, changes in ((1, short), (2, short | several)):
        assert launch(run_program, size, here, changed(LOOP, changes)) == [0] * size
        weights.append(torch.load("loop.pt")[1])
        (here / "loop.pt").unlink()
    one, two = weights
    for name, weight in one.items():
        torch.testing.assert_close(two[f"module.{name}"], weight, rtol=1e-9, atol=1e-11)


# --- the calls ---


@pytest.mark.slow
def test_the_calls_of_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(changed(BLOCKS["api"], {'"8 epochs"': '"20 steps"'}), names)
    outcome, scores = names["outcome"], names["found"].scores
    assert (outcome.step, outcome.stopped) == (20, None)
    found = trainyard.evaluate("runs/api")
    assert found["top1"] == outcome.best["top1"] == (scores.rank_of_truth == 1).mean()
    assert found["samples"] == len(trainyard.open_index("data/digits/val"))
    assert found["data"] == "data/digits/val"
    history = trainyard.history("runs/api")
    assert history.val[-1]["top1"] == outcome.last["top1"]
    assert history.train[-1]["step"] == 20
    assert "step 20/20" in capsys.readouterr().out  # lines, as nobody looks at a terminal
    length = {"run.length": "20 steps"}
    again = trainyard.train("digits", Path("runs/api"), data="data/digits", overrides=length)
    assert (again.step, again.best) == (20, outcome.best)  # there was nothing left to do


def test_a_recipe_may_be_at_hand_and_data_a_path(here: Path) -> None:
    recipe = trainyard.load_recipe("debug", {"run.length": "2 steps", "data.threads": 1})
    assert recipe.data.threads == 1
    overrides = {"run.log_every": "1 steps", "optim.betas": (0.9, 0.98)}
    outcome = trainyard.train(recipe, "run", data=Path("data/digits"), overrides=overrides)
    assert outcome.step == 2
    recorded = trainyard.load_recipe("run/recipe.toml")
    assert recorded.optim.betas == (0.9, 0.98)
    assert recorded.data.train == "data/digits/train"
    assert recorded.model == recipe.model


def test_mistakes_are_errors_of_ours(here: Path) -> None:
    with raises("recipe.unknown-key", key="optim.lrr"):
        trainyard.train("debug", "run", overrides={"optim.lrr": 0.1})
    with raises("recipe.invalid-value", key="optim.lr"):
        trainyard.train("debug", "run", overrides={"optim.lr": "fast"})
    with raises("data.not-found", path="nowhere"):
        trainyard.train("debug", "run", data="nowhere")
    with raises("checkpoint.wrong-path", path="run"):
        trainyard.evaluate("run")
    with raises("file.unreadable", path="run/metrics.jsonl"):
        trainyard.history("run")
    with raises("run.no-predictions"):
        trainyard.predictions("run")
    assert not (here / "run").exists()


def test_predictions_have_names_and_whole_numbers(finished: Path) -> None:
    """A matrix of labels and guesses needed casts, and the names came from elsewhere."""
    found = trainyard.predictions(finished)
    matrix = np.zeros((10, 10), int)
    np.add.at(matrix, (found.labels, found.scores.guess), 1)
    assert matrix.sum() == 364
    assert found.classes == tuple("0123456789")
    assert [Path(file).parent.name for file in found.files] == [*map(str, found.labels)]


def test_predictions_of_data_that_is_gone_have_no_files(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, symlinks=True)
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace("/val", "/gone"))
    assert trainyard.predictions(folder).files == ()


def test_keys_that_change_no_evaluation_are_refused(finished: Path) -> None:
    with raises("recipe.key-without-effect", key="optim.lr"):
        trainyard.evaluate(finished, overrides={"optim.lr": 0.1})
    usual = trainyard.evaluate(
        finished, data=trainyard.load_recipe(f"{finished}/recipe.toml").data.val
    )
    assert trainyard.evaluate(finished, flip=True)["loss"] != usual["loss"]


# --- the names ---


@pytest.mark.parametrize("name", trainyard.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(trainyard, name).__doc__
    assert name in dir(trainyard)


def test_importing_is_light() -> None:
    program = """
import sys
import trainyard
heavy = {"torch", "timm", "numpy", "rich", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
