"""Images of more than 8 bits a channel: mapped from `data.range`, which is given or measured."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.command_line import SHORT, run
from tests.errors import check, raises, refused
from tests.images import deep_png, encode
from trainyard.classifier import load
from trainyard.config import load_recipe
from trainyard.data._native import own_decoder
from trainyard.data.config import DataConfig
from trainyard.data.decode.array_file import array_file
from trainyard.data.decode.crops import CentralCrop
from trainyard.data.decode.decode import decode_batch, reference_image, whole_image
from trainyard.data.decode.lost import Measured as Depth
from trainyard.data.decode.lost import measured
from trainyard.data.decode.rendering import Range, Rendering, mapped
from trainyard.data.index.build import open_index
from trainyard.export.card import card
from trainyard.export.check import Measured
from trainyard.export.description import describe
from trainyard.export.page import page
from trainyard.model.weights import pixels_in
from trainyard.report.pictures import rendering_of
from trainyard.report.runs import Run
from trainyard.run.depth import with_range
from trainyard.run.pretrained import InitialWeights, with_pixels

RANDOM = np.random.default_rng(0)
VALUES_HWC = RANDOM.integers(0, 4096, (12, 10, 3)).astype(np.uint16)
GREY_HW = VALUES_HWC[..., 0]
OPAQUE_HW1 = np.full((12, 10, 1), 65535, np.uint16)
LIMITS = (1000, 3000)


def tiff(pixels: NDArray[Any], **options: Any) -> bytes:
    return encode(Image.fromarray(pixels), "TIFF", **options)


GREY: dict[str, bytes] = {
    "16 bits.png": deep_png(GREY_HW, 0),
    "with opacity.png": deep_png(np.concatenate([GREY_HW[..., None], OPAQUE_HW1], axis=2), 4),
    "16 bits.tif": tiff(GREY_HW),
    "big-endian.tif": tiff(GREY_HW, big_endian=True),
    "deflated.tif": tiff(GREY_HW, compression="tiff_adobe_deflate"),
    "32 bits.tif": tiff(GREY_HW.astype(np.int32)),
    "floats.tif": tiff(GREY_HW.astype(np.float32)),
    "16 bits.npy": array_file(GREY_HW),
    "floats.npy": array_file(GREY_HW.astype(np.float64)),
}
COLOURS: dict[str, bytes] = {
    "16 bits.png": deep_png(VALUES_HWC, 2),
    "with opacity.png": deep_png(np.concatenate([VALUES_HWC, OPAQUE_HW1], axis=2), 6),
    "16 bits.npy": array_file(VALUES_HWC),
    "big-endian.npy": array_file(VALUES_HWC.astype(">u2")),
}


def in_8_bits(values: NDArray[Any], limits: Range = LIMITS) -> NDArray[np.uint8]:
    low, high = limits
    found = [round(255 * (min(max(int(v), low), high) - low) / (high - low)) for v in values.flat]
    whole: NDArray[np.uint8] = np.array(found, np.uint8).reshape(values.shape)
    return whole


def decoded(content: bytes, limits: Range | None = LIMITS, channels: int = 3) -> NDArray[np.uint8]:
    out = np.empty((1, 12, 10, channels), np.uint8)
    bad = decode_batch(
        [content],
        CentralCrop((12, 10), 1.0),
        out,
        "bilinear",
        decoder=own_decoder(),
        rendering=Rendering(range=limits),
    )
    assert bad == {}
    pixels_HWC: NDArray[np.uint8] = out[0]
    return pixels_HWC


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", GREY)
def test_grey_is_the_same_picture_in_8_bits_of_the_range(name: str, channels: int) -> None:
    plain = encode(Image.fromarray(in_8_bits(GREY_HW)), "PNG")
    found = decoded(GREY[name], channels=channels)
    np.testing.assert_array_equal(found, decoded(plain, channels=channels))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", COLOURS)
def test_colours_are_the_same_picture_in_8_bits_of_the_range(name: str, channels: int) -> None:
    """Pillow reads the upper 8 bits alone."""
    plain = encode(Image.fromarray(in_8_bits(VALUES_HWC)), "PNG")
    found = decoded(COLOURS[name], channels=channels)
    np.testing.assert_array_equal(found, decoded(plain, channels=channels))


def test_each_of_many_channels_is_mapped() -> None:
    bands_HWC = RANDOM.integers(0, 4096, (12, 10, 5)).astype(np.uint16)
    found = decoded(array_file(bands_HWC), channels=5)
    np.testing.assert_array_equal(found, in_8_bits(bands_HWC))


def test_images_of_8_bits_are_not_changed() -> None:
    for kind in ("PNG", "JPEG", "TIFF", "GIF"):
        content = encode(Image.fromarray(in_8_bits(VALUES_HWC)), kind)
        np.testing.assert_array_equal(decoded(content), decoded(content, None))


def test_hidden_colours_of_16_bits_do_not_show() -> None:
    hidden = np.concatenate([VALUES_HWC, 0 * OPAQUE_HW1], axis=2)
    assert len(np.unique(decoded(deep_png(hidden, 6)).reshape(-1, 3), axis=0)) == 1


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_transparent_pixels_show_the_background(kind: str) -> None:
    content = encode(Image.new("RGBA", (10, 12), (250, 0, 90, 0)), kind)
    shown = Rendering(background=(1, 2, 3))
    assert (np.asarray(reference_image(content, 3, shown)) == (1, 2, 3)).all()
    assert (np.asarray(reference_image(content, 1, shown)) == 2).all()
    assert (np.asarray(whole_image(content, shown)) == (1, 2, 3)).all()
    out = np.empty((1, 12, 10, 3), np.uint8)
    decoder, crop = own_decoder(), CentralCrop((12, 10), 1.0)
    decode_batch([content], crop, out, "bilinear", decoder=decoder, rendering=shown)
    assert (out == (1, 2, 3)).all()


def test_the_background_goes_from_the_recipe_to_predictions_and_exports(averaged: Path) -> None:
    classifier = load(averaged, overrides={"data.background": "[1, 2, 3]"})
    clear = Image.new("RGBA", (40, 40), (250, 0, 90, 0))
    content = encode(clear, "PNG")
    found = classifier.preprocess([clear, content, Image.new("RGB", (40, 40), (1, 2, 3))])
    assert found[0].equal(found[2]) and found[1].equal(found[2])
    about = describe(classifier)
    assert about.metadata()["background"] == "[1, 2, 3]"
    assert '"background": [1, 2, 3]' in page(about, b"", {"library": b"", "wasm": b""})
    assert pixels_in({"background": [1, 2, 3]}) == {"background": [1, 2, 3]}
    assert '"RGB", image.size, (1, 2, 3)' in card(about, "onnx", "m.onnx", Measured(0, 0, 0))


@pytest.mark.parametrize("kind", ["onnx", "pt2-photograph"])
def test_the_code_on_a_card_maps_grey_from_the_range(averaged: Path, kind: str) -> None:
    about = describe(load(averaged, overrides={"data.range": "[1000, 3000]"}))
    text = card(about, kind, "m", Measured(0, 0, 0))
    code = text[text.index("if image.mode") : text.index("if image.has_transparency_data")]
    for pixels in (GREY_HW, GREY_HW.astype(np.float32)):
        names: dict[str, Any] = {"image": Image.fromarray(pixels), "np": np, "Image": Image}
        exec(code, names)
        assert np.array_equal(np.asarray(names["image"]), in_8_bits(GREY_HW))


def test_a_report_shows_images_as_the_run_reads_them() -> None:
    keys = {"data.range": [1, 2], "data.exif": True, "data.background": [1, 2, 3], "optim.lr": 1}
    run_of_keys = cast(Run, SimpleNamespace(recipe=keys))
    assert rendering_of(run_of_keys) == Rendering(True, (1, 2), (1, 2, 3))
    assert rendering_of(cast(Run, SimpleNamespace(recipe={}))) == Rendering()


def test_a_difference_in_the_middle_bits_is_kept() -> None:
    """The upper 8 of 16 bits are the same for both."""
    dark, bright = (deep_png(np.full((12, 10), level, np.uint16), 0) for level in (2050, 2290))
    assert np.array_equal(decoded(dark, None), decoded(bright, None))
    assert (decoded(bright, (2048, 2303)) - decoded(dark, (2048, 2303)) == 240).all()


def test_halves_go_to_the_even_number_and_what_is_no_number_is_black() -> None:
    values = np.array([1.0, 3.0, 5.0, -7.0, 600.0, np.nan, np.inf, -np.inf])
    assert mapped(values, (0, 510)).tolist() == [0, 2, 2, 0, 255, 0, 255, 0]


def test_a_range_ascends_and_auto_is_measured_before_images_are_read() -> None:
    with pytest.raises(ValueError, match="lower value first"):
        DataConfig(range=(3, 3))
    with raises("recipe.range-not-measured"):
        str(DataConfig(range="auto").rendering)


# --- measured ---

Picture = Callable[[NDArray[np.uint16]], bytes]


def make_data(folder: Path, picture: Picture, *, count: int = 20) -> Path:
    """Two classes that differ in the middle bits of 16 alone; with validation images."""
    random = np.random.default_rng(1)
    for split in ("train", "val"):
        for number in range(count):
            label = number % 2
            pixels_HW = random.integers(1024, 1056, (16, 16)) + 16 * label
            path = folder / split / "ab"[label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(pixels_HW.astype(np.uint16)))
    return folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("deep"), lambda pixels: deep_png(pixels, 0))


def test_the_measured_range_holds_the_values(deep: Path, tmp_path: Path) -> None:
    found = measured(open_index(str(deep / "train")))
    assert found is not None
    assert (found.num_deep, found.num_looks) == (20, 20)
    assert list(found.limits) == [1024, 1071]
    plain = make_data(tmp_path, lambda pixels: encode(Image.fromarray(in_8_bits(pixels)), "PNG"))
    assert measured(open_index(str(plain / "train"))) is None


def test_one_value_alone_is_no_range(tmp_path: Path) -> None:
    data = make_data(tmp_path, lambda pixels: deep_png(0 * pixels + 7, 0))
    with raises("data.range-empty"):
        measured(open_index(str(data / "train")))


TINY = (*SHORT, "--model.name", "test_resnet", "--batch.size", "8", "--data.image_size", "32")


def train(folder: Path, data: Path, *keys: object) -> tuple[object, ...]:
    return ("train", "debug", "--data", data, "--run", folder, *TINY, "--json", *keys)


def test_training_without_a_range_is_refused_and_proposes_one(deep: Path, tmp_path: Path) -> None:
    error = refused(*train(tmp_path / "run", deep))
    check(error, "recipe.range-not-set", limits="[1024, 1071]")
    assert not (tmp_path / "run").exists()


def test_auto_needs_images_of_more_than_8_bits(tmp_path: Path) -> None:
    data = make_data(tmp_path, lambda pixels: encode(Image.fromarray(in_8_bits(pixels)), "PNG"))
    error = refused(*train(tmp_path / "run", data, "--data.range", "auto"))
    check(error, "recipe.range-without-depth")


def test_the_measured_range_stays_with_the_run(deep: Path, tmp_path: Path) -> None:
    """Evaluation, predictions and exports equal those of the pictures in 8 bits of the range."""
    out = tmp_path / "run"
    assert run(*train(out, deep, "--data.range", "auto")) == 0
    assert "[1024, 1071]" in (out / "metrics.jsonl").read_text().splitlines()[0]
    assert load_recipe(str(out / "recipe.toml")).data.range == (1024, 1071)
    assert run(*train(out, deep, "--data.range", "auto")) == 0  # the run goes on, or is complete
    classifier = load(out)
    file = next((deep / "val").glob("*/*"))
    pixels_HW = np.asarray(Image.open(file))
    plain = Image.fromarray(in_8_bits(pixels_HW, (1024, 1071)))
    stored, opened, expected = classifier.preprocess([file, Image.open(file), plain])
    assert stored.equal(opened) and stored.equal(expected)
    about = describe(classifier)
    assert about.metadata()["range"] == "[1024.0, 1071.0]"
    text = page(about, b"", {"library": b"", "wasm": b""})
    assert "[1024, 1071]" in text


def test_a_pack_refuses_to_cut_bits_and_keeps_files(deep: Path, tmp_path: Path) -> None:
    error = refused(
        "data", "pack", deep, tmp_path / "small", "--format", "webdataset", "--short", 8
    )
    check(error, "pack.more-than-8-bits")
    assert run("data", "pack", deep, tmp_path / "whole", "--format", "folder") == 0
    first = next((deep / "val" / "a").glob("*"))
    kept = {path.read_bytes() for path in (tmp_path / "whole" / "val").rglob("*.png")}
    assert first.read_bytes() in kept


def test_initial_weights_bring_their_range_and_old_runs_go_on_without_one() -> None:
    auto, unset = load_recipe("debug", {"data.range": "auto"}), load_recipe("debug")
    for config in (auto, unset):
        brought = with_pixels(config, InitialWeights("a run", pixels={"range": [1, 2]}))
        assert with_range(brought, None, is_new=True).data.range == (1, 2)
    depth = Depth("data", 3, 4, (5.0, 6.0))
    assert with_range(unset, depth, is_new=False).data.range is None
    assert with_range(auto, depth, is_new=False).data.range == (5, 6)
    with raises("recipe.range-not-set"):
        with_range(unset, depth, is_new=True)


def test_a_stream_has_no_sample_to_measure() -> None:
    join = {"data.order": "join", "data.samples": "100", "data.range": "auto"}
    with raises("recipe.keys-conflict", setting="data.range = 'auto'"):
        load_recipe("debug", join)
