"""`trainyard improve`: a run that goes on from another with new images, and what it tells."""

import csv
import json
from pathlib import Path

import pytest

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from tests.runs import events
from trainyard.config import load_recipe

pytestmark = pytest.mark.slow
STEPS = ("--run.length", "12 steps", "--data.threads", 1)


def classes_of(digits: Path, folder: Path, names: str, splits: tuple[str, ...]) -> Path:
    """A folder with the images of some classes, without splits if there is one."""
    for split in splits:
        place = folder / split if len(splits) > 1 else folder
        place.mkdir(parents=True)
        for name in names:
            (place / name).symlink_to(digits / split / name)
    return folder


@pytest.mark.parametrize("splits", [("train", "val"), ("train",)])
def test_old_images_before_and_after_and_new_classes(
    splits: tuple[str, ...], digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    old = classes_of(digits, tmp_path / "old", "01234567", splits)
    new = classes_of(digits, tmp_path / "new", "89", splits)
    divided = ("--data.val_share", 0.2) if len(splits) == 1 else ()
    first = ("--data", old, "--run", tmp_path / "first", *STEPS, *divided, "--json")
    assert run("train", "debug", *first) == 0
    before = json.loads(shown(capsys, "evaluate", tmp_path / "first", "--json"))
    where = ("--run", tmp_path / "second", "--rehearse", 0.5, *STEPS)
    found = json.loads(shown(capsys, "improve", tmp_path / "first", new, *where, "--json"))
    images = found["old_images"]
    assert (images["samples"], images["before"]) == (before["samples"], before["top1"])
    config = load_recipe(str(tmp_path / "second" / "recipe.toml"))
    assert config.data.weights == (0.5, 1.0)
    assert config.model.checkpoint == str(tmp_path / "first")
    assert events(tmp_path / "second", "initial weights")
    table = tmp_path / "said.csv"
    after = shown(capsys, "evaluate", tmp_path / "second", "--json", "--out", table)
    tree = json.loads(after)
    with open(table, newline="") as lines:
        rows = [*csv.DictReader(lines)]
    right = {n: [row["place"] == "1" for row in rows if row["class"] == n] for n in "0123456789"}
    own = [hit for name in "01234567" for hit in right[name]]
    assert images["after"] == pytest.approx(sum(own) / len(own)) == tree["old_top1"]
    for row in found["new_classes"]:
        hits = right[row["class"]]
        assert (row["samples"], row["top1"]) == (len(hits), pytest.approx(sum(hits) / len(hits)))
    assert [row["class"] for row in found["new_classes"]] == ["8", "9"]
    assert all(row["class"] in "01234567" for row in found["moved"])
    assert {row["guess"] for row in found["against_old_labels"]} <= {"8", "9"}
    # The same command tells the same again, and trains no more.
    assert json.loads(shown(capsys, "improve", tmp_path / "first", new, *where, "--json")) == found


def test_refusals_leave_nothing(finished: Path, digits: Path, tmp_path: Path) -> None:
    new = classes_of(digits, tmp_path / "new", "89", ("train",))
    where = ("--run", tmp_path / "second")
    check(refused("improve", finished, new, *where), "improve.no-val-data")
    check(refused("improve", finished, new, *where, "--rehearse", 0), "improve.no-rehearsal")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
