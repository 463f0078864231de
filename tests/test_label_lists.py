"""A run on images with lists of labels: trained, resumed, evaluated, predicted and exported."""

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

import trainyard
from tests.command_line import Capture, newest, run, shown
from tests.errors import check, refused
from tests.runs import assert_equal, contents, cut_off, read
from trainyard.classifier import load
from trainyard.data.index.unlabelled import open_images
from trainyard.model.adapt import classifier_layers
from trainyard.training.label_scores import LabelScores

NUM_STEPS = 24
RECIPE = {
    "model.ema_decay": "0.9",
    "loss.name": "bce",
    "run.best_by": "map",
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "8 steps",
    "run.eval_every": "8 steps",
    "augment.mixup": "0.2",
    "augment.cutmix": "0.2",
    "augment.label_smoothing": "0.1",
    "data.threads": "1",
}
SPLITS = ("train", "val")
NAMES = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "even", "odd")


def train(listing: Path | str, folder: Path, **changes: str) -> list[str]:
    keys = RECIPE | changes
    options = [word for key, value in keys.items() for word in (f"--{key}", value)]
    return ["train", "digits", "--data", str(listing), "--run", str(folder), "--json", *options]


@pytest.fixture(scope="module")
def trained(listed_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lists") / "run"
    assert run(*train(listed_digits, folder)) == 0
    return folder


def test_metrics_are_of_the_saved_scores(trained: Path) -> None:
    lines = [line for line in read(trained) if line["kind"] == "val"]
    best = max(lines, key=lambda line: max(line["map"], line["ema_map"]))
    assert 0.5 < max(best["map"], best["ema_map"]) < 1  # of guessing: 0.17
    recorded = trainyard.predictions(trained)
    assert isinstance(recorded.scores, LabelScores)
    expected = average_precision_score(recorded.labels, recorded.scores.logits.T, average="macro")
    assert best[f"{recorded.weights}map"] == pytest.approx(expected, rel=1e-9)
    assert recorded.step == best["step"]
    found = trainyard.evaluate(trained)
    same = ("map", "micro_f1", "macro_f1", "loss", "ema_map", "samples")
    saved = json.loads((trained / "checkpoints/best/progress.json").read_text())["last"]
    assert {key: found[key] for key in same} == pytest.approx({key: saved[key] for key in same})
    for line in read(trained):
        assert not {"top1", "top5", "balanced_accuracy"} & line.keys()


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_alike(
    trained: Path, listed_digits: Path, tmp_path: Path
) -> None:
    again = cut_off(trained, tmp_path / "again", 8)
    assert run(*train(listed_digits, again)) == 0
    found, expected = contents(newest(again)), contents(newest(trained))
    assert found["progress"]["step"] == NUM_STEPS
    for tree in (found, expected):
        for part in ("last", "best"):
            tree["progress"][part].pop("time", None)
    assert_equal(found, expected)


@pytest.mark.slow
def test_what_an_evaluation_shows(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "all.csv"
    asked = ("--per-class", "20")
    text = shown(capsys, "evaluate", trained, *asked, "--out", path)
    assert "mAP" in text
    assert "AP" in text
    assert not any(word in text for word in ("top-1", "balanced", "ECE", "wrong guesses"))
    tree = json.loads(shown(capsys, "evaluate", trained, *asked, "--json"))
    classes = {row["class"]: row for row in tree["per_class"]}
    assert tuple(sorted(classes)) == NAMES
    precisions = [row["average_precision"] for row in classes.values()]
    assert tree["map"] == pytest.approx(np.mean(precisions))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    raw = [row for row in rows if row["weights"] == "raw"]
    assert (len(raw), {row["labels"] for row in raw if "/9/" in row["file"]}) == (364, {""})
    hits = sum(len({*r["labels"].split("|")} & {*r["guesses"].split("|")} - {""}) for r in raw)
    pairs = sum(len(r[key].split("|")) for r in raw for key in ("labels", "guesses") if r[key])
    assert tree["micro_f1"] == pytest.approx(2 * hits / pairs)


@pytest.mark.slow
def test_what_is_for_one_label_is_refused_or_left_out(trained: Path, tmp_path: Path) -> None:
    """--confusions changed nothing."""
    check(refused("evaluate", trained, "--confusions", 3), "option.beside-lists")
    assert run("evaluate", trained, "--out", tmp_path / "tables", "--json") == 0
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["classes.csv"]


@pytest.mark.slow
def test_some_classes_of_other_data(trained: Path, listed_digits: Path, tmp_path: Path) -> None:
    """Data with four of the classes, in another order of numbers than the model's."""
    rows = [
        f"val/{digit}/{path.name},{digit}|even"
        for digit in "684"
        for path in sorted((listed_digits.parent / "val" / digit).iterdir())
    ]
    (tmp_path / "some.csv").write_text("path,labels\n" + "\n".join(rows) + "\n")
    data = f"{tmp_path}/some.csv#root={listed_digits.parent}"
    found = trainyard.evaluate(trained, data=data)
    assert (found["classes"], found["model_classes"]) == (4, 11)
    every = trainyard.evaluate(trained, data=data, all_classes=True)
    assert every["classes"] == 11
    assert every["map"] == pytest.approx(found["map"])  # of the classes that have samples
    assert found["map"] > 0.5


@pytest.mark.slow
def test_probabilities_are_independent(trained: Path, listed_digits: Path, capsys: Capture) -> None:
    image = next((listed_digits.parent / "val/0").iterdir())
    model = load(trained, ema=False)
    (guesses,) = model.predict([image], top=11)
    logits = model.logits(model.preprocess([image]))[0]
    expected = dict(zip(model.classes, logits.sigmoid().tolist(), strict=True))
    assert {guess.name: guess.probability for guess in guesses} == pytest.approx(expected)
    tree = json.loads(shown(capsys, "predict", trained, image, "--no-ema", "--json"))
    first = tree["images"][0]["guesses"][0]
    assert first["probability"] == pytest.approx(max(expected.values()))


@pytest.mark.slow
def test_many_images_count_for_every_likely_class(
    trained: Path, listed_digits: Path, capsys: Capture
) -> None:
    """Also for those that `--top` leaves out."""
    folder = listed_digits.parent
    model = load(trained)
    shares = [model.predict(sorted((folder / split).glob("*/*")), top=11) for split in SPLITS]
    likely = [guess.name for part in shares for image in part for guess in image if guess[1] > 0.5]
    said = shown(capsys, "predict", trained, *(folder / split for split in SPLITS), "--top", "1")
    rows = [line.split() for line in said.splitlines() if line.strip().endswith("%")]
    found = {name: int(count.replace(",", "")) for name, count, _ in rows}
    assert found == Counter(likely)
    assert any(image[1].probability > 0.5 for part in shares for image in part)


def test_an_image_that_cannot_be_read_has_no_class(
    trained: Path, listed_digits: Path, tmp_path: Path
) -> None:
    for image in sorted((listed_digits.parent / "val" / "0").iterdir())[:3]:
        shutil.copy(image, tmp_path)
    (tmp_path / "bad.png").write_text("no image")
    (images,) = open_images([str(tmp_path)], tmp_path, lambda *_: None)
    model = load(trained)
    with torch.no_grad():
        classifier_layers(model.model)[0].get_parameter("bias").fill_(100)  # certain
    assert model.predict_index(images.index).counts.tolist() == [3] * len(NAMES)


@pytest.mark.slow
def test_an_export_and_the_report_tell_of_lists(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert run("export", trained, tmp_path / "model.safetensors") == 0
    card = next(tmp_path.glob("*.md")).read_text()
    assert "| accuracy | mAP " in card
    assert "if logit > 0" in card
    assert run("report", trained, "--out", tmp_path / "report.html") == 0
    page = (tmp_path / "report.html").read_text()
    for text in ("</b> mAP on", "Mean average precision", "Average precision", "a missing label"):
        assert text in page
    assert not any(text in page for text in ("Top-1 accuracy", "Confused classes", "Best top-1"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss.name", "ce"),
        ("run.best_by", "top1"),
        ("data.balance", "0.5"),
        ("loss.teacher", "TRAINED"),
    ],
)
def test_a_recipe_for_one_label_is_refused(
    key: str, value: str, trained: Path, listed_digits: Path, tmp_path: Path
) -> None:
    changes = {key: value.replace("TRAINED", str(trained))}
    error = refused(*train(listed_digits, tmp_path / "run", **changes))
    check(error, "recipe.unfit-for-lists")
    assert key in str(error.fields["hint"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_of_the_other_kind_is_refused(
    trained: Path, digits: Path, listed_digits: Path, tmp_path: Path
) -> None:
    check(refused(*train(digits, tmp_path / "run")), "recipe.best-by-needs-lists", value="map")
    images = sorted((listed_digits.parent / "val" / "0").iterdir())[: len(NAMES)]
    rows = [f"val/0/{path.name},{name}" for path, name in zip(images, NAMES, strict=True)]
    (tmp_path / "single.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    single = f"{tmp_path}/single.csv#root={listed_digits.parent}"
    where = ("--data.train", f"{listed_digits}#train", "--data.val", single)
    keys = [word for key, value in RECIPE.items() for word in (f"--{key}", value)]
    error = refused("train", "digits", *where, "--run", tmp_path / "run", *keys)
    check(error, "data.kind-of-labels-differs", location="the validation data")
    error = refused("evaluate", trained, "--data", single)
    check(error, "data.kind-of-labels-differs", location=single)
