"""Damage to the files of a run: a command then succeeds, or has an error of ours.

One value is another at a time, drawn from those that would surprise who reads the file.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import Capture, newest, run
from tests.report.histories import record_some, train_report, write_run
from tests.tiers import tiered

NUMBERS = ["NaN", "-Infinity", "1e999", "9" * 400, "9" * 5000, "1e308", "-1", "2.5", str(2**62)]
VALUES = [*NUMBERS, "true", "null", '"text"', '"\\ud800"', "[]", "[[1]]", '{"a": 1}', "[" * 9999]
TOML = [
    "nan",
    "9" * 400,
    "9" * 5000,
    "-1",
    "true",
    '"x"',
    "[1]",
    "07:32:00",
    f'"{"9" * 400} steps"',
]
COLUMNS: list[Callable[[Any], Any]] = [
    lambda column: column[..., :-1],
    lambda column: np.stack([column, column]),
    lambda column: np.full(column.shape, "x"),
    lambda column: np.full(column.shape, 2**62),
    lambda column: np.full(column.shape, -7),
    lambda column: np.full(column.shape, np.nan, np.float32),
    lambda column: np.zeros(column.shape, "M8[s]"),
    lambda _: np.float64(1),
]
SEEDS = tiered(range(40), night=range(1, 40))
OF_RUN = ["metrics.jsonl", "predictions.npz", "recipe.toml", "environment.json", "quarantine.jsonl"]
OF_CHECKPOINT = ["temperature.json", "progress.json", "manifest.json"]


def damage(path: Path, rng: random.Random) -> str:
    """Change one value of a file; what was changed."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            columns = dict(file)
        name, change = rng.choice(sorted(columns)), rng.randrange(len(COLUMNS))
        if columns[name].ndim:
            columns[name] = COLUMNS[change](columns[name])
        np.savez(path, **columns)
        return f"{name}, {change}"
    lines = path.read_text().splitlines() if path.suffix != ".json" else [path.read_text()]
    number = rng.choice([n for n, line in enumerate(lines) if line and line[0] != "["])
    if path.suffix == ".toml":
        key, value = lines[number].partition(" = ")[0], rng.choice(TOML)
        lines[number] = f"{key} = {value}"
    else:
        tree, value = json.loads(lines[number]), rng.choice(VALUES)
        *way, key = rng.choice(list(places(tree)))
        of = tree
        for step in way:
            of = of[step]
        of[key] = "here"
        lines[number] = json.dumps(tree).replace('"here"', value)
    path.write_text("\n".join(lines) + "\n")
    return f"{key} = {value[:20]}"


def places(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to the values inside a JSON value."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in inside:
        yield (key,)
        if isinstance(value, dict | list):
            yield from ((key, *place) for place in places(value))


def tried(folder: Path, names: list[str], seed: int, commands: list[list[object]]) -> None:
    """Run the commands on a run whose files are damaged one at a time."""
    rng = random.Random(seed)
    for name in names:
        path = folder / name
        content = path.read_bytes()
        print(path, damage(path, rng))
        for words in commands:
            assert run(*words) in (0, 1, 2)
        path.write_bytes(content)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run that no model has trained, beside a good one."""
    loss = {"ema_top1": 0.5, "evaluated": 40, "loss": 1.0, "linear_probe": 0.3}
    vals = [{**train_report(step), **loss, "kind": "val"} for step in (5, 10)]
    event = {"kind": "event", "event": "head", "step": 0, "time": 1.0, "rows": {"model": "test"}}
    rows = [event, *(train_report(step, world_size=1) for step in (4, 8)), *vals]
    folder = tmp_path / "runs" / "bad"
    for each in (folder, folder.with_name("good")):
        write_run(each, rows)
        record_some(each, samples=40, classes=4)
        bad = {"split": "val", "id": 1, "file": "a.jpg", "offset": 0, "reason": "truncated"}
        (each / "quarantine.jsonl").write_text(json.dumps(bad) + "\n")
        of: dict[str, Any] = {
            "devices": ["a"],
            "git": {"commit": "a"},
            "command": ["trainyard", "train", "debug"],
        }
        of |= {"versions": {"torch": "2"}, "fingerprints": {"val": "a"}, "cpus": 2}
        (each / "environment.json").write_text(json.dumps(of))
        (each / "checkpoints/best/temperature.json").write_text('{"": 1.5}')
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_reports_of_damaged_runs(written: Path, seed: int, capsys: Capture) -> None:
    out = ("--out", written.parent / "report.html")
    commands: list[list[object]] = [
        ["report", written, *out],
        ["report", written, written.with_name("good"), *out],
        ["runs", written.parent, "--out", written.parent / "runs.csv"],
    ]
    names = [*OF_RUN, *OF_RUN[:2], *(f"checkpoints/best/{name}" for name in OF_CHECKPOINT[:2])]
    tried(written, names, seed, commands)
    assert "good" in capsys.readouterr().out


@pytest.mark.parametrize("seed", SEEDS)
def test_models_of_damaged_runs(finished: Path, digits: Path, tmp_path: Path, seed: int) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    (newest(folder) / "temperature.json").write_text('{"": 1.5}')
    image = next((digits / "val" / "3").iterdir())
    commands: list[list[object]] = [
        ["predict", folder, image],
        ["estimate", "debug", "--measured", folder, "--samples", 99],
    ]
    names = ["recipe.toml", "metrics.jsonl", "environment.json"]
    at = newest(folder).relative_to(folder)
    tried(folder, [*names, *(f"{at}/{name}" for name in OF_CHECKPOINT)], seed, commands)
