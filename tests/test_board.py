"""The board of results: its table, its test of significance, and records from runs."""

import json
import math
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from results.board import (
    BOARD,
    BoardError,
    Record,
    Seed,
    add_record,
    as_markdown,
    p_value,
    records_of,
    standings,
)
from trainyard.config import load_recipe, to_toml

TASK = 'title = "Some task"\ntarget = 0.9\nminutes = 1\nrules = "None."\n'


def test_the_table_is_that_of_the_records() -> None:
    command = [sys.executable, str(BOARD / "board.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (BOARD / "README.md").read_text() == done.stdout


def test_p_is_the_share_of_all_ways_to_deal_the_values() -> None:
    rng = random.Random(0)
    for new_count, old_count in ((1, 3), (3, 3), (4, 2), (5, 4)):
        values = [rng.choice([1.0, 2.0, 2.5, 4.0, math.inf]) for _ in range(new_count + old_count)]

        def rank_sum(chosen: tuple[int, ...], values: list[float] = values) -> float:
            return sum(
                sum(other < values[i] for other in values) + (values.count(values[i]) + 1) / 2
                for i in chosen
            )

        ways = list(combinations(range(len(values)), new_count))
        seen = rank_sum(tuple(range(new_count)))
        wanted = sum(rank_sum(way) <= seen for way in ways) / len(ways)
        assert p_value(values[:new_count], values[new_count:]) == pytest.approx(wanted)
    assert p_value([1, 2, 3, 4, 5], [6, 7, 8, 9, math.inf]) == pytest.approx(1 / 252)


def record(name: str, hardware: str, *times: float) -> Record:
    seeds = (Seed(number, time, 0.5, 0.5) for number, time in enumerate(times))
    return Record(name, {"hardware": hardware}, tuple(seeds))


def test_a_better_mean_alone_is_no_new_best() -> None:
    records = [
        record("first", "a", 10, 11, 12, 13, 14),
        record("little better", "a", 9, 11, 12, 13, 13.5),
        record("better", "a", 5, 6, 7, 8, 9.5),
        record("elsewhere", "b", 1, 2, 3, 4, 5),
    ]
    found = standings(records, lambda seed: seed.to_target)
    assert [standing.is_best for standing in found] == [False, False, True, True]
    assert found[0].p is found[3].p is None
    assert found[2].p == pytest.approx(1 / 252)  # against the first, not the one before


def a_run(folder: Path, seed: int, *, lr: str = "1e-3", **environment: object) -> Path:
    """A finished run whose evaluations are 40% after 10 s, 95% after 20 s and 93% after 90 s."""
    folder.mkdir()
    keys = {"run.seed": str(seed), "optim.lr": lr, "run.length": "30 steps"}
    (folder / "recipe.toml").write_text(to_toml(load_recipe("digits", keys)))
    facts: dict[str, object] = {"command": ["/x/trainyard", "train"], "cpus": 2, "devices": []}
    (folder / "environment.json").write_text(json.dumps(facts | {"startup_s": 3.5} | environment))
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"kind": "val", "step": step, "time": time, "top1": top1}) + "\n"
            for step, time, top1 in ((10, 10, 0.4), (20, 20, 0.95), (30, 90, 0.93))
        )
    )
    return folder


@pytest.fixture
def board(tmp_path: Path) -> Path:
    folder = tmp_path / "board"
    (folder / "some").mkdir(parents=True)
    (folder / "some" / "task.toml").write_text(TASK)
    return folder


def add(board: Path, *runs: Path, task: str = "some", name: str = "n") -> Path:
    return add_record(board, runs, task=task, name=name, hardware="", note="")


def test_a_record_counts_the_start_and_the_time_limit(board: Path, tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"run-{seed}", seed, startup_s=3.5 + seed) for seed in (0, 2)]
    made = add(board, *runs)
    assert {path.name for path in made.iterdir()} == {
        *("record.json", "recipe.toml", "seed-0.jsonl", "seed-2.jsonl")
    }
    assert "/x/" not in (made / "record.json").read_text()
    assert [path.name for path in (board / "some").iterdir() if path.name[0] == "."] == []
    (record,) = records_of(board / "some")
    assert record.seeds == (Seed(0, 23.5, 0.95, 0.93), Seed(2, 25.5, 0.95, 0.93))
    assert "| 2 CPU cores | 2 | **24 ± 1 s** |" in as_markdown(board)
    with pytest.raises(BoardError, match="exists"):
        add(board, *runs)


def test_runs_that_make_no_record(board: Path, tmp_path: Path) -> None:
    def refusal(*runs: Path, task: str = "some", name: str = "n") -> str:
        with pytest.raises(BoardError) as caught:
            add(board, *runs, task=task, name=name)
        return str(caught.value)

    first = a_run(tmp_path / "first", 0)
    assert "optim.lr: 0.001 -> 0.002" in refusal(first, a_run(tmp_path / "lr", 1, lr="2e-3"))
    assert "seeds [0, 0]" in refusal(first, a_run(tmp_path / "again", 0))
    assert "other cpus than" in refusal(first, a_run(tmp_path / "cpus", 1, cpus=4))
    assert "startup_s" in refusal(a_run(tmp_path / "mac", 0, startup_s=None))
    metrics = a_run(tmp_path / "averages", 0) / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"top1"', '"ema_decay": 0.9, "top1"'))
    assert "a record needs a single model.ema_decay" in refusal(tmp_path / "averages")
    with open(first / "metrics.jsonl", "a") as file:
        file.write('{"kind": "event", "step": 10, "event": "resumed"}\n')
    assert "was resumed" in refusal(first)
    (tmp_path / "cpus" / "metrics.jsonl").write_text('{"kind": "val", "step": 9, "top1": 0}\n')
    assert "is not complete" in refusal(tmp_path / "cpus")
    assert "--task none: " in refusal(first, task="none")
    assert "--name '../n'" in refusal(first, name="../n")
    assert [path.name for path in (board / "some").iterdir()] == ["task.toml"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(TASK + "x = 1", "'x'"), ("target = 0.9", "'title'"), ("=", "task.toml"), (None, "task.toml")],
)
def test_a_task_that_is_wrong(text: str | None, wanted: str, board: Path) -> None:
    path = board / "some" / "task.toml"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(BoardError) as caught:
        records_of(board / "some")
    assert wanted in str(caught.value)
