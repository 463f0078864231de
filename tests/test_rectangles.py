"""A run on images that are not square, from the recipe to the exports."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from PIL import Image

from tests.command_line import Capture, run, shown
from trainyard.classifier import load
from trainyard.files import RunDirectory
from trainyard.training.recorded import load_recorded

pytestmark = pytest.mark.slow

SIZES = ("--data.image_size", "[32, 64]", "--data.eval_size", "48,32", "--data.crop_pct", "0.9")
STAGES = ("--run.length", "4 steps", "--schedule.image_size", "2 steps: [48, 64]")
MIXES = ("--augment.mixup", "0.2", "--augment.cutmix", "1", "--augment.erasing", "0.5")
COLOURS = ("--augment.randaugment", "rand-m9-mstd0.5-inc1")


@pytest.fixture(scope="module", params=["crop", "squash", "pad"])
def wide(
    request: pytest.FixtureRequest, digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "run"
    where = ("--data", digits, "--run", folder, "--data.threads", "1", "--json")
    fit = ("--data.fit", request.param)
    assert run("train", "debug", *where, *fit, *SIZES, *STAGES, *MIXES, *COLOURS) == 0
    return folder


def test_predictions_and_the_evaluation_agree(wide: Path, digits: Path) -> None:
    """Height and width change places nowhere: the shapes of all sizes differ."""
    recorded = load_recorded(RunDirectory(wide).predictions)
    assert recorded is not None
    files = sorted((digits / "val").glob("*/*"))[:64]
    guesses = [best.probability for (best, *_) in load(wide).predict(files)]
    np.testing.assert_allclose(guesses, recorded.scores.confidence[:64], rtol=1e-4)


def test_timm_prepares_images_for_an_export_as_the_run_does(
    wide: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The folder's configuration, read by timm alone; and a change of the size by an override."""
    hub, file = tmp_path / "hub", tmp_path / "wide.onnx"
    shown(capsys, "export", wide, file, "--hub", hub)
    (inputs,) = onnx.load(file).graph.input
    assert [axis.dim_value for axis in inputs.type.tensor_type.shape.dim[1:]] == [3, 48, 32]
    classifier, model = load(wide), timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    about = timm.data.resolve_model_data_config(model)  # type: ignore[no-untyped-call]
    transform = timm.data.create_transform(**about)
    image = Image.open(next((digits / "val").glob("*/*"))).convert("RGB").resize((90, 71))
    theirs, ours = transform(image)[None], classifier.preprocess([image])
    assert theirs.shape == ours.shape == (1, 3, 48, 32)
    # In units of the standard deviation: one grey level.
    assert (theirs - ours).abs().max() < 1.5 / 255 / min(classifier.config.data.std)
    with torch.no_grad():
        assert torch.allclose(model(theirs), classifier.logits(theirs), rtol=1e-4, atol=1e-5)


def test_the_card_of_an_export_resizes_as_the_run_does(
    wide: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    shown(capsys, "export", wide, tmp_path / "m.pt2")
    (tmp_path / "image.png").write_bytes(next((digits / "val").glob("*/*")).read_bytes())
    text = (tmp_path / "m.pt2.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    code = code.replace("image.png", str(tmp_path / "image.png"))
    names: dict[str, object] = {}
    exec(code.replace('"m.pt2"', json.dumps(str(tmp_path / "m.pt2"))), names)
    classifier = load(wide)
    with torch.no_grad():
        ours = classifier.logits(classifier.preprocess([tmp_path / "image.png"]))
    assert torch.allclose(names["logits"], ours, atol=0.02)  # type: ignore[arg-type]
