"""`trainyard runs`: the table of runs, from run directories of which nothing is trusted."""

import csv
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Capture, newest, run, shown
from tests.errors import check, refused
from tests.report.histories import train_report, write_run
from tests.runs import events
from trainyard.errors import DataError
from trainyard.report.listing import LEAST, Row, _recipe, list_runs, table_of
from trainyard.run.trainer import Trainer


def val(step: int, top1: object, **more: Any) -> dict[str, Any]:
    where = {"step": step, "epoch": step / 10, "samples": 32 * step, "time": 0.5 * step}
    return {"kind": "val", **where, "top1": top1, **more}


def event(step: int, name: str) -> dict[str, Any]:
    return val(step, None) | {"kind": "event", "event": name, "message": f"said of {name}"}


END = [train_report(step) for step in range(1, 101)]
STATES = {
    "done": [*END, val(100, 0.7)],
    "ended early": [*END[:40], val(20, 0.6), val(40, 0.5), event(40, "ended early")],
    "interrupted": [*END[:40], val(40, 0.8)],
    "failed": [*END[:40], val(20, 0.4), event(40, "failed")],
}
GOES_ON = {
    "interrupted": [*END[:40], event(40, "failed"), event(40, "resumed"), *END[40:50]],
    "done": [*STATES["ended early"], event(40, "resumed"), *END[40:], val(100, 0.7)],
}
NOT_EVALUATED = {"interrupted": [*END, val(80, 0.7)]}  # after its last step


@pytest.mark.parametrize(
    "written", [STATES, GOES_ON, NOT_EVALUATED], ids=["ended", "went on", "not evaluated"]
)
def test_states(written: dict[str, Any], tmp_path: Path) -> None:
    for state, lines in written.items():
        write_run(tmp_path / state, lines)
    rows = {row.name: row for row in list_runs(tmp_path)}
    assert {name: row.state for name, row in rows.items()} == {name: name for name in written}
    messages = {row.message for row in rows.values()}
    assert messages == ({"said of failed", None} if written is STATES else {None})


def test_a_run_that_trains_holds_its_lock(tmp_path: Path) -> None:
    """And it is not disturbed: the look takes nothing away."""
    folder = write_run(tmp_path / "a", STATES["failed"])
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list_runs(tmp_path)[0].state == "training"
    assert list_runs(tmp_path)[0].state == "failed"


def test_values(tmp_path: Path) -> None:
    """The best by run.best_by, of the weights or their average; the last of equal ones."""
    lines = [*END[:60], val(20, 0.5, ema_top1=0.9), val(40, 0.9), val(60, 0.2)]
    folder = write_run(tmp_path / "sweep" / "a", lines)
    command = ["trainyard", "train", "recipes/mine.toml", "--data", "x"]
    (folder / "environment.json").write_text(json.dumps({"command": command}))
    (row,) = list_runs(tmp_path)
    assert (row.name, row.recipe, row.model) == (os.path.join("sweep", "a"), "mine", "test_vit")
    assert (row.best_by, row.best, row.best_step, row.best_epoch) == ("top1", 0.9, 40, 4.0)
    assert (row.step, row.epoch, row.length, row.seconds) == (60, 6.0, "100 steps", 30.0)
    assert row.changed == pytest.approx((folder / "metrics.jsonl").stat().st_mtime)


def test_orders(tmp_path: Path) -> None:
    for name, top1, changed in (("b", 0.5, 20), ("c", 0.9, 10), ("a", None, 30)):
        folder = write_run(tmp_path / name, [train_report(1), val(1, top1)])
        for file in folder.iterdir():
            os.utime(file, (changed, changed))
    found = {order: [row.name for row in list_runs(tmp_path, order)] for order in ORDERS}
    assert found == ORDERS


ORDERS = {"best": ["c", "b", "a"], "name": ["a", "b", "c"], "changed": ["a", "b", "c"]}


def test_where_runs_are_sought(tmp_path: Path) -> None:
    """In folders of folders; not in a run, a hidden folder, or behind a link."""
    write_run(tmp_path / "a", [])
    write_run(tmp_path / "a" / "checkpoints" / "step-00000001", [])
    write_run(tmp_path / "b" / "c" / "d", [])
    write_run(tmp_path / ".hidden" / "e", [])
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [row.name for row in list_runs(tmp_path, "name")] == ["a", "b/c/d"]
    assert [row.name for row in list_runs(tmp_path / "a")] == ["a"]
    check(refused("runs", tmp_path / "a" / "checkpoints" / "none"), "file.unreadable")
    (tmp_path / "empty").mkdir()
    check(refused("runs", tmp_path / "empty"), "run.none-below", path=tmp_path / "empty")


DAMAGED = {
    "metrics.jsonl": [
        *('{"kind": "val", "step": "x"}\n', "[]\n", "\0\n", '{"kind": "train", \n'),
        f'{{"kind": "val", "step": 3, "top1": {"9" * 400}}}\n',
        '{"kind": "val", "step": 3, "epoch": "\\u001b[2J", "time": []}\n',
    ],
    "recipe.toml": ["[", "a" * 10, f"[run]\nseed = 0x{'f' * 9999}", "[run]\nseed = 07:32:00"],
}
ODD = {
    "metrics.jsonl": [
        '{"kind": "val", "step": 3, "top1": 1e999, "epoch": 1e999, "time": -1e999}\n',
        '{"kind": "event", "step": 3, "event": {}, "message": 1}\n',
        "half a li",
    ],
    "recipe.toml": [
        "",
        f'[run]\nlength = "{"9" * 400} steps"',
        "[run]\nbest_by = 3\nlength = [1]\n[model]\nname = 1\n",
        "run = 1",
    ],
    "environment.json": ["[]", '{"command": {}}', '{"command": ["train"]}', '{"command": [1]}'],
}
CASES = [(kind, name, text) for kind in (DAMAGED, ODD) for name in kind for text in kind[name]]


@pytest.mark.parametrize(("kind", "name", "text"), CASES)
def test_files_that_are_not_trainyards(
    kind: dict[str, list[str]], name: str, text: str, tmp_path: Path, capsys: Capture
) -> None:
    """The run has a row, and so have the others."""
    write_run(tmp_path / "good", STATES["done"])
    folder = write_run(tmp_path / "bad", STATES["done"])
    (folder / name).write_text(text)
    found = {row["name"]: row for row in json.loads(shown(capsys, "runs", tmp_path, "--json"))}
    assert found["good"]["state"] == "done"
    assert (found["bad"]["state"] == "unreadable") == (kind is DAMAGED)
    assert "\x1b" not in shown(capsys, "runs", tmp_path)


def test_a_pipe_in_place_of_a_file_is_not_opened(tmp_path: Path) -> None:
    """It has no writer: the table would wait for ever."""
    for name in ("metrics.jsonl", "recipe.toml", "environment.json", ".lock"):
        folder = write_run(tmp_path / name, STATES["interrupted"])
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert {row.state for row in list_runs(tmp_path)} == {"unreadable"}


def test_the_table_and_the_file(tmp_path: Path, capsys: Capture) -> None:
    for name, lines in STATES.items():
        write_run(tmp_path / name, lines)
    table = shown(capsys, "runs", tmp_path, "--out", tmp_path / "all.csv").splitlines()
    cells = [line.split("  ") for line in table if "%" in line]
    assert [row[1] for row in cells] == ["interrupted", "done", "ended early", "failed"]
    assert any("40/100" in line and "60.00%" in line and "2.0" in line for line in table)
    assert "failed: said of failed" in table
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["interrupted", "done", "ended early", "failed"]
    assert float(rows[0]["best"]) == 0.8
    check(refused("runs", tmp_path, "--out", "all.txt"), "option.wrong-suffix")


def test_what_all_rows_share_is_in_the_head() -> None:
    """Names of values and units: else they are in the cells."""
    top1 = Row("a", "a", "done", 0, length="3 epochs", epoch=3, best=0.5)
    labels = Row("b", "b", "done", 0, length="9 steps", step=9, best_by="map", best=0.5)
    head, cells = table_of([top1, top1])
    assert (head[3], head[4], cells[0][3:5]) == ("epochs", "top-1", ["3.0/3", "50.00%"])
    head, cells = table_of([top1, labels])
    assert (head[3], head[4]) == ("done", "best")
    assert [row[3:5] for row in cells] == [
        ["3.0/3 epochs", "50.00% top-1"],
        ["9/9 steps", "50.00% mAP"],
    ]


def test_a_narrow_terminal_cuts_no_number(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in STATES.items():
        write_run(tmp_path / "a sweep with a long name" / name, lines)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for columns, left_out in (("80", 3), ("120", 0), ("50", 3)):
        monkeypatch.setenv("COLUMNS", columns)
        text = re.sub(r"\x1b\[[0-9;]*m", "", shown(capsys, "runs", tmp_path))
        table = text.splitlines()[:-1]
        assert max(map(len, table)) <= int(columns)
        assert [word in text for word in LEAST].count(False) == left_out
        for whole in ("60.00%", "interrupted", "40/100", "0:00:50"):
            assert whole in text


def test_epochs_do_not_exceed_the_length_and_steps_are_as_they_are() -> None:
    """Of 8 epochs the last step ends at 8.2."""
    row = Row("a", "a", "done", 0, step=28, length="8 epochs", epoch=8.2, best=0.5, best_epoch=8.2)
    head, (cells,) = table_of([row])
    found = dict(zip(head, cells, strict=True))
    assert (found["epochs"], found["at epoch"]) == ("8.0/8", "8.0")


@pytest.mark.slow
def test_a_real_run_and_why_it_failed(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trainer) -> None:
        raise DataError("stream.no-samples")

    command = ("train", "debug", "--data", digits, "--run", tmp_path / "a", "--json")
    keys = ("--run.length", "2 steps", "--run.save_every", "1 step", "--data.threads", "1")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", fail)
        assert run(*command, *keys) == 2
    (row,) = list_runs(tmp_path)
    assert (row.state, row.step, row.message) == ("failed", 2, str(DataError("stream.no-samples")))
    assert len(events(tmp_path / "a", "failed")) == 1
    assert newest(tmp_path / "a").name == "step-00000001"
    assert run(*command, *keys) == 0
    (row,) = list_runs(tmp_path)
    assert (row.state, row.message) == ("done", None)


def test_the_recipe_of_a_command_whose_options_come_first_is_left_out() -> None:
    """The table had --data in its place."""
    assert _recipe(["trainyard", "train", "--data", "x", "digits"]) is None
