"""`data.exif`: images are turned as Pillow's `exif_transpose` turns them."""

import io
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tests.images import encode
from trainyard.data._native import core, own_decoder
from trainyard.data.decode.crops import CentralCrop, Crops
from trainyard.data.decode.decode import decode_batch, native_orientations
from trainyard.data.loader.encoded_batch import JPEG, PIXELS, put_encoded, side_of, stretches
from trainyard.data.storage.encoded import in_memory

DECODERS = [None, *([own_decoder()] if core is not None else [])]
needs_extension = pytest.mark.skipif(core is None, reason="the extension is not built")


def picture(width: int = 61, height: int = 42) -> Image.Image:
    """No two of its eight turns are equal."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([4 * x, 5 * y, 255 * (x + 2 * y < 50)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


def tagged(orientation: int, kind: str = "JPEG", endian: str = "<", **options: Any) -> bytes:
    exif = Image.Exif()
    exif.endian = endian
    exif[0x0112] = orientation
    return encode(picture(), kind, exif=exif, **options)


def pillow(content: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")


def with_xmp(text: bytes) -> bytes:
    segment = b"http://ns.adobe.com/xap/1.0/\0" + text
    return b"\xff\xd8\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + tagged(9)[2:]


def decoded(
    contents: list[bytes], crops: Crops, height: int, width: int, decoder: "core.Decoder | None"
) -> NDArray[np.uint8]:
    out = np.empty((len(contents), height, width, 3), np.uint8)
    bad = decode_batch(contents, lambda _: crops, out, "bilinear", decoder=decoder, exif=True)
    assert bad == {}
    return out


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_pixel_is_where_pillow_puts_it(
    kind: str, orientation: int, decoder: "core.Decoder | None"
) -> None:
    """A wrong turn, a box of the image as stored, or a mirrored box shows other pixels."""
    content = tagged(orientation, kind, quality=95, subsampling=0)
    right = pillow(content)
    boxes = np.array([[0, 0, *right.size], [7, 3, 30, 40], [1, 2, 3, 4]], float)
    for box, flip in product(boxes, (False, True)):
        crops, (left, top, end, bottom) = Crops(box[None], np.array([flip])), box.astype(int)
        (found,) = decoded([content], crops, bottom - top, end - left, decoder)
        wanted = np.asarray(right)[top:bottom, left:end]
        wanted = wanted[:, ::-1] if flip else wanted
        # The extension rounds colours otherwise than libjpeg, by 1 at most; see test_decode.py.
        most = 0 if decoder is None or kind != "JPEG" else 1
        assert np.abs(found.astype(int) - wanted).max() <= most


@needs_extension
@pytest.mark.parametrize("orientation", range(2, 9))
def test_resized_crops_are_turned_ones_of_the_image_as_stored(orientation: int) -> None:
    """Turning after resizing must not move the box by a part of a pixel."""
    content = tagged(orientation, quality=95)
    decoder = own_decoder()
    upright = encode(pillow(content), "PNG")  # the same pixels, by another decoder
    crop = CentralCrop(24, 0.875)
    out = np.empty((2, 24, 24, 3), np.uint8)
    bad = decode_batch([content, upright], crop, out, "bilinear", decoder=decoder, exif=True)
    assert bad == {}
    assert np.abs(out[0].astype(int) - out[1]).mean() < 1.5


def test_images_as_stored_without_the_key() -> None:
    """Published accuracies are those of images as stored."""
    content = tagged(6, "PNG")
    out = np.empty((1, 42, 61, 3), np.uint8)
    whole = Crops(np.array([[0.0, 0.0, 61, 42]]), np.zeros(1, bool))
    assert decode_batch([content], lambda _: whole, out, "bilinear") == {}
    assert np.array_equal(out[0], np.asarray(picture()))


@needs_extension
def test_orientations_are_read_as_pillow_reads_them() -> None:
    """Of a wrong byte order, of XMP in place of EXIF, of nonsense and of a damaged header."""
    attribute, element = b'<x tiff:Orientation="6"/>', b"<tiff:Orientation>8</tiff:Orientation>"
    whole = [tagged(n, endian=endian) for n in range(10) for endian in "<>"]
    whole += [encode(picture()), with_xmp(attribute), encode(picture(), xmp=attribute)]
    whole += [encode(picture(), xmp=element), encode(picture(), "PNG"), tagged(3, progressive=True)]
    found = native_orientations(in_memory(whole), own_decoder())
    for content, orientation in zip(whole, found.tolist(), strict=True):
        with Image.open(io.BytesIO(content)) as image:
            wanted = image.getexif().get(0x0112, 1) if image.format == "JPEG" else 1
        assert orientation == (wanted if 1 <= wanted <= 8 else 1)
    assert found.tolist()[2:8] == [1, 1, 2, 2, 3, 3] and found.tolist()[-5:] == [1, 6, 8, 1, 3]
    content = tagged(6)
    for size in range(200):  # cut anywhere, with the end in memory that is not its own
        native_orientations(in_memory([content[:size]]), own_decoder())


@needs_extension
def test_packed_records_are_turned_as_their_jpegs() -> None:
    contents = [tagged(orientation, quality=95) for orientation in (1, 6)]
    records = [core.Decoder().pack(content) or b"" for content in contents]
    crops = Crops(np.array([[0.0, 0.0, 40, 40]] * 2), np.zeros(2, bool))
    jpegs, packed = (decoded(one, crops, 20, 20, own_decoder()) for one in (contents, records))
    assert np.array_equal(jpegs, packed) and not np.array_equal(jpegs[0], jpegs[1])


@needs_extension
def test_a_gpu_gets_turned_images_as_pixels() -> None:
    """A GPU's decoder knows no orientation."""
    contents = [tagged(1), tagged(6)]
    side = side_of(20_000, 24)
    out = np.zeros((2, side, side, 3), np.uint8)
    draws = CentralCrop(24, 1.0).draw(np.arange(2), np.zeros(2, np.int64))
    assert put_encoded(contents, draws, out, size=24, how="bilinear", exif=True) == {}
    entries, rest_BN = stretches(out)
    assert entries["kind"].tolist() == [JPEG, PIXELS]
    turned = rest_BN[1, : 24 * 24 * 3].reshape(24, 24, 3)
    whole = np.empty((1, 24, 24, 3), np.uint8)
    draws = draws[1:]
    decode_batch(contents[1:], draws, whole, "bilinear", decoder=own_decoder(), exif=True)
    assert np.array_equal(turned, whole[0])
