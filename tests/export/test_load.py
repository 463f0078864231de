"""Exported files are evaluated and predict, each by its own library, without the run."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import save_file

import trainyard
from tests.command_line import Capture, run, shown
from tests.errors import check, raises, refused
from tests.export.test_photograph import RUNTIME
from trainyard.classifier import load
from trainyard.export.export import Exporter

pytestmark = pytest.mark.slow

FILES = {
    "m.safetensors": (),
    "m.onnx": (),
    "photograph.onnx": ("--photograph",),
    "int8.onnx": ("--int8",),
    "m.pt2": (),
    "photograph.pt2": ("--photograph",),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_of_images_what_was_measured(
    name: str, convolutions: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    asked = (*FILES[name], "--images", "100000", "--tolerance", "3", "--json")
    (told,) = json.loads(shown(capsys, "export", convolutions, tmp_path / name, *asked))["exports"]
    moved = tmp_path / "elsewhere" / name
    moved.parent.mkdir()
    (tmp_path / name).rename(moved)
    found: dict[str, Any] = json.loads(shown(capsys, "evaluate", moved, "--data", digits, "--json"))
    assert found["samples"] == told["images"]
    assert found["top1"] == pytest.approx(told["top1"], abs=0.003)  # JPEGs and roundings
    image = min((digits / "val" / "3").iterdir())
    (tmp_path / "bad.png").write_text("no image")
    said = json.loads(shown_with_bad(capsys, "predict", moved, image, tmp_path / "bad.png"))
    first, second = said["images"]
    assert said["checkpoint"] == str(moved) and "error" in second
    (expected,) = load(convolutions).predict([image], top=1)
    near = 0.2 if "int8" in name else 0.01
    best = first["guesses"][0]
    assert (best["class"], best["probability"]) == (
        expected[0].name,
        pytest.approx(expected[0].probability, abs=near),
    )
    (again,) = trainyard.load_export(moved).predict([image], top=1)
    assert again[0].name == expected[0].name


def shown_with_bad(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert run(*arguments, "--json") == 0
    return capsys.readouterr().out


def test_a_page_predicts(convolutions: Path, digits: Path, tmp_path: Path) -> None:
    classifier, image = load(convolutions), min((digits / "val" / "5").iterdir())
    Exporter(classifier, runtime=RUNTIME, images=1).to_file(tmp_path / "page.html", "html")
    found, own = (
        one.predict(image) for one in (trainyard.load_export(tmp_path / "page.html"), classifier)
    )
    assert [guess.name for guess in found[0][:2]] == [guess.name for guess in own[0][:2]]


def test_what_is_no_export(convolutions: Path, digits: Path, tmp_path: Path) -> None:
    image = min((digits / "val" / "3").iterdir())
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    onnx.save(empty, tmp_path / "other.onnx")
    (tmp_path / "bad.pt2").write_bytes(b"no program")
    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    for name in ("other.onnx", "bad.pt2", "plain.safetensors"):
        check(refused("predict", tmp_path / name, image), "export.unreadable")


def test_a_file_cannot_name_code_to_run(tmp_path: Path) -> None:
    about = {"architecture": "os:system", "model_args": '{"command": "touch run"}'}
    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors", metadata=about)
    with raises("export.of-own-code", function="os:system"):
        trainyard.load_export(tmp_path / "m.safetensors")


def test_options_that_are_for_a_run(convolutions: Path, digits: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    assert run("export", convolutions, file, "--images", "1") == 0
    check(refused("evaluate", file), "option.export-without-data")
    for option in (("--data.eval_size", "64"), ("--no-ema",)):
        error = refused("evaluate", file, "--data", digits, *option)
        check(error, "option.of-run-beside-export")
