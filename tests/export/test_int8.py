"""Exports of 8 bits are what the trained model is, as far as was measured, or are not written."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from torch import nn

from tests.command_line import Capture, run, shown
from tests.errors import check, raises, refused
from tests.test_classifier import files_of
from trainyard.classifier import load
from trainyard.export.export import Exporter

pytestmark = pytest.mark.slow

ALONE = """
import sys, json, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
logits = session.run(["logits"], {"images": numpy.load(sys.argv[2])})[0]
assert "torch" not in sys.modules and "trainyard" not in sys.modules
print(json.dumps(logits.argmax(axis=1).tolist()))
"""


def test_onnxruntime_alone_has_the_accuracy_that_was_measured(
    convolutions: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    asked = ("--int8", "--images", "100000", "--tolerance", "5", "--json")
    (told,) = json.loads(shown(capsys, "export", convolutions, tmp_path / "m.onnx", *asked))[
        "exports"
    ]
    assert run("export", convolutions, tmp_path / "float.onnx", "--images", "1") == 0
    assert told["bytes"] < 0.4 * (tmp_path / "float.onnx").stat().st_size
    files, classifier = files_of(digits), load(convolutions)
    np.save(tmp_path / "images.npy", classifier.preprocess(files).numpy())
    program = [sys.executable, "-c", ALONE, str(tmp_path / "m.onnx"), str(tmp_path / "images.npy")]
    said = subprocess.run(program, capture_output=True, text=True, check=True)
    guesses = json.loads(said.stdout)
    right = [int(file.parent.name) == guess for file, guess in zip(files, guesses, strict=True)]
    assert told["images"] == len(files)
    assert told["top1"] == np.mean(right) >= told["checkpoint_top1"] - 0.05
    ours = [int(guess[0].name) for guess in classifier.predict(files)]
    assert told["agreement"] == pytest.approx(np.mean(np.array(ours) == guesses))
    kinds = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    card = (tmp_path / "m.onnx.md").read_text()
    assert "| 8 bits |" in card and f"top-1 {told['top1']:.2%}, where" in card
    assert "model-index" not in card  # the run's evaluation is of 32 bits


def test_a_file_of_photographs_and_of_8_bits_names_the_class(
    convolutions: Path, tmp_path: Path, capsys: Capture
) -> None:
    asked = ("--int8", "--photograph", "--images", "60", "--tolerance", "5", "--json")
    text = shown(capsys, "export", convolutions, tmp_path / "m.onnx", *asked)
    (told,) = json.loads(text)["exports"]
    assert told["agreement"] > 0.9 and told["precision"] == "int8"
    model = onnx.load(tmp_path / "m.onnx")
    resize = next(node.input[0] for node in model.graph.node if node.op_type == "Resize")
    makers = {node.output[0]: node.op_type for node in model.graph.node}
    assert makers[resize] != "DequantizeLinear"  # photographs keep their grey levels


def test_what_was_calibrated_on_black_images_is_not_written(
    convolutions: Path, tmp_path: Path
) -> None:
    for digit in range(10):
        (tmp_path / "black" / str(digit)).mkdir(parents=True)
        for n in range(3):
            black = Image.new("L", (8 + n, 9 + digit))
            black.save(tmp_path / "black" / str(digit) / f"{n}.png")
    asked = ("--int8", "--data", tmp_path / "black")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "m.onnx").write_bytes(b"older")
    error = refused("export", convolutions, tmp_path / "out" / "m.onnx", *asked, exit_code=1)
    check(error, "export.less-accurate", tolerance=1.0)
    assert float(str(error.fields["found"])) < float(str(error.fields["own"])) - 0.01
    assert "conv" in str(error.fields["layers"])
    assert (tmp_path / "out" / "m.onnx").read_bytes() == b"older"
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["m.onnx"]


def test_layers_of_a_huge_range_stay_in_32_bits(convolutions: Path, tmp_path: Path) -> None:
    classifier = load(convolutions)
    norm, after = (classifier.model.get_submodule(f"conv1.{n}") for n in (1, 3))
    assert isinstance(norm, nn.BatchNorm2d) and isinstance(after, nn.Conv2d)
    for weight in (norm.weight, norm.bias):  # the same function, by another scale
        weight.data[0] *= 1e5
    after.weight.data[:, 0] /= 1e5
    measured = (
        Exporter(classifier, int8=True, tolerance=5).to_file(tmp_path / "m.onnx", "onnx").measured
    )
    assert {"conv1.0", "conv1.3"} <= set(measured.float_layers or ())
    assert measured.fall <= 0.05
    about = {p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert about["precision"] == "int8"
    assert json.loads(about["float_layers"]) == [*(measured.float_layers or ())]


def test_without_images_there_is_no_export_of_8_bits(convolutions: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        classifier = load(convolutions, overrides={f"data.{split}": str(tmp_path / "nothing")})
        with raises("data.not-found", path=tmp_path / "nothing"):
            Exporter(classifier, int8=True)


def test_a_format_without_8_bits(convolutions: Path, tmp_path: Path) -> None:
    error = refused("export", convolutions, tmp_path / "m.pt2", "--int8")
    check(error, "export.option-of-onnx", option="--int8")
