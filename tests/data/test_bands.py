"""TIFFs of many bands, and `data.bands`, which names the channels of a run."""

import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image

from tests.command_line import SHORT, Capture, run
from tests.data.tars import write_files
from tests.errors import check, raises, refused
from tests.images import encode
from trainyard.classifier import load
from trainyard.config import load_recipe
from trainyard.data._native import own_decoder
from trainyard.data.config import DataConfig
from trainyard.data.decode.array_file import array_file
from trainyard.data.decode.crops import FittedCrop
from trainyard.data.decode.decode import decode_batch, opened, whole_image
from trainyard.data.decode.lost import measured
from trainyard.data.decode.rendering import Range, Ranges, Rendering
from trainyard.data.index.build import open_index
from trainyard.export.card import card
from trainyard.export.check import Measured
from trainyard.export.description import describe
from trainyard.run.depth import with_range

BANDS_HWC = np.random.default_rng(0).integers(0, 256, (12, 10, 13)).astype(np.uint8)
DEEP_HWC = BANDS_HWC.astype(np.uint16) * 16


def tiff(pixels: NDArray[Any], photometric: str = "minisblack", **options: Any) -> bytes:
    file, layout = io.BytesIO(), {"planarconfig": "contig"} | options
    tifffile.imwrite(file, pixels, photometric=photometric, metadata=None, **layout)
    return file.getvalue()


FILES = {
    "pixel by pixel": tiff(BANDS_HWC),
    "band by band": tiff(BANDS_HWC.transpose(2, 0, 1), planarconfig="separate"),
    "deflated tiles": tiff(BANDS_HWC, tile=(16, 16), compression="zlib"),
    "BigTIFF, big-endian": tiff(BANDS_HWC, bigtiff=True, byteorder=">"),
    "an array": array_file(BANDS_HWC),
}


def seen(
    content: bytes, channels: int, limits: Range | Ranges | None = None, *bands: int
) -> NDArray[np.uint8] | str:
    out = np.empty((1, 12, 10, channels), np.uint8)
    rendering = Rendering(range=limits, bands=bands)
    crop, decoder = FittedCrop((12, 10), 1.0), own_decoder()
    bad = decode_batch([content], crop, out, "bilinear", decoder=decoder, rendering=rendering)
    pixels_HWC: NDArray[np.uint8] = out[0]
    return bad[0] if bad else pixels_HWC


@pytest.mark.parametrize("name", FILES)
def test_all_bands_or_those_that_are_named(name: str) -> None:
    assert np.array_equal(seen(FILES[name], 13), BANDS_HWC)
    assert np.array_equal(seen(FILES[name], 3, None, 4, 3, 2), BANDS_HWC[..., [3, 2, 1]])
    assert np.array_equal(
        seen(FILES[name], 5, None, 9, 1, 13, 2, 2), BANDS_HWC[..., [8, 0, 12, 1, 1]]
    )
    luminance = seen(FILES[name], 1, None, 7)
    assert np.array_equal(luminance, BANDS_HWC[..., 6:7])


def test_bands_that_pillow_passes_over() -> None:
    """It opens four bands as RGB or RGBA, and drops or multiplies by the last."""
    for photometric in ("rgb", "minisblack"):
        content = tiff(BANDS_HWC[..., :4], photometric)
        assert np.array_equal(seen(content, 4, None, 1, 2, 3, 4), BANDS_HWC[..., :4])
        assert np.array_equal(seen(content, 3, None, 1, 2, 4), BANDS_HWC[..., [0, 1, 3]])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_bands_are_turned_as_pillow_turns_a_tiff(orientation: int) -> None:
    content = tiff(BANDS_HWC[..., :3], "rgb", extratags=[(0x0112, "H", 1, orientation, True)])
    upright = np.asarray(Image.open(io.BytesIO(content)))
    out = np.empty((1, *upright.shape), np.uint8)
    crop, rendering = FittedCrop(upright.shape[:2], 1.0), Rendering(bands=(1, 2, 3))
    assert decode_batch([content], crop, out, "bilinear", rendering=rendering) == {}
    assert np.array_equal(out[0], upright)
    assert opened(content, (1,)).size == upright.shape[1::-1]


@pytest.mark.parametrize("values", [DEEP_HWC, DEEP_HWC.astype(np.float32), DEEP_HWC.astype(float)])
def test_a_range_for_all_bands_or_for_each(values: NDArray[Any]) -> None:
    for content in (tiff(values), array_file(values)):
        assert np.array_equal(seen(content, 13, (0, 4080)), BANDS_HWC)
        ranges = tuple((0.0, 4080.0 if number else 2040.0) for number in range(3))
        found, expected = seen(content, 3, ranges, 2, 3, 4), BANDS_HWC[..., 1:4].astype(int)
        expected[..., 0] = np.minimum(2 * expected[..., 0], 255)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (FILES["pixel by pixel"], "13 channels, and data.bands"),
        (encode(Image.new("RGB", (10, 12)), "PNG"), "no TIFF and no .npy array"),
        (encode(Image.new("RGB", (10, 12)), "JPEG"), "no TIFF and no .npy array"),
        (tiff(DEEP_HWC), "13 channels, and data.bands"),
        (FILES["pixel by pixel"][:-900], ""),
    ],
)
def test_what_lacks_a_band_is_bad(content: bytes, reason: str) -> None:
    found = seen(content, 3, None, 1, 2, 14)
    assert isinstance(found, str) and reason in found


def test_a_display_shows_the_bands_of_the_run() -> None:
    shown = whole_image(FILES["band by band"], Rendering(bands=(4, 3, 2)))
    assert np.array_equal(np.asarray(shown), BANDS_HWC[..., [3, 2, 1]])


def test_each_channel_has_a_band_and_a_range() -> None:
    with pytest.raises(ValueError, match=r"data\.channels = 3"):
        DataConfig(bands=(1, 2))
    with pytest.raises(ValueError, match="one for each channel"):
        DataConfig(range=((0, 1), (0, 2)))
    with pytest.raises(ValueError, match="lower value first"):
        DataConfig(range=((0, 1), (0, 2), (3, 2)))
    with raises("recipe.keys-conflict"):
        load_recipe("debug", {"data.bands": "[4, 3, 2]", "data.decode": "gpu"})


# --- a run ---


def make_data(folder: Path) -> str:
    """Two classes that differ in band 11 of 13 alone, whose values are a hundredth of others'."""
    random, files = np.random.default_rng(1), dict[str, bytes]()
    for split in ("train", "val"):
        for number in range(32):
            values = random.integers(0, 4000, (16, 16, 13)).astype(np.uint16)
            values[..., 10] = random.integers(0, 12, (16, 16)) + 20 * (number % 2)
            values[..., 5] = 0
            files[f"{split}/{'ab'[number % 2]}/{number}.tif"] = tiff(values)
    return write_files(folder, files)


TINY = (*SHORT, "--model.name", "test_resnet", "--batch.size", "8", "--data.image_size", "32")


@pytest.mark.parametrize("deep", [True, False])
def test_one_answer_has_the_line_for_channels_and_range(deep: bool, tmp_path: Path) -> None:
    """It was about the range alone, and the next one about the channels."""
    content = tiff(DEEP_HWC if deep else BANDS_HWC)
    files = {f"{kind}/{number}.tif": content for kind in "ab" for number in range(4)}
    data = write_files(tmp_path / "data", files | {"a/x.png": encode(Image.new("L", (9, 9)))})
    train = ("train", "debug", "--data", data, "--run", tmp_path / "run", "--data.val_share", "0.3")
    error = refused(*train)
    check(error, "recipe.channels-not-set", channels=3)
    options = str(error.fields["options"]).partition(" for some of them")[0].split(", or ")
    limits = ["--data.range", "[0, 4080]"] if deep else []
    for line, own in zip(
        options, (["--data.channels", "13"], ["--data.bands", "[1, 2, 3]"]), strict=True
    ):
        words = shlex.split(line)
        assert words == own + limits
        config = load_recipe("debug", {words[0][2:]: words[1]})
        found = measured(open_index(data), config.data.channels, config.data.bands or ())
        if deep:
            with raises("recipe.range-not-set"):
                with_range(config, found, is_new=True)
        else:
            assert found is None


@pytest.mark.slow
@pytest.mark.parametrize("bands", [(), (11, 1, 2)])
def test_thirteen_bands_train_evaluate_and_predict(
    bands: tuple[int, ...], tmp_path: Path, capsys: Capture
) -> None:
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    middle = json.dumps([0.5] * 13)
    many = ("--data.channels", 13, "--data.mean", middle, "--data.std", middle)
    keys = ("--data.bands", json.dumps(bands)) if bands else many
    train = ("train", "debug", "--data", data, "--run", out, *TINY, *keys, "--json")
    check(refused(*train), "recipe.range-not-set")
    assert run(*train, "--data.range", "auto") == 0
    config = load_recipe(str(out / "recipe.toml")).data
    assert isinstance(config.range, tuple) and len(config.range) == (len(bands) or 13)
    assert config.range[0 if bands else 10] == pytest.approx((0, 31), abs=1)
    assert run("evaluate", out, "--json") == 0
    assert run("predict", out, f"{data}/val", "--json") == 0
    capsys.readouterr()
    classifier = load(out)
    file = Path(data) / "val/a/0.tif"
    stored, given = classifier.preprocess([file, tifffile.imread(file)] if bands else [file] * 2)
    assert stored.equal(given)
    about = describe(classifier)
    assert ("bands" in about.metadata()) == bool(bands)
    assert "PIL" not in card(about, "onnx", "m.onnx", Measured(0, 0, 0))
