"""Image files on their way into shards: what they are, and what may be done to them."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from tests.errors import raises
from tests.images import encode
from trainyard.data.decode.decode import BadImageError, image_orientation
from trainyard.data.decode.orientation import TAG
from trainyard.datasets.pack.recode import Recode, Repair, ShortSide, oddity, suffix_of


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Blobs of colour and noise."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 32 + 2, width // 32 + 2, 3), dtype=np.uint8)
    blobs = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    noisy = blobs + rng.normal(0, 10, (height, width, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def decoded(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def mean_difference(first: Image.Image, second: Image.Image) -> float:
    assert first.size == second.size
    assert first.mode == second.mode
    difference = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    return float(np.abs(difference).mean())


# --- what a file is ---


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("JPEG", ".jpg"),
        ("PNG", ".png"),
        ("WEBP", ".webp"),
        ("BMP", ".bmp"),
        ("TIFF", ".tif"),
        ("PPM", ".ppm"),
        ("GIF", ".gif"),
        ("AVIF", ".avif"),
        ("JPEG2000", ".jp2"),
    ],
)
def test_the_suffix_is_that_of_the_content(kind: str, suffix: str) -> None:
    assert suffix_of(encode(photograph(20, 10), kind)) == suffix
    assert suffix_of(encode(photograph(20, 10).convert("L"), "PPM")) == ".pgm"


@pytest.mark.parametrize("content", [b"", b"\xff\xd8", b"<html>", bytes(100)])
def test_what_is_no_image_is_odd(content: bytes) -> None:
    assert oddity(content, "n01440764/a.JPEG") == "not an image"
    assert suffix_of(content) == ".jpg"


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("progressive", [True, False])
def test_an_ordinary_jpeg_is_not_odd(mode: str, progressive: bool) -> None:
    content = encode(photograph(64, 48).convert(mode), "JPEG", progressive=progressive)
    assert oddity(content, "a.JPEG") is None


def test_a_cmyk_jpeg_is_odd_whatever_stands_before_its_size() -> None:
    image = photograph(64, 48).convert("CMYK")
    exif = Image.Exif()
    exif[270] = "x" * 50_000
    assert oddity(encode(image, "JPEG"), "a.JPEG") == "CMYK"
    assert oddity(encode(image, "JPEG", exif=exif), "a.JPEG") == "CMYK"


def test_a_jpeg_that_ends_before_its_size_is_left_to_the_decoder() -> None:
    content = encode(photograph(64, 48).convert("CMYK"), "JPEG")
    for length in range(3, 200):
        assert oddity(content[:length], "a.JPEG") in (None, "CMYK")
    assert oddity(b"\xff\xd8\xff\xe0\x00\x00" * 20, "a.JPEG") is None


def test_another_type_is_odd_under_the_name_of_a_jpeg_alone() -> None:
    content = encode(photograph(20, 10), "PNG")
    assert oddity(content, "n02105855/n02105855_2933.JPEG") == "PNG in disguise"
    assert oddity(content, "a.jpg") == "PNG in disguise"
    assert oddity(content, "a.png") is None
    assert oddity(content, "train.h5, byte 4096") is None


# --- the short side ---


@pytest.mark.parametrize(
    ("size", "expected"),
    [((500, 375), (341, 256)), ((375, 500), (256, 341)), ((2560, 256), (2560, 256))],
)
def test_the_short_side_gets_its_length(size: tuple[int, int], expected: tuple[int, int]) -> None:
    content = encode(photograph(*size), "PNG")
    result = ShortSide(256, 90)(content)
    assert decoded(result).size == expected
    assert (result == content) is (size == expected)


def test_a_scaled_photograph_keeps_its_orientation() -> None:
    exif = Image.Exif()
    exif[TAG] = 6
    content = encode(photograph(100, 64), "JPEG", exif=exif)
    assert image_orientation(ShortSide(32, 90)(content)) == 6


def test_scaling_is_antialiased() -> None:
    stripes = np.zeros((600, 600, 3), np.uint8)
    stripes[:, ::2] = 255  # finer than what 256 pixels can show: an even grey
    content = encode(Image.fromarray(stripes), "PNG")
    assert np.asarray(decoded(ShortSide(256, 95)(content)), np.float64).std() < 12


def test_quality_is_obeyed() -> None:
    content = encode(photograph(500, 375), "JPEG", quality=95)
    assert len(ShortSide(256, 95)(content)) > 1.5 * len(ShortSide(256, 70)(content))


# --- repair ---


def test_repair_makes_other_images_rgb_jpegs_and_leaves_the_rest() -> None:
    source = photograph(64, 48)
    for content in (encode(source, "PNG"), encode(source.convert("CMYK"), quality=100)):
        result = Repair()(content)
        assert oddity(result, "a.JPEG") is None
        assert mean_difference(decoded(result), decoded(content).convert("RGB")) < 3
        assert Repair()(result) is result


# --- all of them ---


@pytest.mark.parametrize("recode", [ShortSide(64, 90), Repair()])
@pytest.mark.parametrize("content", [b"", b"<html>", b"\x89PNG\r\n\x1a\n" + bytes(30)])
def test_a_damaged_image_is_said_to_be_one(recode: Recode, content: bytes) -> None:
    with pytest.raises(BadImageError):
        recode(content)


@pytest.mark.parametrize("recode", [ShortSide(64, 90), Repair()])
def test_the_same_bytes_give_the_same_bytes_in_any_process(recode: Recode) -> None:
    content = encode(photograph(100, 100), "PNG")
    assert pickle.loads(pickle.dumps(recode))(content) == recode(content)


def test_impossible_settings_are_refused() -> None:
    with raises("pack.quality-out-of-range", value=0):
        ShortSide(224, 0)
    with raises("pack.quality-out-of-range", value=101):
        Repair(101)
    with raises("pack.size-out-of-range", size=0):
        ShortSide(0, 90)
