"""What the report says of runs with a fault: recorded ones, of benchmarks/symptoms.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.histories import train_report, write_run
from trainyard.report.findings import findings
from trainyard.report.page import page
from trainyard.report.pictures import Gallery
from trainyard.report.runs import Run, read_runs

RECORDED = json.loads((Path(__file__).parent / "symptoms.json").read_text())
SEEN = {
    "none": [],
    "none, ViT": [],
    "few images, leaked": [],  # no curve proves a leak
    "rate too high, ViT": ["that of guessing", "loss jumped"],
    "rate far too high, no warm-up": ["was skipped"],
    "rate too low": ["that of guessing"],
    "labels shuffled": ["that of guessing", "Training accuracy is"],
    "half of the labels wrong": ["Validation accuracy is"],
    "batch norm over 2 images": [],  # augmented: no gap upwards is told
    "mean and std in 0..255": ["Training accuracy is"],
    "augmentation too strong": ["that of guessing"],
    "few images": ["Training accuracy is"],
}


def written(
    folder: Path, fault: str, *, classes: int = 10, recipe: dict[str, Any] | None = None
) -> Run:
    """The recorded run, with other recipe keys if given."""
    run = RECORDED[fault]
    write_run(folder, run["reports"])
    keys = run["recipe"] | (recipe or {})
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in keys.items()]
    (folder / "recipe.toml").write_text("".join(lines))
    (folder / "checkpoints" / "best").mkdir(parents=True)
    progress = {"classes": [str(n) for n in range(classes)]}
    (folder / "checkpoints" / "best" / "progress.json").write_text(json.dumps(progress))
    return read_runs([folder])[0]


@pytest.mark.parametrize("fault", SEEN)
def test_each_fault_is_seen_and_a_good_run_is_not_blamed(fault: str, tmp_path: Path) -> None:
    found = findings(written(tmp_path / "run", fault))
    assert len(found) == len(SEEN[fault]), found
    for text, fragment in zip(found, SEEN[fault], strict=True):
        assert fragment in text


def test_the_report_names_the_page(tmp_path: Path) -> None:
    run = written(tmp_path / "bad", "rate too low")
    other = written(tmp_path / "good", "none")
    assert "docs/learns-nothing.md" in page([run], Gallery())
    assert "docs/learns-nothing.md" not in page([other], Gallery())
    assert "bad: After 8.0 epochs" in page([run, other], Gallery())


def test_augmentation_explains_why_validation_is_above_training(tmp_path: Path) -> None:
    keys: list[dict[str, Any]] = [
        {"augment.scale": [0.35, 1.0]},
        {"augment.mixup": 0.2},
        {"model.drop_path": 0.1},
    ]
    for number, recipe in enumerate(keys):
        run = written(tmp_path / str(number), "half of the labels wrong", recipe=recipe)
        assert findings(run) == []


def test_a_run_is_not_judged_in_its_warm_up(tmp_path: Path) -> None:
    """A rate of a hundredth of the recipe's: at chance, and rightly so."""
    assert findings(written(tmp_path / "run", "rate too low", recipe={"optim.lr": 1e-5})) == []


def test_nor_before_three_epochs_or_without_known_classes(tmp_path: Path) -> None:
    run = written(tmp_path / "run", "rate too low")
    early = [r for r in RECORDED["rate too low"]["reports"] if r["epoch"] < 3]
    (run.folder.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in early))
    assert findings(read_runs([run.folder.path])[0]) == []
    assert findings(read_runs([write_run(tmp_path / "b", [train_report(1)])])[0]) == []


def test_two_classes_have_a_level_of_chance_too(tmp_path: Path) -> None:
    """93% of two classes, or 10%, are no guessing; 50% would be."""
    assert findings(written(tmp_path / "a", "none, ViT", classes=2)) == []
    run = written(tmp_path / "b", "rate too low", classes=2)
    text = run.folder.metrics.read_text().replace(
        '"balanced_accuracy": 0.', '"balanced_accuracy": 0.5'
    )
    run.folder.metrics.write_text(text)
    assert "among 2 classes, 50.0%" in findings(read_runs([run.folder.path])[0])[0]
