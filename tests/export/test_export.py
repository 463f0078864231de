"""Exported models, each run by its own library, say what the run's own evaluation says."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.command_line import Capture, newest, run, shown
from tests.errors import raises
from tests.test_classifier import files_of
from trainyard.classifier import load
from trainyard.config import load_recipe
from trainyard.export.check import _difference, plain_model
from trainyard.export.export import Exporter
from trainyard.files import find_checkpoint
from trainyard.run.evaluation import EvaluationOptions, evaluate_checkpoint
from trainyard.world import World

pytestmark = pytest.mark.slow

KINDS = ("safetensors", "onnx", "pt2", "hub")
Logits = Callable[[Tensor], Tensor]


def safetensors_model(path: Path) -> Logits:
    with safe_open(path, "pt") as file:
        about = file.metadata()
    arguments = json.loads(about["model_args"])
    classes = int(about["num_classes"])
    model = timm.create_model(about["architecture"], num_classes=classes, **arguments).eval()
    model.load_state_dict(load_file(path))
    return model


def onnx_model(path: Path) -> Logits:
    onnx.checker.check_model(path)
    session = onnxruntime.InferenceSession(path)
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def pt2_model(path: Path) -> Logits:
    return torch.export.load(path).module()


def hub_model(path: Path) -> Logits:
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


MODELS = dict(zip(KINDS, (safetensors_model, onnx_model, pt2_model, hub_model), strict=True))


@pytest.fixture(scope="module", params=["convolutions", "transformer"])
def trained(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="module")
def exports(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model exported each way."""
    folder = tmp_path_factory.mktemp("exports")
    for kind in KINDS[:-1]:
        hub = ("--hub", folder / "model.hub") if kind == "pt2" else ()
        assert run("export", trained, folder / f"model.{kind}", *hub) == 0
    return folder


@pytest.fixture(scope="module")
def said(trained: Path) -> tuple[NDArray[np.float32], float]:
    """The guess of the run's own evaluation for each validation image, and its top-1."""
    _, checkpoint = find_checkpoint(trained)
    config = load_recipe(str(trained / "recipe.toml"))
    quiet = Console(quiet=True)
    result = evaluate_checkpoint(
        config, checkpoint, EvaluationOptions(), world=World(), console=quiet
    )
    prefix = "ema_" if load(trained).uses_ema else ""
    return result.predictions[prefix].guess, result.as_dict()[f"{prefix}top1"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_library_makes_the_guesses_of_the_evaluation(
    kind: str, exports: Path, trained: Path, said: tuple[NDArray[np.float32], float], digits: Path
) -> None:
    files = files_of(digits)
    images = load(trained).preprocess(files)
    with torch.no_grad():
        guesses = MODELS[kind](exports / f"model.{kind}")(images).argmax(dim=1)
    assert guesses.tolist() == said[0].tolist()
    right = [int(file.parent.name) == guess for file, guess in zip(files, guesses, strict=True)]
    assert np.mean(right) == said[1]
    assert said[1] > 0.15  # of a model that knows nothing this would tell little


@pytest.mark.parametrize("kind", KINDS)
def test_each_library_makes_the_logits_of_the_model(
    kind: str, exports: Path, trained: Path
) -> None:
    model = plain_model(load(trained))
    _, channels, height, width = load(trained).preprocess(Image.new("RGB", (50, 40))).shape
    for count in (1, 7):
        images = torch.randn(count, channels, height, width)
        with torch.no_grad():
            ours, theirs = model(images), MODELS[kind](exports / f"model.{kind}")(images)
        close = (0, 0) if kind in ("safetensors", "hub") else (1e-4, 1e-5)
        torch.testing.assert_close(theirs, ours, rtol=close[0], atol=close[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_in_the_card_runs(
    kind: str,
    exports: Path,
    trained: Path,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    card = exports / ("model.hub/README.md" if kind == "hub" else f"model.{kind}.md")
    code = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    files = files_of(digits)[::20]
    likeliest = [guesses[0] for guesses in load(trained).predict(files)]
    surest = max(range(len(files)), key=lambda number: likeliest[number].probability)
    (tmp_path / "image.png").symlink_to(files[surest])
    for file in exports.glob("model.*"):
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code[0], {})
    assert capsys.readouterr().out.strip() == likeliest[surest].name


def test_every_file_tells_what_it_takes(exports: Path, trained: Path) -> None:
    with safe_open(exports / "model.safetensors", "pt") as file:
        first = file.metadata()
    second = onnxruntime.InferenceSession(exports / "model.onnx").get_modelmeta()
    extra = {"trainyard.json": ""}
    torch.export.load(exports / "model.pt2", extra_files=extra)
    classifier = load(trained)
    for about in (first, second.custom_metadata_map, json.loads(extra["trainyard.json"])):
        assert json.loads(about["classes"]) == [str(digit) for digit in range(10)]
        assert json.loads(about["image_size"]) == classifier.image_size
        assert json.loads(about["mean"]) == [0.31, 0.31, 0.31]
        assert json.loads(about["std"]) == [0.38, 0.38, 0.38]
        assert json.loads(about["crop_pct"]) == classifier.config.data.crop_pct
        assert about["interpolation"] == "bicubic"
        assert about["architecture"] == classifier.config.model.name
    model: Any = timm.create_model(f"local-dir:{exports / 'model.hub'}", pretrained=True)
    data: Any = timm.data
    known = data.resolve_model_data_config(model)
    assert known["crop_pct"] == classifier.config.data.crop_pct
    assert (known["mean"], known["std"]) == ([0.31] * 3, [0.38] * 3)
    assert model.pretrained_cfg["label_names"] == [str(digit) for digit in range(10)]
    # Those are of the weights that timm has for this architecture.
    assert not model.pretrained_cfg.keys() & {"license", "origin_url", "paper_ids"}
    assert not model.pretrained_cfg.get("tag")


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_no_file_tells_of_the_machine(kind: str, exports: Path) -> None:
    """The paths of each line of code that a model has were in them."""
    content: bytes = (exports / f"model.{kind}").read_bytes()
    for package in (timm, torch):
        assert str(Path(str(package.__file__)).parent).encode() not in content


def test_files_can_be_read_by_others_and_nothing_else_is_left(exports: Path) -> None:
    names = [f"model.{kind}" for kind in KINDS] + [f"model.{kind}.md" for kind in KINDS[:-1]]
    assert sorted(file.name for file in exports.iterdir()) == sorted(names)
    hub = {file.name for file in (exports / "model.hub").iterdir()}
    assert hub == {"README.md", "config.json", "model.safetensors"}
    (exports / "plain").touch()
    mode = (exports / "plain").stat().st_mode
    (exports / "plain").unlink()
    assert {file.stat().st_mode for file in exports.glob("model.*") if file.is_file()} == {mode}


def test_the_card_tells_the_truth_and_no_paths(exports: Path, trained: Path, digits: Path) -> None:
    text = (exports / "model.safetensors.md").read_text()
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    evaluated = [json.loads(line) for line in lines if '"val"' in line]
    classifier = load(trained)
    (own,) = [line for line in evaluated if line["step"] == classifier.step]
    assert f"top-1 {own['ema_top1' if classifier.uses_ema else 'top1']:.2%}" in text
    for written in (text, (exports / "model.hub" / "README.md").read_text()):
        assert str(digits) not in written and str(exports) not in written
    assert "| trained on | `digits/train` |" in text


@pytest.mark.parametrize(("asked", "opset", "ir"), [((), 18, 8), (("--opset", "20"), 20, 9)])
def test_the_opset_is_an_old_one_or_as_asked(
    asked: tuple[str, ...], opset: int, ir: int, convolutions: Path, tmp_path: Path
) -> None:
    assert run("export", convolutions, tmp_path / "m.onnx", "--images", "1", *asked) == 0
    model = onnx.load(tmp_path / "m.onnx")
    assert [(one.domain, one.version) for one in model.opset_import] == [("", opset)]
    assert model.ir_version == ir
    assert not any(node.metadata_props for node in model.graph.node)  # of a later version


OLD = """
import json, sys, numpy, onnxruntime
for file, images, wanted in json.loads(sys.argv[1]):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    found = session.run(["logits"], {given.name: numpy.load(images)})[0]
    numpy.testing.assert_allclose(found, numpy.load(wanted), rtol=1e-3, atol=1e-3)
print(onnxruntime.__version__)
"""


@pytest.mark.night
def test_onnxruntime_of_2024_reads_every_file(convolutions: Path, tmp_path: Path) -> None:
    python = tmp_path / "old" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "old"], check=True)
    packages = ("onnxruntime==1.20.1", "numpy==2.1.3")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    np.save(tmp_path / "photograph.npy", pixels)
    np.save(tmp_path / "images.npy", load(convolutions).preprocess(pixels).numpy())
    work = []
    for number, option in enumerate(((), ("--int8",), ("--photograph",))):
        file = str(tmp_path / f"{number}.onnx")
        assert run("export", convolutions, file, "--tolerance", "5", *option) == 0
        session = onnxruntime.InferenceSession(file)
        name = session.get_inputs()[0].name
        given = {name: np.load(tmp_path / f"{name}.npy")}
        np.save(wanted := f"{file}.npy", session.run(["logits"], given)[0])
        work.append((file, str(tmp_path / f"{name}.npy"), wanted))
    program = [str(python), "-c", OLD, json.dumps(work)]
    said = subprocess.run(program, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "1.20.1"


# --- what goes wrong ---


@pytest.mark.quick
def test_each_batch_is_compared() -> None:
    same, other = (torch.ones(1), torch.ones(1)), (torch.ones(1), torch.full((1,), 1.1))
    for pairs in ((other, same), (same, other)):
        with raises("export.logits-differ"):
            _difference(pairs, 0.01)


def test_a_model_that_differs_is_not_put_in_place(convolutions: Path, tmp_path: Path) -> None:
    exporter = Exporter(load(convolutions))
    (tmp_path / "m.safetensors").write_bytes(b"older")
    # What is written is this model, what is compared with it another.
    form = exporter._formats["safetensors"]
    exporter._formats["safetensors"] = form._replace(
        load=lambda path: lambda images: form.load(path)(images * torch.nan)
    )
    with raises("export.not-loadable", format="safetensors"):
        exporter.to_file(tmp_path / "m.safetensors", "safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]
    assert (tmp_path / "m.safetensors").read_bytes() == b"older"


@pytest.mark.parametrize("kind", ["safetensors", "hub"])
def test_what_timm_would_build_otherwise_is_said(
    kind: str, transformer: Path, tmp_path: Path
) -> None:
    exporter = Exporter(load(transformer))
    for arguments in (exporter._about.model_args, exporter._model._model_args):
        assert arguments.pop("patch_size") == 8  # type: ignore[operator, union-attr]
    with raises("export.not-loadable"):
        if kind == "hub":
            exporter.to_hub(tmp_path / "m")
        else:
            exporter.to_file(tmp_path / "m.safetensors", kind)
    assert list(tmp_path.iterdir()) == []


def test_without_the_packages_the_extra_is_named(
    convolutions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with raises("export.needs-onnx"):
        Exporter(load(convolutions)).to_file(tmp_path / "m.onnx", "onnx")


def test_without_validation_data_noise_has_to_do(
    convolutions: Path, tmp_path: Path, capsys: Capture
) -> None:
    elsewhere = ("--data.val", tmp_path / "nothing", "--json")
    found = json.loads(shown(capsys, "export", convolutions, tmp_path / "m.pt2", *elsewhere))
    assert found["exports"][0]["images"] == 0


# --- and back again ---


@pytest.mark.parametrize("kind", ["safetensors", "hub"])
def test_an_export_is_what_a_run_can_begin_with(
    kind: str, exports: Path, trained: Path, digits: Path, tmp_path: Path
) -> None:
    file = exports / ("model.hub/model.safetensors" if kind == "hub" else "model.safetensors")
    first = ("--model.checkpoint", file, "--run", tmp_path / "run", "--data", digits)
    still = ("--optim.lr", "1e-30", "--optim.weight_decay", "0", "--run.length", "1 steps")
    # No moving average, and batch norm layers that count no more than they have.
    assert run("train", trained / "recipe.toml", *first, *still, "--json") == 0
    began, given = load_file(newest(tmp_path / "run") / "model.safetensors"), load_file(file)
    for name in given:
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(began[name], given[name], rtol=0, atol=1e-20)


def test_the_classes_of_an_export_are_known(
    exports: Path, trained: Path, digits: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for digit in range(10):
            name = "abcdefghij"[digit]
            (tmp_path / "data" / split / name).symlink_to(digits / split / str(digit))
    where = ("--data", tmp_path / "data", "--run", tmp_path / "run", "--run.length", "1 steps")
    weights = ("--model.checkpoint", exports / "model.safetensors")
    assert run("train", trained / "recipe.toml", *where, *weights, "--json") == 0
    told = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "the classifier is reinitialised: it is for other classes" in told
