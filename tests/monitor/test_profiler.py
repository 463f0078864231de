"""Steps that torch's profiler records: which, where to, and that they stay the same."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Capture, newest, run
from tests.errors import check, refused
from tests.runs import events
from trainyard.files import sha256
from trainyard.monitor.profiler import profiling

LENGTH = ("--run.length", "4 steps", "--run.log_every", "1 steps", "--data.threads", "1")


def steps_in(folder: Path) -> int:
    """The number of steps in a trace."""
    with gzip.open(folder / "trace.json.gz") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    return sum(name.startswith("ProfilerStep#") for name in names)


# --- a run ---


def test_a_run_is_the_same_with_and_without(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    with_profile, without = tmp_path / "with", tmp_path / "without"
    train = ("train", "debug", "--data", digits, *LENGTH, "--run")
    assert run(*train, with_profile, "--watch.profile", "1:3") == 0
    said = capsys.readouterr().out
    assert run(*train, without) == 0
    for folder in (with_profile, without):
        assert newest(folder).name == "step-00000004"
    weights = "model.safetensors"
    assert sha256(newest(with_profile) / weights) == sha256(newest(without) / weights)
    assert not (without / "profile").exists()

    profile = with_profile / "profile"
    assert sorted(path.name for path in profile.iterdir()) == ["summary.txt", "trace.json.gz"]
    assert steps_in(profile) == 2
    (event,) = events(with_profile, "profile")
    assert event["message"] in said
    summary = (profile / "summary.txt").read_text()
    (row,) = [line.split() for line in summary.splitlines() if " aten::addmm " in line]
    assert int(row[-1]) % 2 == 0  # calls: both steps go through the whole model


@pytest.mark.parametrize("window", ["72:64", "64:64", "64", "a:b", "-1:3", "64:72:80"])
def test_what_is_no_window(window: str) -> None:
    error = refused("train", "debug", f"--watch.profile={window}")
    check(error, "recipe.invalid-value", key="watch.profile")


def test_a_full_disk_ends_no_run(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()  # where a folder is to be
    train = ("train", "debug", "--data", digits, "--run", tmp_path / "run", *LENGTH, "--json")
    assert run(*train, "--watch.profile", "1:2") == 0
    (event,) = events(tmp_path / "run", "profile")
    assert event["level"] == "warning"


def test_a_window_behind_the_end_of_the_run(digits: Path, tmp_path: Path) -> None:
    """It recorded nothing, and nothing was said."""
    train = ("train", "debug", "--data", digits, "--run", tmp_path / "run", *LENGTH)
    error = refused(*train, "--watch.profile", "4:6")
    check(error, "recipe.profile-after-end", value="4:6", num_steps=4)


# --- the window ---


class Stepping:
    """A loop of steps inside a window, and what is said of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "profile"
        self.said: list[dict[str, Any]] = []

    def report(self, event: dict[str, Any]) -> None:
        self.said.append(event)

    def run(self, window: str | None, *steps: int) -> None:
        with profiling(window, steps[0], self.folder, self.report) as recorded:
            step = recorded(lambda batch, number, rates: number)
            assert [step(None, number, None) for number in steps] == list(steps)


@pytest.mark.parametrize(
    ("steps", "first", "count"),
    [
        (range(2, 9), 3, 3),
        (range(4, 9), 4, 2),  # a run that goes on within the window
        (range(5), 3, 2),  # one that ends there
        ([2, 3, 4, 5, 6, 3, 4, 5, 6], 3, 3),  # one that rolls back
    ],
)
def test_what_is_recorded(steps: Any, first: int, count: int, tmp_path: Path) -> None:
    loop = Stepping(tmp_path)
    loop.run("3:6", *steps)
    # Of a run that ends there, also what comes after its last step.
    assert steps_in(loop.folder) in (count, count + 1)
    (event,) = loop.said
    assert f"{count} steps from step {first} " in event["message"]


@pytest.mark.parametrize(("window", "first"), [("3:6", 6), ("3:6", 9), ("30:60", 0), (None, 0)])
def test_a_window_that_is_not_met(window: str | None, first: int, tmp_path: Path) -> None:
    loop = Stepping(tmp_path)
    loop.run(window, *range(first, first + 3))
    assert loop.said == []
    assert not loop.folder.exists()


def test_without_a_window_the_step_is_the_same(tmp_path: Path) -> None:
    def step(batch: Any, number: int, rates: Any) -> int:
        return number

    with profiling(None, 0, tmp_path, lambda event: None) as recorded:
        assert recorded(step) is step


def test_a_run_that_fails_leaves_nothing_half_recorded(tmp_path: Path) -> None:
    loop = Stepping(tmp_path)

    def failing(batch: Any, number: int, rates: Any) -> int:
        raise RuntimeError("a step")

    with (
        pytest.raises(RuntimeError, match="a step"),
        profiling("0:2", 0, loop.folder, loop.report) as recorded,
    ):
        recorded(failing)(None, 0, None)
    assert not loop.folder.exists()
    loop.run("0:2", 0, 1)  # torch lets only one recording be at a time: the other has ended
    assert steps_in(loop.folder) == 2
