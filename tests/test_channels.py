"""Runs on grey and on multispectral images, from the files to the exports."""

import io
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models import adapt_input_conv

from tests.command_line import SHORT, Capture, newest, run, shown
from tests.errors import check, raises, refused
from trainyard.classifier import load
from trainyard.config import load_recipe
from trainyard.data.decode.array_file import array_file
from trainyard.export.export import Exporter
from trainyard.files import RunDirectory
from trainyard.published import load_published
from trainyard.training.recorded import load_recorded

GREY = ("--data.channels", "1", "--data.mean", "0.31", "--data.std", "0.38")
BANDS = ("--data.channels", "4", "--data.mean", "0.3,0.3,0.7,0.3", "--data.std", "0.4,0.4,0.4,0.4")
CHANGES = (
    *("--augment.erasing", "0.5", "--augment.mixup", "0.2", "--augment.translate", "2"),
    *("--augment.flip", "0.5", "--model.name", "test_resnet"),
)


def pictures(folder: Path) -> list[Path]:
    return sorted((folder / "val").glob("*/*"))


@pytest.fixture(scope="module")
def bands(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as arrays of four channels: the image, mirrored twice and inverted. A hundred each."""
    folder = tmp_path_factory.mktemp("bands")
    for split in ("train", "val"):
        for file in sorted((digits / split).glob("*/*"))[::4]:
            grey = np.asarray(Image.open(file).convert("L"))
            channels = np.stack([grey, grey[::-1], 255 - grey, grey[:, ::-1]], axis=2)
            out = folder / split / file.parent.name / f"{file.stem}.npy"
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(array_file(channels))
    return folder


@pytest.fixture(scope="module")
def runs(digits: Path, bands: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A run by its number of channels, with a checkpoint in each of its two steps."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for channels, data, keys in ((1, digits, GREY), (4, bands, BANDS)):
        found[channels] = folder / f"{channels}"
        where = ("--data", data, "--run", found[channels], "--run.save_every", "1 steps", "--json")
        assert run("train", "debug", *where, *SHORT, *CHANGES, *keys) == 0
    return found


@pytest.fixture(params=[1, 4])
def channels(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture
def data(channels: int, digits: Path, bands: Path) -> Path:
    return digits if channels == 1 else bands


@pytest.mark.slow
def test_evaluation_and_predictions_agree_with_the_run(
    runs: dict[int, Path], channels: int, data: Path, capsys: Capture
) -> None:
    recorded = load_recorded(RunDirectory(runs[channels]).predictions)
    assert recorded is not None
    files = pictures(data)[:64]
    guesses = [best.probability for (best, *_) in load(runs[channels]).predict(files)]
    np.testing.assert_allclose(guesses, recorded.scores.confidence[:64], rtol=1e-4)
    found = json.loads(shown(capsys, "evaluate", runs[channels], "--json").splitlines()[-1])
    assert found["top1"] == np.mean(recorded.scores.rank_of_truth == 1)
    (named,) = json.loads(shown(capsys, "predict", runs[channels], files[0], "--json"))["images"]
    assert named["guesses"][0]["probability"] == pytest.approx(guesses[0], rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(
    runs: dict[int, Path], channels: int, data: Path, tmp_path: Path
) -> None:
    start = runs[channels] / "checkpoints" / "step-00000001"
    keys = GREY if channels == 1 else BANDS
    where = ("--data", data, "--run", tmp_path / "rest", "--run.resume", start)
    assert run("train", "debug", *where, *SHORT, *CHANGES, *keys) == 0
    one, other = (
        load_file(newest(folder) / "model.safetensors")
        for folder in (runs[channels], tmp_path / "rest")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_exports_take_images_of_these_channels(
    runs: dict[int, Path],
    channels: int,
    data: Path,
    tmp_path: Path,
    *,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code in the card of each gives the logits of the classifier; bands have none."""
    monkeypatch.chdir(tmp_path)
    hub, file, program = tmp_path / "hub", tmp_path / "m.onnx", tmp_path / "m.pt2"
    shown(capsys, "export", runs[channels], file, "--hub", hub)
    shown(capsys, "export", runs[channels], program)
    shown(capsys, "export", runs[channels], tmp_path / "photograph.pt2", "--photograph")
    (inputs,) = onnx.load(file).graph.input
    assert [axis.dim_value for axis in inputs.type.tensor_type.shape.dim[1:]] == [channels, 32, 32]
    about = json.loads((hub / "config.json").read_text())
    assert about["pretrained_cfg"]["input_size"] == [channels, 32, 32]
    image = pictures(data)[0]
    classifier = load(runs[channels])
    ours = classifier.logits(classifier.preprocess([image])).numpy()
    published, _ = load_published(classifier.config.model.name, hub / "model.safetensors")
    theirs = published.logits(published.preprocess([image])).numpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-4)
    for card in (tmp_path / "m.onnx.md", tmp_path / "m.pt2.md", hub / "README.md"):
        code = card.read_text().partition("```python\n")[2].partition("```")[0]
        if channels == 4:
            assert not code and "an array of 4 channels" in card.read_text()
            continue
        names: dict[str, object] = {}
        exec(code.replace("image.png", str(image)), names)
        np.testing.assert_allclose(np.asarray(names["logits"]).reshape(1, -1), ours, atol=0.02)


@pytest.mark.slow
def test_a_page_of_bands_is_refused(runs: dict[int, Path], tmp_path: Path) -> None:
    """It gave the model the luminance of some pixels, and zeros."""
    with raises("export.page-of-channels", channels=4):
        Exporter(load(runs[4]), runtime={}).to_file(tmp_path / "page.html", "html")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_bands_in_pillow_are_turned_upright(runs: dict[int, Path]) -> None:
    """Four channels go another way than a picture."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    upright = Image.fromarray(np.rot90(pixels, -1).copy())
    classifier = load(runs[4], overrides={"data.exif": "true"})
    forms = classifier.preprocess([file.getvalue(), Image.open(file), upright])
    assert torch.equal(forms[0], forms[2])
    assert torch.equal(forms[1], forms[2])


def test_a_contact_sheet_and_verify_of_arrays(bands: Path, tmp_path: Path, capsys: Capture) -> None:
    shown(capsys, "data", "show", bands, "--out", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert len(np.unique(np.asarray(sheet))) > 100
    capsys.readouterr()
    assert run("data", "verify", bands, "--deep", "--json") == 0
    assert "NPY 4 channels" in capsys.readouterr().out
    shown(capsys, "data", "pack", bands / "val", tmp_path / "val", "--format", "webdataset")
    packed = json.loads(shown(capsys, "data", "show", tmp_path / "val", "--json"))
    assert packed["samples"] == len(pictures(bands))


@pytest.mark.slow
def test_images_of_other_channels_are_bad_samples(
    digits: Path, bands: Path, tmp_path: Path, capsys: Capture
) -> None:
    for data, keys, reason in ((digits, BANDS, "1 channel"), (bands, GREY, "4 channels")):
        folder = tmp_path / data.name
        train = ("train", "debug", "--data", data, "--run", folder, *SHORT, *keys)
        check(refused(*train), "recipe.channels-not-set")
        assert run(*train, "--data.range", "[0, 255]") == 2
        assert f"it has {reason}, and data.channels" in RunDirectory(folder).quarantine.read_text()


# --- weights of other channels ---


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 4], indirect=True)
def test_a_stem_for_rgb_is_adapted_as_timm_does(
    finished: Path, channels: int, data: Path, tmp_path: Path, capsys: Capture
) -> None:
    keys = GREY if channels == 1 else BANDS
    where = ("--data", data, "--run", tmp_path / "run", "--model.checkpoint", finished)
    options = ("--run.length", "1 steps", "--optim.lr", "1e-30", "--optim.weight_decay", "0")
    assert run("train", "debug", *where, *options, *keys, "--data.threads", "1") == 0
    name = "patch_embed.proj.weight"
    there, here = (
        load_file(newest(folder) / "model.safetensors")[name]
        for folder in (finished, tmp_path / "run")
    )
    torch.testing.assert_close(here, adapt_input_conv(channels, there))


@pytest.mark.slow
def test_a_stem_for_one_channel_is_not(runs: dict[int, Path], digits: Path) -> None:
    given = ("train", "debug", "--data", digits, *SHORT, "--model.name", "test_resnet")
    error = refused(*given, "--model.checkpoint", runs[1])
    check(error, "weights.do-not-fit", name="test_resnet")


# --- the recipe ---


def test_statistics_follow_the_channels() -> None:
    data = load_recipe("resnet50-step", {"data.channels": "1"}).data
    assert (data.mean, data.std) == ((0.449,), (0.226,))
    assert load_recipe("resnet50-step", {"data.channels": "5"}).data.mean == (0.5,) * 5
    other = load_recipe(
        "digits", {"data.channels": "5", "data.std": "0.1, 0.2, 0.3, 0.4, 0.5"}
    ).data
    assert (other.mean, other.std) == ((0.5,) * 5, (0.1, 0.2, 0.3, 0.4, 0.5))
    assert load_recipe("digits", {"data.channels": "3"}).data.mean == (0.31,) * 3
    with raises("recipe.invalid-value", key="data.std"):
        load_recipe("debug", {"data.channels": "2", "data.std": "0.1, 0.2, 0.3"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("augment.randaugment", "3a"),
        ("augment.color_jitter", "0.4, 0.4, 0.4"),
        ("data.decode", "gpu"),
    ],
)
def test_keys_for_colours_are_refused(key: str, value: str) -> None:
    with raises("recipe.needs-rgb", channels=1) as caught:
        load_recipe("resnet50-step", {"data.channels": "1", key: value})
    assert str(caught.value.fields["setting"]).startswith(f"{key} = ")
