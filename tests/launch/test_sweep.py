"""`trainyard sweep`: which runs it makes, how they are started and ended, and what is skipped."""

import argparse
import csv
import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from shlex import quote
from statistics import stdev
from typing import Any

import pytest

from tests.command_line import Capture, newest, run, shown
from tests.errors import check, raises, refused
from tests.test_cli_signals import LONG, check_stopped_run, has_begun, started, wait_for
from trainyard.cli import sweep as command
from trainyard.cli.sweep import _is_done, combinations, means_of, values_of
from trainyard.config import check as check_recipe
from trainyard.config import keys_set, load_recipe, override
from trainyard.errors import STOPS, Stopped
from trainyard.launch import sweep as processes
from trainyard.launch.job import Job
from trainyard.launch.signals import handling
from trainyard.launch.sweep import End, gpus, run_jobs
from trainyard.report.halving import better_half, shares
from trainyard.report.listing import Row, State

# --- the combinations ---


@pytest.mark.parametrize(
    ("key", "text", "values"),
    [
        ("optim.lr", "1e-3,3e-3", ["1e-3", "3e-3"]),
        ("optim.lr", "1e-3, 1e-3 ,3e-3", ["1e-3", "3e-3"]),
        ("optim.lr", "0.1", ["0.1"]),
        ("augment.scale", "[0.5,1],[0.7,1]", ["[0.5,1]", "[0.7,1]"]),
        ("augment.scale", "[0.5,1]", ["[0.5,1]"]),
        ("model.ema_decay", "0.9,[0.9,0.99]", ["0.9", "[0.9,0.99]"]),
        ("data.train", "x/{a,b}.tar,'y,z'", ["x/{a,b}.tar", "y,z"]),
        ("schedule.image_size", '["1 epoch: [8,9]"],[]', ['["1 epoch: [8,9]"]', "[]"]),
        ("model.checkpoint", "it's,none", ["it's", "none"]),
        ("run.length", "", [""]),
    ],
)
def test_values_of_a_key(key: str, text: str, values: list[str]) -> None:
    assert values_of(key, text) == values


def test_lists_without_brackets_are_no_values() -> None:
    with raises("sweep.list-without-brackets", key="augment.scale", value="0.5,1"):
        values_of("augment.scale", "0.5,1")


def test_each_combination_is_a_run_named_by_what_varies() -> None:
    keys = {"optim.lr": "1e-3,3e-3", "run.length": "1 epoch", "run.seed": "0,1"}
    found = combinations(keys)
    names = [each.name for each in found]
    assert names == [f"lr={lr},seed={seed}" for lr in ("1e-3", "3e-3") for seed in "01"]
    assert found[1].overrides == {"optim.lr": "1e-3", "run.length": "1 epoch", "run.seed": "1"}


def test_draws_are_the_same_ones_first_within_their_ranges() -> None:
    keys = {"optim.lr": "log:1e-4..1e-2", "batch.size": "uniform:16..64", "run.seed": "1,2"}
    few, many = (combinations(keys, count) for count in (3, 40))
    assert [one.overrides for one in many[:3]] == [one.overrides for one in few]
    rates = [float(one.overrides["optim.lr"]) for one in many]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 10 <= sum(rate < 1e-3 for rate in rates) <= 30  # half of them, by the logarithm
    assert all(16 <= int(one.overrides["batch.size"]) <= 64 for one in many)
    assert {one.overrides["run.seed"] for one in many} == {"1", "2"}
    assert len(combinations({"run.seed": "1,2,3"}, 50)) == 3
    for text, code, trials in (
        ("log:1e-4..1e-2", "sweep.range-without-trials", None),
        ("log:0..1", "sweep.bad-range", 2),
        ("uniform:2..1", "sweep.bad-range", 2),
        ("uniform:2", "sweep.bad-range", 2),
    ):
        with raises(code, key="optim.lr", value=text):
            combinations({"optim.lr": text}, trials)


def test_the_better_half_has_the_higher_means() -> None:
    assert shares(8) == [0.125, 0.25, 0.5, 1] and shares(3) == [0.5, 1] and shares(1) == [1]
    scores: dict[str, list[float | None]] = {
        "a": [0.1, 0.5],
        "b": [0.9],
        "c": [None],
        "d": [0.4],
        "e": [0.2],
    }
    assert better_half(scores) == ["b", "d"]
    assert better_half({"a": [None]}) == []


def test_names_are_those_of_folders() -> None:
    """Unique, and without a separator, also for keys of the same name in two sections."""
    found = combinations({"model.checkpoint": "a/b,a_b,/etc/passwd", "optim.name": "sgd"})
    assert [run.name for run in found] == [
        "checkpoint=a_b",
        "checkpoint=a_b-2",
        "checkpoint=etc_passwd",
    ]
    found = combinations({"optim.name": "sgd,adamw", "schedule.name": "cosine,linear"})
    assert found[0].name == "optim.name=sgd,schedule.name=cosine"
    (dots, _) = combinations({"model.checkpoint": f"../..,{'x' * 500}"})
    assert "/" not in dots.name and dots.name.startswith("checkpoint=")
    assert all(len(run.name) < 100 for run in combinations({"model.name": f"a,{'x' * 500}"}))


def test_means_are_of_complete_runs_that_differ_in_seed_and_fold_alone() -> None:
    keys = {"model.checkpoint": "a/b,a_b", "data.val_fold": "1/2,2/2", "run.seed": "0,1"}
    found = combinations(keys)
    assert found[0].name == "checkpoint=a_b,val_fold=1_2,seed=0"
    assert Counter(each.repeats for each in found) == {
        "model.checkpoint=a/b": 4,
        "model.checkpoint=a_b": 4,
    }
    ends: dict[str, tuple[State, float | None]] = {
        "a": ("done", 0.5),
        "b": ("ended early", 0.8),
        "c": ("failed", 0.1),
        "d": ("done", 0.9),
        "e": ("done", None),
        "f": ("done", 0.2),
        "g": ("done", 0.4),
        "h": ("done", 0.6),
    }
    rows = [Row(name, name, state, 0.0, best=best) for name, (state, best) in ends.items()]
    repeats = dict(zip("abcdefgh", ["x", "x", "x", "y", "y", "z", "z", "z"], strict=True))
    (first, second) = means_of(rows, repeats)
    assert first[:3] == ("x", 2, "top1") and first[3:] == pytest.approx((0.65, 0.15))
    assert second[:3] == ("z", 3, "top1") and second[3:] == pytest.approx((0.4, 0.2 / 3**0.5))


def test_the_table_is_shown_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """An error in a report of a sweep that was complete left nothing on the terminal."""

    def failing(*_: object) -> None:
        raise KeyError("no such key")

    monkeypatch.setattr("trainyard.report.page.write_report", failing)
    options = argparse.Namespace(json=True)
    command._show([Row("a", "a", "done", 0.0, best=0.5)], [], tmp_path, options)
    said = json.loads(capsys.readouterr().out)
    assert said["runs"][0]["name"] == "a" and said["report"] is None


def test_mistakes_are_found_before_anything_starts(digits: Path, tmp_path: Path) -> None:
    base = ("sweep", "debug", "--data", digits, "--runs", tmp_path / "all")
    check(refused(*base, "--optim.lr", "0.1"), "sweep.nothing-varies")
    check(refused(*base, "--optim.lr", "0.1,x"), "recipe.invalid-value", key="optim.lr")
    check(refused(*base, "--optim.lrr", "1,2"), "recipe.unknown-key", key="optim.lrr")
    check(refused("sweep", "debug", "--data", "/nowhere", "--optim.lr", "1,2"), "data.not-found")
    places = ("--data.train", digits / "train", "--data.val", digits / "val")
    folds = ("--data.val_fold", "1/2,2/2")
    found = refused("sweep", "debug", *places, "--runs", tmp_path / "all", *folds)
    check(found, "recipe.val-share-beside-val-data", key="data.val_fold", val=digits / "val")
    assert not (tmp_path / "all").exists()
    own = tmp_path / "own.toml"
    own.write_text(f'extends = "debug"\n[data]\nval = "{digits / "val"}"\n')
    assert run("sweep", own, *places[:2], *folds, "--dry-run") == 0  # an option replaces it


def test_a_finished_run_of_other_data_ends_the_sweep(
    finished: Path, digits: Path, tmp_path: Path
) -> None:
    """Folds of before and after a change of the data had one mean."""
    before, data = load_recipe(str(finished / "recipe.toml")), tmp_path / "digits"
    shutil.copytree(digits, data)
    places = {f"data.{split}": str(data / split) for split in ("train", "val")}
    assert _is_done(finished, override(before, places))
    with raises("run.recipe-differs", path=finished):
        _is_done(finished, override(before, {"optim.lr": 0.5}))
    next((data / "train" / "3").iterdir()).unlink()
    with raises("run.data-differs", path=finished, split="train"):
        _is_done(finished, override(before, places))


def test_a_run_with_the_pixels_of_its_weights_is_done(finished: Path) -> None:
    """Its recipe.toml has them, the sweep's recipe has not: it was started again."""
    keys = keys_set(load_recipe(str(finished / "recipe.toml")))
    assert keys["data"].pop("mean") == [0.31] * 3
    assert _is_done(finished, check_recipe(keys))


def test_a_dry_run(capsys: Capture, digits: Path) -> None:
    said = shown(capsys, "sweep", "debug", "--data", digits, "--optim.lr", "1,2", "--dry-run")
    lines = said.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith(
        f"--run runs/debug-sweep/lr=2 --data {quote(str(digits))} --optim.lr=2"
    )


# --- the processes, which are stubs ---

STUB = """
import json, os, signal, sys, time
code, folder = sys.argv[-1], sys.argv[-2]
def save(number, frame):
    open(os.path.join(folder, "signal"), "w").write(str(number))
    sys.exit(130)
signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
note = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "cores": len(os.sched_getaffinity(0)),
        "launcher": os.environ["TRAINYARD_LAUNCHER"], "began": time.monotonic(),
        "first": os.environ.get("TRAINYARD_FIRST_RUN")}
for _ in range(1200 if code == "save" else 0):
    open(os.path.join(folder, "ready"), "w").close()
    time.sleep(0.05)
time.sleep(0.1)
note["ended"] = time.monotonic()
json.dump(note, open(os.path.join(folder, "note"), "w"))
os.kill(os.getpid(), -int(code)) if code.startswith("-") else sys.exit(int(code))
"""


class Stubs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "stub.py"
        self.script.write_text(STUB)
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{self.script}" "$@"\n')
        self.python.chmod(0o755)
        self.began: list[int] = []
        self.ended: list[End] = []

    def run(self, codes: Sequence[str], devices: Sequence[str], **more: Any) -> int | None:
        jobs = []
        for number, code in enumerate(codes):
            (self.folder / str(number)).mkdir()
            words = (str(self.folder / str(number)), code)
            jobs.append(Job(words, self.folder / str(number), python=str(self.python)))
        on = {"on_start": self.began.append, "on_end": self.ended.append, **more}
        return run_jobs(jobs, devices, is_quiet=True, **on)

    def noted(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / str(number) / "note").read_text())
        return found


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def test_one_after_another_and_the_rest_goes_on_after_a_failure(stubs: Stubs) -> None:
    assert stubs.run(["0", "2", "-9", "0"], [""]) is None
    assert stubs.began == [0, 1, 2, 3]
    assert stubs.ended == [End(0, 0), End(1, 2), End(2, 137), End(3, 0)]
    for number in range(3):
        assert stubs.noted(number)["ended"] <= stubs.noted(number + 1)["began"]
    assert stubs.noted(0)["gpu"] == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert stubs.noted(0)["cores"] == len(os.sched_getaffinity(0))
    assert stubs.noted(0)["launcher"] == str(os.getpid())
    first = str(stubs.folder / "0" / "metrics.jsonl")
    assert [stubs.noted(number)["first"] for number in (0, 1, 3)] == [None, first, first]


def test_one_a_gpu(stubs: Stubs) -> None:
    """Each has a GPU and cores of its own; the next one takes those that become free."""
    assert stubs.run(["0"] * 4, ["2", "3"]) is None
    assert sorted(stubs.noted(number)["gpu"] for number in (0, 1)) == ["2", "3"]
    assert {stubs.noted(number)["gpu"] for number in (2, 3)} <= {"2", "3"}
    own = len(os.sched_getaffinity(0))
    assert {stubs.noted(number)["cores"] for number in range(4)} <= {
        max(own // 2, 1),
        (own + 1) // 2,
    }
    assert {end.number for end in stubs.ended} == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_runs_that_save_and_starts_no_other(number: int, stubs: Stubs) -> None:
    def send() -> None:
        wait_for(lambda: (stubs.folder / "1" / "ready").exists(), "the second run")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    before = signal.getsignal(number)
    assert stubs.run(["0", "save", "0"], [""]) == number
    thread.join()
    assert (stubs.folder / "1" / "signal").read_text() == str(int(number))
    assert stubs.ended == [End(0, 0), End(1, 130)]
    assert signal.getsignal(number) == before
    assert signal.Signals(number) in STOPS


def test_a_run_that_is_enough_saves_and_is_no_failure(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_LOOK_S", 0.05)

    def is_enough(number: int) -> bool:
        return (stubs.folder / str(number) / "ready").exists()

    assert stubs.run(["save", "0", "2"], [""], is_enough=is_enough) is None
    assert (stubs.folder / "0" / "signal").read_text() == str(int(signal.SIGTERM))
    assert stubs.ended == [End(0, 0), End(1, 0), End(2, 2)]


def test_gpus_that_the_user_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert gpus(2) == ["4", "GPU-7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus(3) == ["0", "1", "2"]


# --- whole sweeps ---

SHORT = ("--run.length", "2 steps", "--run.eval_every", "1 step", "--data.threads", "1")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of sweeps are calls: how processes start and end is tested with stubs, above."""

    def run_all(
        jobs: Sequence[Job],
        devices: Sequence[str],
        *,
        is_quiet: bool,
        on_start: Callable[[int], None],
        on_end: Callable[[End], None],
        is_enough: Callable[[int], bool] | None = None,
    ) -> None:
        for number, job in enumerate(jobs):
            on_start(number)
            enough = partial(is_enough, number) if is_enough else bool
            with stopped_when(enough) as told, redirect_stdout(StringIO()):
                code = run(*job.arguments)
            assert code != Stopped.exit_code or told
            on_end(End(number, 0 if told else code))

    monkeypatch.setattr(processes, "run_jobs", run_all)


@contextmanager
def stopped_when(is_enough: Callable[[], bool]) -> Iterator[list[bool]]:
    """Inside, this process has a SIGTERM once `is_enough`; it gives whether there was one."""
    is_over, told = threading.Event(), list[bool]()

    def look() -> None:
        while not told and not is_over.wait(0.01):
            if is_enough():
                told.append(True)
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=look)
    with handling([signal.SIGTERM], lambda *_: None):
        thread.start()
        try:
            yield told
        finally:
            is_over.set()
            thread.join()


@pytest.mark.usefixtures("in_process")
def test_a_sweep_compares_its_runs_and_does_what_is_left(
    digits: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "all"
    base = ("sweep", "debug", "--data", digits, "--runs", parent, *SHORT, "--json")
    failed = parent / "lr=0.2"
    failed.mkdir(parents=True)
    (failed / "checkpoints").write_text("")  # in the way
    assert run(*base, "--optim.lr", "0.1,0.2,0.3") == 1
    said = capfd.readouterr()
    result = json.loads(said.out.splitlines()[0])
    assert {row["name"]: row["state"] for row in result["runs"]} == {
        "lr=0.1": "done",
        "lr=0.3": "done",
    }
    assert "lr=0.3" in Path(result["report"]).read_text()
    assert json.loads(said.out.splitlines()[1])["error"]["code"] == "sweep.failed"
    (failed / "checkpoints").unlink()
    assert run(*base, "--optim.lr", "0.1,0.2,0.3") == 0
    assert "run 1 of 1: lr=0.2" in capfd.readouterr().err
    monkeypatch.setattr(command, "_run", pytest.fail)  # there is nothing to run any more
    before = newest(failed).stat().st_mtime
    assert run(*base, "--optim.lr", "0.3,0.1,0.2") == 0
    assert len(json.loads(capfd.readouterr().out)["runs"]) == 3
    assert newest(failed).stat().st_mtime == before


@pytest.mark.usefixtures("in_process")
def test_a_run_that_waited_is_a_run_that_was_never_stopped(
    digits: Path, tmp_path: Path, capfd: Capture
) -> None:
    """Four runs, of which two and then one go on: the last one has the weights of a run alone."""
    length = ("--run.length", "60 steps", "--run.eval_every", "5 steps", "--data.threads", "1")
    base = ("debug", "--data", digits, *length, "--schedule.warmup", "0 steps")
    parent = tmp_path / "all"
    sweep = ("sweep", *base, "--runs", parent, "--halve", "--json")
    assert run(*sweep, "--optim.lr", "1e-7,0.01,0.02,1e-6") == 0
    said = capfd.readouterr()
    rows = {row["name"]: row for row in json.loads(said.out.splitlines()[-1])["runs"]}
    assert sorted(row["state"] for row in rows.values()) == ["done", *["interrupted"] * 3]
    (best,) = (row for row in rows.values() if row["state"] == "done")
    assert 15 <= min(row["step"] for row in rows.values()) < 60
    assert said.err.count("go on") == 2
    alone = tmp_path / "alone"
    assert run("train", *base, f"--optim.{best['name']}", "--run", alone) == 0
    weights = [newest(each) / "model.safetensors" for each in (parent / best["name"], alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    capfd.readouterr()
    assert run(*sweep, "--optim.lr", "1e-7,0.01,0.02,1e-6") == 0
    assert "waits" not in capfd.readouterr().err
    never = (*sweep[:-1], "--optim.lr", "1,2", "--run.eval_every", "0 steps")
    check(refused(*never), "sweep.halve-without-evaluations")


@pytest.mark.usefixtures("in_process")
def test_data_that_change_during_a_sweep_end_it(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs before and after the change had one mean, and exit code 0."""
    parent, data = tmp_path / "all", tmp_path / "digits"
    shutil.copytree(digits, data)

    def run_and_change(jobs: Sequence[Job], options: argparse.Namespace) -> Any:
        before = run_all(jobs[:1], options)
        next((data / "val" / "3").iterdir()).unlink()
        return before if before[0] else run_all(jobs[1:], options)

    run_all = command._run
    monkeypatch.setattr(command, "_run", run_and_change)
    words = ("sweep", "debug", "--data", data, "--runs", parent, *SHORT, "--run.seed", "0,1")
    check(refused(*words), "run.data-differs", split="val", path=parent / "seed=0")


@pytest.mark.usefixtures("in_process")
def test_folds_together_predict_each_image_once(
    digits: Path, tmp_path: Path, capfd: Capture
) -> None:
    data, parent = digits / "val", tmp_path / "all"
    base = ("sweep", "debug", "--data", data, "--runs", parent, *SHORT, "--json")
    assert run(*base, "--data.val_fold", "1/3,2/3,3/3") == 0
    result = json.loads(capfd.readouterr().out.splitlines()[0])
    best = [row["best"] for row in result["runs"]]
    (mean,) = result["means"]
    assert (mean["name"], mean["runs"], mean["mean"]) == ("", 3, pytest.approx(sum(best) / 3))
    assert mean["standard_error"] == pytest.approx(stdev(best) / 3**0.5)
    assert "(3 folds)" in Path(result["report"]).read_text()
    held_out = Counter[str]()
    for row in result["runs"]:
        lines = tmp_path / "lines.csv"
        assert run("evaluate", row["run"], "--out", lines, "--json") == 0
        with open(lines, newline="") as file:
            held_out += Counter(line["file"] for line in csv.DictReader(file))
    assert held_out == dict.fromkeys(map(str, data.glob("*/*.png")), 1)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(digits: Path, tmp_path: Path) -> None:
    parent = tmp_path / "all"
    words = ("sweep", "debug", "--data", digits, "--runs", parent, "--optim.lr", "0.1,0.2", *LONG)
    for count in (1, 2):
        with started(tmp_path, *words) as sweep:
            wait_for(lambda: len(lines(parent, "head")) == count, "the start")  # noqa: B023
            wait_for(lambda: has_begun(parent / "lr=0.1"), "the first report")
            sweep.process.send_signal(signal.SIGINT)
            assert sweep.process.wait(60) == 130
            wait_for(lambda: not sweep.members(), "the end of all processes")
        check_stopped_run(parent / "lr=0.1")
        assert not (parent / "lr=0.2").exists()
    assert lines(parent, "resumed")


def lines(parent: Path, event: str) -> list[str]:
    path = parent / "lr=0.1" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines() if f'"event": "{event}"' in line]
