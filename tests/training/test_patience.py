"""A run that ends early, by run.patience. Cut off and resumed: test_resume_contract.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.command_line import newest
from tests.errors import raises
from tests.runs import curve, events, progress, recipe
from tests.spawn import spawn, train_joined
from trainyard.config import load_recipe
from trainyard.monitor.outcome import Outcome
from trainyard.report.page import page
from trainyard.report.runs import read_runs
from trainyard.run.trainer import Trainer
from trainyard.world import World

EVERY = {"run.eval_every": "2 steps", "run.save_every": "100 steps"}
SCORES = (0.2, 0.4, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5)
"""Of the evaluations at steps 2, 4, …: two and three in a row are no better."""


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations have the scores above."""
    evaluation = Trainer._evaluation

    def score(self: Trainer) -> dict[str, Any]:
        return evaluation(self) | {"top1": SCORES[self.state.step // 2 - 1]}

    monkeypatch.setattr(Trainer, "_evaluation", score)


def go(digits: Path, folder: Path, **keys: str) -> Outcome:
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    return train_joined(recipe(digits, EVERY, changes), folder, World())


@pytest.mark.usefixtures("scored")
def test_the_run_ends_after_so_many_evaluations_in_a_row(digits: Path, tmp_path: Path) -> None:
    """An equal value is no better one, but the best; a better one begins the count anew."""
    for patience, last, best_step in ((1, 6, 4), (2, 8, 8), (3, 16, 16)):
        folder = tmp_path / str(patience)
        outcome = go(digits, folder, run__patience=str(patience))
        assert (outcome.step, outcome.best["step"]) == (last, best_step)
        assert (outcome.stopped, outcome.stale) == (None, patience)
        assert list(curve(folder, "train"))[-1] == last
        assert newest(folder).name == f"step-{last:08d}"
        best = (folder / "checkpoints" / "best").resolve(strict=True)  # though no save was due
        assert best.name == f"step-{outcome.best['step']:08d}"
        assert progress(newest(folder))["stale"] == patience
        (event,) = events(folder, "ended early")
        assert event["step"] == last
        assert "run.patience" in outcome.sentence()


@pytest.mark.usefixtures("scored")
def test_such_a_run_is_complete_and_another_may_go_on_from_it(digits: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    go(digits, first, run__patience="1")
    before = (first / "metrics.jsonl").read_bytes()
    again = go(digits, first, run__patience="1")
    assert again.was_complete and (again.step, again.stale) == (6, 1)
    assert (first / "metrics.jsonl").read_bytes() == before
    went_on = go(digits, second, run__resume=str(first), run__length="12 steps")
    assert (went_on.step, went_on.stale) == (12, 0)
    assert list(curve(second, "train")) == [*range(7, 13)]
    (run,) = read_runs([first])
    assert run.ended_early and page([run]).count("ended early") > 1
    (run,) = read_runs([second])
    assert not run.ended_early


@pytest.mark.usefixtures("scored")
def test_patience_that_ends_with_the_run_is_no_early_end(digits: Path, tmp_path: Path) -> None:
    outcome = go(digits, tmp_path, run__patience="1", run__length="6 steps")
    assert (outcome.step, outcome.stale) == (6, 1)
    assert events(tmp_path, "ended early") == []


def _go_on_ranks(world: World, digits: Path, folder: Path) -> list[Any]:
    found = []
    for way in ("allreduce", "gossip"):
        keys = {"run.patience": "2", "optim.lr": "1e-12", "average.name": way}
        outcomes = [
            train_joined(recipe(digits, EVERY, keys), folder / way, world) for _ in range(2)
        ]
        found.append([(each.step, each.stale, each.was_complete) for each in outcomes])
    return found


@pytest.mark.slow
def test_ranks_end_together(digits: Path, tmp_path: Path) -> None:
    """With replicas that differ too; the second time the run is complete."""
    found = spawn(_go_on_ranks, 2, digits, tmp_path)
    assert found == [[[(6, 2, False), (6, 2, True)]] * 2] * 2


def test_no_patience_without_evaluations() -> None:
    with raises("recipe.keys-conflict", other="run.patience = 2"):
        load_recipe("debug", {"run.patience": "2", "run.eval_every": "0 steps"})
