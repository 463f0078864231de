"""What the report prints on a run that learns nothing, or overfits."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.histories import train_report, write_run
from trainyard.report.findings import findings
from trainyard.report.page import page
from trainyard.report.runs import Run, read_runs

pytestmark = pytest.mark.slow


def a_run(
    folder: Path,
    *,
    train: float,
    val: float,
    classes: int = 10,
    epochs: int = 8,
    lr: float = 0.1,
    **ema: float,
) -> Run:
    """A run whose accuracies are constant; its recipe's learning rate is 0.1."""
    reports: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        reports += [train_report(10 * epoch, top1=train, lr=lr)]
        figures = {"loss": 2.3, "top1": val, "balanced_accuracy": val, **ema}
        reports += [{"kind": "val", "step": 10 * epoch, "epoch": float(epoch), **figures}]
    write_run(folder, reports)
    (folder / "checkpoints" / "best").mkdir(parents=True)
    progress = {"classes": [str(n) for n in range(classes)]}
    (folder / "checkpoints" / "best" / "progress.json").write_text(json.dumps(progress))
    return read_runs([folder])[0]


def test_a_run_that_learns_is_not_blamed(tmp_path: Path) -> None:
    assert findings(a_run(tmp_path / "a", train=0.92, val=0.95)) == []
    assert findings(a_run(tmp_path / "b", train=0.90, val=0.76)) == []
    assert findings(a_run(tmp_path / "c", train=0.92, val=0.93, classes=2)) == []
    assert findings(read_runs([write_run(tmp_path / "d", [train_report(99)])])[0]) == []


@pytest.mark.parametrize(("classes", "val"), [(10, 0.1), (10, 0.18), (2, 0.5), (1000, 0.001)])
def test_the_level_of_chance(classes: int, val: float, tmp_path: Path) -> None:
    (sign,) = findings(a_run(tmp_path / "a", train=val, val=val, classes=classes))
    assert f"{classes:,} classes" in sign
    assert findings(a_run(tmp_path / "b", train=val, val=val, ema_balanced_accuracy=0.9)) == []


def test_a_run_is_not_judged_in_its_warm_up_nor_before_three_epochs(tmp_path: Path) -> None:
    assert findings(a_run(tmp_path / "a", train=0.1, val=0.1, lr=0.04)) == []
    assert findings(a_run(tmp_path / "b", train=0.1, val=0.1, epochs=2)) == []


def test_training_far_above_validation(tmp_path: Path) -> None:
    (sign,) = findings(a_run(tmp_path / "a", train=1.0, val=0.74))
    assert "100.0%" in sign and "74.0%" in sign
    assert findings(a_run(tmp_path / "b", train=1.0, val=0.74, ema_top1=0.9)) == []


def test_the_report_names_the_page(tmp_path: Path) -> None:
    run = a_run(tmp_path / "bad", train=0.1, val=0.1)
    other = a_run(tmp_path / "good", train=0.92, val=0.95)
    assert "docs/learns-nothing.md" in page([run])
    assert "docs/learns-nothing.md" not in page([other])
    assert "bad: After 8.0 epochs" in page([run, other])
