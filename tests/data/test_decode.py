"""Decoding against plain Pillow: every kind of image, every kind of damage."""

import io
import os
import resource
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import InterpolationMode, functional

from tests.images import deep_png, encode, png
from trainyard.data._native import core, own_decoder
from trainyard.data.decode import decode
from trainyard.data.decode.array_file import array_file
from trainyard.data.decode.crops import CentralCrop, Crops, Interpolation
from trainyard.data.decode.decode import BadImageError, decode_batch, reference_image, whole_image
from trainyard.data.decode.orientation import TAG, upright
from trainyard.data.decode.packed_record import pixels_of, record_of_pixels
from trainyard.data.decode.rendering import BACKGROUND, Rendering
from trainyard.data.storage.encoded import EncodedSpans
from trainyard.data.storage.source import LocalFile
from trainyard.datasets.pack.recode import Repair, ShortSide
from trainyard.datasets.pack.shards import PackOptions
from trainyard.datasets.pack.worker import storing

# As in the loader process: what Pillow finds odd about an image is no error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]

PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]
FLOWER = PHOTOGRAPHS[1]


def pillow(content: bytes) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(content))
    if image.mode == "I;16":  # which Pillow's own conversion makes white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def whole(flip: bool = False) -> Callable[[NDArray[np.int64]], Crops]:
    """The whole of each image."""

    def crop(sizes: NDArray[np.int64]) -> Crops:
        boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1).astype(float)
        return Crops(boxes, np.full(len(sizes), flip))

    return crop


def boxed(
    *boxes: tuple[float, float, float, float], flip: bool = False, resizes_first: bool = False
) -> Callable[..., Crops]:
    return lambda sizes: Crops(np.array(boxes), np.full(len(sizes), flip), resizes_first)


def decoded(content: bytes) -> NDArray[np.uint8]:
    """The whole image at its own size, so that nothing is resized."""
    width, height = Image.open(io.BytesIO(content)).size
    out = np.empty((1, height, width, 3), np.uint8)
    assert decode_batch([content], whole(), out, "bilinear") == {}
    return out.reshape(height, width, 3)


# --- every kind of image ---


def without_adobe_marker(jpeg: bytes) -> bytes:
    """Without the segment by which Pillow tells that CMYK is stored inverted."""
    start = jpeg.index(b"\xff\xee")
    return jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4]) :]


def with_sampling(jpeg: bytes, *factors: int) -> bytes:
    """A frame header with other sampling factors, two hex digits for each channel."""
    content, start = bytearray(jpeg), jpeg.index(b"\xff\xc0")
    for channel, factor in enumerate(factors):
        content[start + 11 + 3 * channel] = factor
    return bytes(content)


DEEP = Image.fromarray((np.arange(64 * 48).reshape(48, 64) * 21).astype(np.uint16))
KINDS = {
    "rgb.png": encode(FLOWER, "PNG"),
    "rgba.png": encode(FLOWER.convert("RGBA"), "PNG"),
    "palette.png": encode(FLOWER.quantize(64), "PNG"),
    "16 bit.png": encode(DEEP, "PNG"),
    "1 bit.png": encode(FLOWER.convert("1"), "PNG"),
    "grey.png": encode(FLOWER.convert("L"), "PNG"),
    "grey and alpha.png": encode(FLOWER.convert("LA"), "PNG"),
    "lossy.webp": encode(FLOWER, "WEBP", quality=80),
    "lossless.webp": encode(FLOWER.crop((0, 0, 70, 50)), "WEBP", lossless=True),
    "alpha.webp": encode(FLOWER.crop((0, 0, 70, 50)).convert("RGBA"), "WEBP"),
    "rgb.bmp": encode(FLOWER, "BMP"),
    "cmyk.jpg": encode(FLOWER.convert("CMYK"), "JPEG"),
    "cmyk without a marker.jpg": without_adobe_marker(encode(FLOWER.convert("CMYK"), "JPEG")),
    "odd subsampling.jpg": with_sampling(encode(FLOWER, "JPEG", subsampling="4:4:4"), 0x31),
    "grey with subsampling.jpg": with_sampling(encode(FLOWER.convert("L"), "JPEG"), 0x22),
    "rgb.ppm": encode(FLOWER, "PPM"),
    "rgb.tif": encode(FLOWER, "TIFF", compression="tiff_lzw"),
    "rgb stored as such.jpg": encode(FLOWER, "JPEG", keep_rgb=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_equals_pillow(name: str) -> None:
    np.testing.assert_array_equal(decoded(KINDS[name]), np.asarray(pillow(KINDS[name])))


# --- transparency ---


def layer(hidden: int, opacity: int) -> NDArray[np.uint8]:
    """uint8[8, 6, 4]: grey 200 on the left, and right of it grey `hidden` of an opacity."""
    pixels_HWC = np.full((8, 6, 4), (200, 200, 200, 255), np.uint8)
    pixels_HWC[:, 3:] = (hidden, hidden, hidden, opacity)
    return pixels_HWC


def _palette(pixels_HWC: NDArray[np.uint8], opacities: bytes | int) -> bytes:
    image = Image.fromarray((pixels_HWC[..., 0] != 200).astype(np.uint8), "P")
    image.putpalette([200] * 3 + [int(pixels_HWC[0, 5, 0])] * 3)
    return encode(image, "PNG", transparency=opacities)


def _rgba(kind: str, **options: Any) -> Callable[[NDArray[np.uint8]], bytes]:
    return lambda pixels_HWC: encode(Image.fromarray(pixels_HWC, "RGBA"), kind, **options)


LAYERS: dict[str, Callable[[NDArray[np.uint8]], bytes]] = {
    "rgba.png": _rgba("PNG"),
    "rgba.tif": _rgba("TIFF"),
    "rgba.webp": _rgba("WEBP", lossless=True, exact=True),
    "la.png": lambda pixels: encode(Image.fromarray(pixels[..., ::3].copy(), "LA"), "PNG"),
    "deep.png": lambda pixels: deep_png(pixels.astype(np.uint16) * 257, 6),
    "palette.png": lambda pixels: _palette(pixels, bytes([255, int(pixels[0, 5, 3])])),
}
# Formats in which a colour is hidden as a whole.
KEYED: dict[str, Callable[[NDArray[np.uint8]], bytes]] = {
    "palette.gif": lambda pixels: encode(Image.open(io.BytesIO(_palette(pixels, 1))), "GIF"),
    "key of palette.png": lambda pixels: _palette(pixels, 1),
    "key of grey.png": lambda pixels: encode(
        Image.fromarray(pixels[..., 0].copy()), "PNG", transparency=int(pixels[0, 5, 0])
    ),
    "key of rgb.png": lambda pixels: encode(
        Image.fromarray(pixels[..., :3].copy()), "PNG", transparency=(int(pixels[0, 5, 0]),) * 3
    ),
}


@pytest.mark.parametrize("name", LAYERS | KEYED)
def test_what_is_hidden_does_not_show(name: str) -> None:
    encoded = (LAYERS | KEYED)[name]
    for hidden in (0, 90, 255):
        content = encoded(layer(hidden, 0))
        found = decoded(content)
        assert (found[:, :3] == 200).all()
        assert (found[:, 3:] == BACKGROUND).all()
        luminance = np.asarray(reference_image(content, 1))
        assert np.array_equal(luminance, np.asarray(Image.fromarray(found).convert("L")))
        record = storing(PackOptions("packed", pixels=True))(content)
        assert np.array_equal(pixels_of(record), found)


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_half_hidden_lies_on_the_background(name: str) -> None:
    found = decoded(LAYERS[name](layer(255, 51)))
    expected = np.array(BACKGROUND) * 0.8 + 255 * 0.2
    np.testing.assert_allclose(found[:, 3:], np.broadcast_to(expected, (8, 3, 3)), atol=1)
    assert (found[:, :3] == 200).all()


# --- other numbers of channels ---


def luminance(content: bytes) -> Image.Image:
    """The Y of a JPEG in YCbCr, as libjpeg gives it, and Pillow's L of all other images."""
    image = Image.open(io.BytesIO(content))
    if image.format == "JPEG" and image.mode == "RGB":
        image.draft("L", None)
        return image
    return pillow(content).convert("L")


@pytest.mark.parametrize("name", KINDS)
def test_one_channel_is_luminance_resized(name: str) -> None:
    image = luminance(KINDS[name])
    assert image.mode == "L"
    out = np.empty((1, 31, 23, 1), np.uint8)
    assert decode_batch([KINDS[name]], whole(), out, "bilinear") == {}
    expected = image.resize((23, 31), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(out[0, ..., 0], np.asarray(expected))


NOISE_HWC = np.random.default_rng(0).integers(0, 256, (48, 64, 13), np.uint8)
MULTISPECTRAL = {
    "13 of .npy": (array_file(NOISE_HWC), NOISE_HWC),
    "2 of .npy in Fortran's order": (
        array_file(np.asfortranarray(NOISE_HWC[..., :2])),
        NOISE_HWC[..., :2],
    ),
    "4 of .png": (encode(Image.fromarray(NOISE_HWC[..., :4]), "PNG"), NOISE_HWC[..., :4]),
    "4 of .tif": (encode(Image.fromarray(NOISE_HWC[..., :4], "CMYK"), "TIFF"), NOISE_HWC[..., :4]),
}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("resizes_first", [False, True])
@pytest.mark.parametrize("name", MULTISPECTRAL)
def test_each_channel_is_cropped_and_resized_like_a_grey_image(
    name: str, resizes_first: bool, interpolation: Interpolation
) -> None:
    """Transparency, say, is a channel like the others: Pillow would multiply colours by it."""
    content, pixels_HWC = MULTISPECTRAL[name]
    channels = pixels_HWC.shape[2]
    crop = boxed((3.25, 7.5, 60.125, 41.75), flip=True, resizes_first=resizes_first)
    out, grey = np.empty((1, 24, 16, channels), np.uint8), np.empty((1, 24, 16, 1), np.uint8)
    decoder = own_decoder()
    assert decode_batch([content], crop, out, interpolation, decoder=decoder) == {}
    for channel in range(channels):
        alone = encode(Image.fromarray(pixels_HWC[..., channel]), "PNG")
        assert decode_batch([alone], crop, grey, interpolation) == {}
        np.testing.assert_array_equal(out[..., channel : channel + 1], grey)


def test_arrays_of_one_and_three_channels_are_pictures() -> None:
    for pixels in (NOISE_HWC[..., :3], NOISE_HWC[..., :1], NOISE_HWC[..., 0]):
        shown = Image.fromarray(pixels.squeeze())
        for channels in (1, 3):
            two = np.empty((2, 48, 64, channels), np.uint8)
            contents = [array_file(pixels), encode(shown, "PNG")]
            assert decode_batch(contents, whole(), two, "bilinear") == {}
            np.testing.assert_array_equal(two[0], two[1])


@pytest.mark.parametrize(
    ("content", "channels", "reason"),
    [
        (array_file(NOISE_HWC), 3, "it has 13 channels, and data.channels = 3"),
        (array_file(NOISE_HWC), 1, "it has 13 channels, and data.channels = 1"),
        (array_file(NOISE_HWC), 4, "it has 13 channels, and data.channels = 4"),
        (encode(FLOWER, "JPEG"), 4, "it has 3 channels, and data.channels = 4"),
        (encode(FLOWER.convert("L"), "PNG"), 2, "it has 1 channel, and data.channels = 2"),
        (array_file(NOISE_HWC)[:-1], 13, "39,935 bytes of pixels instead of 39,936"),
        (array_file(NOISE_HWC.astype(np.uint16)), 13, "an array of uint16: set data.range"),
        (array_file(NOISE_HWC[None]), 13, "an array of shape [1, 48, 64, 13]: store [height"),
        (b"\x93NUMPY", 13, "EOF"),
    ],
)
def test_an_image_of_other_channels_is_bad(content: bytes, channels: int, reason: str) -> None:
    out = np.full((1, 8, 8, channels), 77, np.uint8)
    bad = decode_batch([content], whole(), out, "bilinear", decoder=own_decoder())
    assert reason in bad[0]
    assert not out.any()


def test_pickled_objects_are_not_loaded() -> None:
    file, out = io.BytesIO(), np.empty((1, 8, 8, 2), np.uint8)
    np.save(file, np.array([Path("x")], object), allow_pickle=True)
    bad = decode_batch([file.getvalue()], whole(), out, "bilinear")
    assert "an array of object: store integers" in bad[0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_luminance_is_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[TAG] = orientation
    content = encode(FLOWER, "JPEG", exif=exif)
    out, plain = np.empty((2, 1, 40, 24, 1), np.uint8)
    for place, decoder in ((out, own_decoder()), (plain, None)):
        assert (
            decode_batch(
                [content],
                whole(),
                place,
                "bilinear",
                decoder=decoder,
                rendering=Rendering(exif=True),
            )
            == {}
        )
    expected = upright(luminance(content), orientation)
    resized = np.asarray(expected.resize((24, 40), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(plain[0, ..., 0], resized)
    assert np.abs(out.astype(int) - plain).max() <= 1


# --- more than 8 bits ---

RAMP_HW = np.linspace(0, 65535, 48 * 64).astype(np.uint16).reshape(48, 64)
RAMP_HWC = np.repeat(RAMP_HW[..., None], 3, axis=2)
FLOATS_HW = (RAMP_HW / 65535).astype(np.float32)


def png_of_size(width: int, height: int) -> bytes:
    return png(width, height, 8, 2, zlib.compress(bytes(1 << 16)))


OPAQUE_HW = np.full_like(RAMP_HW, 65535)
DEEP_KINDS = {
    "grey.png": deep_png(RAMP_HW, 0),
    "grey and alpha.png": deep_png(np.stack([RAMP_HW, OPAQUE_HW], axis=2), 4),
    "rgb.png": deep_png(RAMP_HWC, 2),
    "rgba.png": deep_png(np.concatenate([RAMP_HWC, OPAQUE_HW[..., None]], axis=2), 6),
    "grey.tif": encode(Image.fromarray(RAMP_HW), "TIFF"),
    "grey, big-endian.tif": encode(Image.fromarray(RAMP_HW), "TIFF", big_endian=True),
    "grey.pgm": b"P5 64 48 65535\n" + RAMP_HW.astype(">u2").tobytes(),
    "rgb.ppm": b"P6 64 48 65535\n" + RAMP_HWC.astype(">u2").tobytes(),
    "12 bits.pgm": b"P5 64 48 4095\n" + (RAMP_HW >> 4).astype(">u2").tobytes(),
    "floats.pfm": b"Pf\n64 48\n-1.0\n" + FLOATS_HW[::-1].astype("<f4").tobytes(),
    "floats.tif": encode(Image.fromarray(FLOATS_HW), "TIFF"),
}


@pytest.mark.parametrize("name", DEEP_KINDS)
def test_more_than_8_bits_are_scaled_to_8(name: str) -> None:
    found = decoded(DEEP_KINDS[name])
    assert np.abs(found.astype(int) - (RAMP_HWC >> 8)).max() <= 1
    assert (found.min(), found.max()) == (0, 255)


def test_what_is_encoded_anew_is_scaled_too() -> None:
    for recode in (Repair(), ShortSide(48, 100)):
        found = decoded(recode(DEEP_KINDS["grey.png"]))
        assert np.abs(found.astype(int).mean() - 127) < 2


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (RAMP_HW.astype(np.int32), "32-bit integers, of unknown range"),
        (255 * FLOATS_HW, "floats that are not all from 0 to 1"),
        (np.full((4, 4), np.nan, np.float32), "floats that are not all from 0 to 1"),
    ],
    ids=["integers", "floats to 255", "not a number"],
)
def test_pixels_of_an_unknown_range_are_bad(pixels: NDArray[Any], reason: str) -> None:
    out = np.empty((1, 4, 4, 3), np.uint8)
    bad = decode_batch([encode(Image.fromarray(pixels), "TIFF")], whole(), out, "bilinear")
    assert reason in bad[0]


# --- crop, resize, flip ---


FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
BOXES = [(0, 0, 640, 427), (100, 50, 324, 274), (10, 20, 30, 25), (600, 400, 640, 427)]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("format_name", ["JPEG", "PNG"])
@pytest.mark.parametrize("resizes_first", [False, True])
def test_crops_are_torchvisions_and_resizes_are_pillows(
    format_name: str, interpolation: Interpolation, flip: bool, resizes_first: bool
) -> None:
    """A box of fractions is cropped to whole pixels first; each image has a box of its own."""
    content = encode(FLOWER, format_name)
    image, how = pillow(content), FILTERS[interpolation]
    boxes = [*BOXES, (3.25, 7.5, 600.125, 420.75)]
    out = np.empty((len(boxes), 64, 80, 3), np.uint8)
    crop = boxed(*boxes, flip=flip, resizes_first=resizes_first)
    assert decode_batch([content] * len(boxes), crop, out, interpolation) == {}
    for pixels, box in zip(out, boxes, strict=True):
        left, top, right, bottom = box
        if resizes_first:
            expected = image.resize((80, 64), how, box=box)
        elif float(left).is_integer():
            size = (bottom - top, right - left)
            mode = InterpolationMode(interpolation)
            expected = functional.resized_crop(image, top, left, *size, [64, 80], mode)
        else:
            inside = (0.25, 0.5, 597.125, 413.75)
            expected = image.crop((3, 7, 601, 421)).resize((80, 64), how, box=inside)
        if flip:
            expected = functional.hflip(expected)
        np.testing.assert_array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize("decoder", [None, *([own_decoder()] if core is not None else [])])
def test_crop_is_told_the_stored_sizes(decoder: Any) -> None:
    told: list[list[int]] = []

    def crop(sizes: NDArray[np.int64]) -> Crops:
        told.extend(sizes.tolist())
        return whole()(sizes)

    contents = [encode(FLOWER.crop((0, 0, 30, 20)), "JPEG"), b"", KINDS["16 bit.png"]]
    out = np.empty((3, 4, 4, 3), np.uint8)
    bad = decode_batch(contents, crop, out, "bilinear", decoder=decoder)
    assert told == [[30, 20], [1, 1], [64, 48]]
    assert bad == {1: "the file is empty"}


def test_an_empty_slice() -> None:
    assert decode_batch([], whole(), np.empty((0, 4, 4, 3), np.uint8), "bilinear") == {}


# --- damage ---


@pytest.mark.parametrize(
    "format_name", ["JPEG", "progressive", "PNG", "WEBP", "TIFF", "GIF", "BMP"]
)
def test_random_damage_never_raises(format_name: str) -> None:
    generator = np.random.default_rng(7)
    options: dict[str, Any] = {"progressive": True} if format_name == "progressive" else {}
    kind = "JPEG" if options else format_name
    whole_file = encode(FLOWER.resize((48, 32)), kind, **options)
    damaged = [damage(whole_file, generator) for _ in range(1000)]
    out = np.full((len(damaged), 16, 16, 3), 77, np.uint8)
    bad = decode_batch(damaged, whole(), out, "bilinear")
    assert all(bad.values())
    assert not out[list(bad)].any()
    assert 0 < len(bad) < len(damaged)  # the damage is neither too small to see nor always fatal


def damage(content: bytes, generator: np.random.Generator) -> bytes:
    """Some bytes altered, a stretch cut out or doubled, or the end cut off."""
    broken = bytearray(content)
    kind = generator.integers(4)
    start, stop = sorted(generator.integers(2, len(broken), size=2))
    if kind == 0:
        for place in generator.integers(2, len(broken), size=generator.integers(1, 20)):
            broken[place] = generator.integers(256)
    elif kind == 1:
        del broken[start:stop]
    elif kind == 2:
        broken[stop:stop] = broken[start:stop]
    else:
        del broken[stop:]
    return bytes(broken)


def test_a_size_that_the_content_does_not_keep_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some Pillow plugins read the size in one place and the pixels in another."""
    monkeypatch.setattr(decode, "_size", lambda *_: (200, 200))
    out = np.full((1, 8, 8, 3), 77, np.uint8)
    content = encode(FLOWER.resize((32, 32)), "PNG")
    bad = decode_batch([content], boxed((150.0, 150.0, 190.0, 190.0)), out, "bilinear")
    assert "differ in size" in bad[0]
    assert not out.any()


def jpeg_of_size(width: int, height: int) -> bytes:
    content = bytearray(encode(FLOWER, "JPEG"))
    start = content.index(b"\xff\xc0")
    content[start + 5 : start + 9] = struct.pack(">HH", height, width)
    return bytes(content)


@pytest.mark.parametrize(
    "bomb",
    [png_of_size(60_000, 60_000), png_of_size(14_000, 14_000), jpeg_of_size(65_000, 65_000)],
    ids=["png", "png just too large", "jpeg"],
)
def test_a_bomb_is_refused_before_it_takes_memory(bomb: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contents = [bomb, jpeg_of_size(0, 10)]
    bad = decode_batch(contents, whole(), np.empty((2, 8, 8, 3), np.uint8), "bilinear")
    assert list(bad) == [0, 1]
    assert "data.max_pixels = 178956970" in bad[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_program_is_not_an_image() -> None:
    """EPS is PostScript: Pillow would hand it to Ghostscript, which runs it."""
    eps = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(eps, "EPS")
    with pytest.raises(BadImageError):
        reference_image(eps.getvalue())


# --- the extension in C, beside the libraries ---

needs_extension = pytest.mark.skipif(core is None, reason="needs the extension in C")
PATHS = core.paths if core is not None else ()


def both(
    contents: list[bytes], crop: Callable[..., Crops], interpolation: Interpolation, path: str
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """What the extension and what the libraries make of some images, all of them good."""
    shape = (len(contents), 64, 80, 3)
    ours, theirs = np.full(shape, 7, np.uint8), np.full(shape, 9, np.uint8)
    assert decode_batch(contents, crop, ours, interpolation, decoder=core.Decoder(path)) == {}
    assert decode_batch(contents, crop, theirs, interpolation) == {}
    return ours, theirs


def assert_alike(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> None:
    """As near as where chroma at half resolution meets the ends of the scale lets them be."""
    difference = np.abs(ours.astype(int) - theirs)
    assert np.median(difference) <= 1
    assert (difference > 4).mean() < 0.03
    assert difference.max() <= 32


@needs_extension
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("resizes_first", [False, True])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_the_extension_crops_and_resizes_like_the_libraries(
    subsampling: str, interpolation: Interpolation, flip: bool, resizes_first: bool, path: str
) -> None:
    content = encode(FLOWER, "JPEG", subsampling=subsampling, quality=90)
    crop = boxed(*BOXES, flip=flip, resizes_first=resizes_first)
    assert_alike(*both([content] * len(BOXES), crop, interpolation, path))


NOT_NATIVE = {
    name: content
    for name, content in KINDS.items()
    if not name.endswith(".jpg") or name.startswith("cmyk")
} | {"progressive.jpg": encode(FLOWER, "JPEG", progressive=True)}


@needs_extension
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("channels", "resizes_first"), [(1, True), (3, False), (3, True)])
@pytest.mark.parametrize("name", NOT_NATIVE)
def test_pixels_that_pillow_decodes_are_resized_as_packed_ones(
    name: str, resizes_first: bool, channels: int, path: str
) -> None:
    image = reference_image(NOT_NATIVE[name], channels)
    record = record_of_pixels(np.asarray(image))
    right, bottom = image.size
    crop = boxed(*[(1.5, 0.0, right, bottom - 1.25)] * 2, flip=True, resizes_first=resizes_first)
    out = np.empty((2, 31, 23, channels), np.uint8)
    contents = [NOT_NATIVE[name], record]
    assert decode_batch(contents, crop, out, "bilinear", decoder=core.Decoder(path)) == {}
    np.testing.assert_array_equal(out[0], out[1])
    assert decode_batch(contents, crop, out, "bilinear") == {}
    np.testing.assert_array_equal(out[0], out[1])


@needs_extension
@pytest.mark.parametrize("path", PATHS)
def test_the_extension_resizes_every_kind_like_pillow(path: str) -> None:
    assert_alike(*both([*KINDS.values(), *NOT_NATIVE.values()], whole(), "bilinear", path))


LARGE = Image.new("RGB", (20, 10), "red")


@pytest.mark.parametrize("decoder", [None, own_decoder()], ids=["libraries", "extension"])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    "content",
    [encode(LARGE, "JPEG"), encode(LARGE, "PNG"), array_file(np.asarray(LARGE))],
    ids=["jpeg", "png", "npy"],
)
def test_an_image_beyond_the_limit_is_bad(content: bytes, turns: bool, decoder: Any) -> None:
    """Baseline JPEGs too, which the extension decodes without asking anyone."""
    out = np.empty((1, 8, 8, 3), np.uint8)
    for limit, is_bad in ((199, True), (200, False)):
        rendering = Rendering(turns, max_pixels=limit)
        crop = CentralCrop(8, 1.0)
        bad = decode_batch([content], crop, out, "bilinear", decoder=decoder, rendering=rendering)
        assert (0 in bad) == is_bad
        assert not is_bad or "data.max_pixels = 199" in bad[0]
    with pytest.raises(BadImageError, match=r"data\.max_pixels = 199"):
        whole_image(content, Rendering(max_pixels=199))


def test_a_higher_limit_is_also_that_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    monkeypatch.setattr(decode, "MAX_PIXELS", 100)
    out, content = np.zeros((1, 8, 8, 3), np.uint8), encode(LARGE, "PNG")
    bad = decode_batch([content], whole(), out, "bilinear", rendering=Rendering(max_pixels=100))
    assert "data.max_pixels = 100" in bad[0]
    rendering = Rendering(max_pixels=200)
    assert decode_batch([content], whole(), out, "bilinear", rendering=rendering) == {}
    assert (out == (255, 0, 0)).all()


@needs_extension
@pytest.mark.slow
def test_the_extension_decodes_a_jpeg_above_the_usual_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pillow takes 8 times its memory and 6 times its time for a photograph of 20,000 x 10,000."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    shade = Image.linear_gradient("L").resize((18_000, 10_000), Image.Resampling.NEAREST)
    content, out = encode(shade, "JPEG"), np.empty((1, 32, 32, 3), np.uint8)
    crop, decoder = CentralCrop(32, 1.0), own_decoder()
    bad = decode_batch([content], crop, out, "bilinear", decoder=decoder)
    assert "data.max_pixels" in bad[0]
    monkeypatch.setattr(decode, "_images", None)  # what Pillow would decode
    rendering = Rendering(max_pixels=180_000_000)
    bad = decode_batch([content], crop, out, "bilinear", decoder=decoder, rendering=rendering)
    assert bad == {}
    expected = np.linspace(0, 255, 65)[1::2].round()
    assert np.abs(out[0, :, 16, 0] - expected).max() <= 1


@needs_extension
@pytest.mark.parametrize("bomb", [jpeg_of_size(65_000, 65_000), jpeg_of_size(0, 10)])
def test_the_extension_refuses_what_the_libraries_refuse(bomb: bytes) -> None:
    out, other = np.full((2, 2, 8, 8, 3), 7, np.uint8)
    good = encode(FLOWER, "JPEG")
    bad = decode_batch([bomb, good], whole(), out, "bilinear", decoder=own_decoder())
    assert bad == decode_batch([bomb, good], whole(), other, "bilinear")
    assert not out[0].any()
    assert out[1].any()


@needs_extension
@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 3}], ids=str)
def test_random_damage_with_the_extension(options: dict[str, Any]) -> None:
    """What it cannot decode the libraries judge; what it can it may find good where they do not."""
    generator = np.random.default_rng(8)
    whole_file = encode(FLOWER.resize((96, 64)), "JPEG", **options)
    damaged = [damage(whole_file, generator) for _ in range(1000)]
    out, other = np.full((2, len(damaged), 16, 16, 3), 77, np.uint8)
    bad = decode_batch(damaged, whole(), out, "bilinear", decoder=own_decoder())
    known = decode_batch(damaged, whole(), other, "bilinear")
    assert all(bad.values())
    assert not out[list(bad)].any()
    assert bad.items() <= known.items()


@needs_extension
def test_images_inside_larger_buffers() -> None:
    contents = [encode(FLOWER, "JPEG"), KINDS["rgb.png"], encode(PHOTOGRAPHS[0], "JPEG")]
    joined = b"xyz" + b"".join(contents) + b"more"
    lengths = np.array([len(content) for content in contents])
    offsets = 3 + np.cumsum(lengths) - lengths
    stored = EncodedSpans([b"", joined], np.ones(3, np.int64), offsets, lengths)
    out, other = np.empty((2, 3, 32, 32, 3), np.uint8)
    for decoder in (None, own_decoder()):
        assert decode_batch(stored, whole(), out, "bilinear", decoder=decoder) == {}
        assert decode_batch(contents, whole(), other, "bilinear", decoder=decoder) == {}
        np.testing.assert_array_equal(out, other)


@pytest.mark.parametrize("decoder", [None, own_decoder()], ids=["libraries", "extension"])
@pytest.mark.parametrize("crop", [CentralCrop(32, 0.9), lambda sizes: CentralCrop(32, 0.9)(sizes)])
def test_images_in_open_files(
    tmp_path: Path, decoder: "core.Decoder | None", crop: Callable[[NDArray[np.int64]], Crops]
) -> None:
    """As from memory; of a file that is cut short then, the images behind are bad."""
    contents = [encode(FLOWER, "JPEG"), KINDS["rgb.png"], encode(PHOTOGRAPHS[0], "JPEG")]
    (tmp_path / "shard").write_bytes(b"xyz" + b"".join(contents))
    file = LocalFile(str(tmp_path / "shard"))
    lengths = np.array([len(content) for content in contents])
    offsets = 3 + np.cumsum(lengths) - lengths
    stored = EncodedSpans([file], np.zeros(3, np.int64), offsets, lengths)
    out, expected = np.empty((2, 3, 32, 32, 3), np.uint8)
    assert decode_batch(contents, crop, expected, "bilinear", decoder=decoder) == {}
    assert decode_batch(stored, crop, out, "bilinear", decoder=decoder) == {}
    np.testing.assert_array_equal(out, expected)
    os.truncate(file.name, int(offsets[2]) + 1000)
    bad = decode_batch(stored, crop, out, "bilinear", decoder=decoder)
    assert bad == {2: f"{file.name} is truncated or has changed since it was indexed"}
    np.testing.assert_array_equal(out[:2], expected[:2])
    assert not out[2].any()


@needs_extension
def test_each_thread_has_a_decoder_of_its_own() -> None:
    contents, out = [encode(FLOWER, "JPEG")] * 20, np.empty((8, 20, 32, 32, 3), np.uint8)

    def work(number: int) -> object:
        decode_batch(contents, whole(), out[number], "bilinear", decoder=own_decoder())
        return own_decoder()

    with ThreadPoolExecutor(4) as pool:
        assert len({id(decoder) for decoder in pool.map(work, range(8))}) <= 4
    assert (out == out[0, 0]).all()


@needs_extension
@pytest.mark.parametrize("kind", ["coefficients", "pixels"])
def test_packed_records(kind: str) -> None:
    jpeg = encode(FLOWER, "JPEG", subsampling="4:2:0")
    decoder = own_decoder()
    assert decoder is not None
    packed = decoder.pack(jpeg)
    record = packed if kind == "coefficients" else record_of_pixels(np.asarray(pillow(jpeg)))
    assert record is not None
    np.testing.assert_array_equal(np.asarray(reference_image(record)), np.asarray(pillow(jpeg)))
    assert_alike(*both([record], boxed((30, 40, 340, 300)), "bilinear", PATHS[0]))
    out = np.empty((1, 8, 8, 3), np.uint8)
    assert 0 in decode_batch([record[:900]], whole(), out, "bilinear", decoder=decoder)
    assert 0 in decode_batch([record[:900]], whole(), out, "bilinear")
