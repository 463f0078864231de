import json
from html import escape
from pathlib import Path

import pytest
import timm

import trainyard
from tests.errors import raises
from tests.report.conftest import STEPS
from tests.report.histories import record_some, train_report, write_run
from trainyard.compare import PRACTICAL
from trainyard.report.page import page
from trainyard.report.runs import counted, differences, groups_of, read_runs

pytestmark = pytest.mark.slow


def test_a_run_is_read_back(trained: list[Path]) -> None:
    (run,) = read_runs(trained[:1])
    assert run.steps == STEPS
    assert run.classes == tuple("0123456789")
    assert run.recipe["model.name"] == "test_vit"
    assert run.share_done() == 1
    assert run.recorded is not None
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    assert run.parameters == sum(p.numel() for p in model.parameters())
    best = run.best("top1")
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert best is not None
    assert best["top1"] == max(line["top1"] for line in lines if line["kind"] == "val")


def test_what_is_missing_or_damaged_is_no_obstacle(copied: Path) -> None:
    (copied / "environment.json").write_text("{half")
    (copied / "predictions.npz").write_bytes(b"PK")
    (copied / "quarantine.jsonl").write_text('{"file": "a", "split": "val"}\n{"fi')
    for which in ("best", "latest"):
        (copied / "checkpoints" / which).unlink()
    (run,) = read_runs([copied])
    assert (run.environment, run.recorded, run.classes, run.parameters) == ({}, None, (), None)
    assert len(run.quarantine) == 1
    assert "predictions.npz" in run.notes[0]


@pytest.mark.quick
def test_one_damaged_run_of_several_is_shown_with_its_reason(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [train_report(10)]) for name in ("a", "b")]
    (folders[0] / "metrics.jsonl").write_text('{"kind": "train", "step": -1}\n')
    damaged, good = read_runs(folders)
    assert (damaged.name, damaged.steps, good.steps) == ("a", 0, 10)
    (reason,) = damaged.notes
    text = page([damaged, good])
    assert escape(reason) in text and str(folders[0] / "metrics.jsonl") in reason
    with raises("run.not-a-report", line=1):
        read_runs(folders[:1])


def test_predictions_of_a_dropped_evaluation_are_left_out(tmp_path: Path) -> None:
    """The run went back, and came to a worse one; the best of those that are left is another."""
    reports = [
        train_report(step) | {"kind": "val", "top1": top1}
        for step, top1 in ((10, 0.5), (20, 0.7), (20, 0.4))
    ]
    for name, count in (("a", 2), ("b", 3)):
        folder = write_run(tmp_path / name, reports[:count])
        record_some(folder, samples=9, classes=3, at=20)
    before, after = read_runs([tmp_path / "a", tmp_path / "b"])
    assert before.recorded is not None
    assert after.best_evaluation["step"] == 10
    assert after.recorded is None
    assert trainyard.predictions(before.folder.path).step == 20
    with raises("run.predictions-dropped", step=20):
        trainyard.predictions(after.folder.path)


def test_parts_of_an_environment_of_another_type_are_left_out(copied: Path) -> None:
    """They ended the report with a traceback."""
    path = copied / "environment.json"
    good = json.loads(path.read_text())
    wrong = {"devices": 4, "versions": [], "git": "main", "fingerprints": 1, "command": 2}
    path.write_text(json.dumps(good | wrong | {"host": {}, "devices_of": None}))
    (run,) = read_runs([copied])
    assert set(run.environment) == set(good) - set(wrong) - {"host"} | {"devices_of"}
    assert len(run.notes) == len(wrong) + 1
    assert all(any(f"json: {key} is" in note for note in run.notes) for key in [*wrong, "host"])


def test_devices_are_counted_whatever_they_are() -> None:
    assert counted(["H100", {}, "H100"]) == "2 x H100, 1 x {}"


def test_how_much_of_a_run_is_done(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "a", [train_report(25)])])
    assert run.share_done() == 0.25
    (run,) = read_runs([write_run(tmp_path / "b", [])])
    assert run.share_done() == 0


@pytest.mark.parametrize(
    ("length", "share"),
    [
        ("10 epochs", 0.5),
        ("10epochs", 0.5),
        ("5  epochs", 1),
        (" 2 epochs ", 1),
        ("100steps", 0.5),
        ("3200 samples", 0.5),
        ("50%", None),
        ("0 steps", None),
        ("a while", None),
        ("", None),
    ],
)
def test_a_length_as_recipes_may_have_it(length: str, share: float | None, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_report(50)])
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.replace("100 steps", length))
    (run,) = read_runs([folder])
    assert run.share_done() == share


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, []) for name in ("a/run", "b/run")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_seeds_alone_make_a_group(trained: list[Path]) -> None:
    runs = read_runs(trained)
    (group,) = groups_of(runs)
    assert group.name == "seed0 … seed1 (2 seeds)"
    assert [key for key, _ in differences(runs) if key not in PRACTICAL] == ["run.seed"]


def test_folds_of_one_division_make_a_group(tmp_path: Path) -> None:
    """Their fingerprints differ, as each run has other images."""
    folders = [
        write_run(tmp_path / name, [], fold=fold, seed=seed)
        for name, fold, seed in (
            ("f1", "1/2", 0),
            ("f2", "2/2", 0),
            ("other", "1/5", 0),
            ("seed", "1/2", 1),
            ("again", "1/2", 0),
        )
    ]

    def note(folder: Path, number: int, both: str) -> None:
        fingerprints = {"val": str(number), "both": both}
        (folder / "environment.json").write_text(json.dumps({"fingerprints": fingerprints}))

    for number, folder in enumerate(folders):
        note(folder, number, "a")
    assert [len(group.runs) for group in groups_of(read_runs(folders))] == [3, 1, 1]
    note(folders[3], 3, "with other images")
    assert [len(group.runs) for group in groups_of(read_runs(folders))] == [2, 1, 1, 1]
    (group,) = groups_of(read_runs(folders[:2]))
    assert group.name == "f (2 folds)"


def test_other_keys_do_not(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, [], seed=seed, lr=lr)
        for name, seed, lr in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.2), ("d", 0, 0.1))
    ]
    runs = read_runs(folders)
    assert [len(group.runs) for group in groups_of(runs)] == [2, 1, 1]  # d repeats a's seed
    assert dict(differences(runs)) == {"optim.lr": [0.1, 0.1, 0.2, 0.1], "run.seed": [0, 1, 0, 0]}
