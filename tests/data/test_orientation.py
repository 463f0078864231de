"""`data.exif`: images are turned as Pillow's `exif_transpose` turns them."""

import io
import struct
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tests.images import encode
from trainyard.data._native import core, own_decoder
from trainyard.data.decode.crops import CentralCrop, Crops
from trainyard.data.decode.decode import decode_batch, image_orientation
from trainyard.data.decode.orientation import TAG
from trainyard.data.decode.packed_record import pixels_of
from trainyard.data.decode.rendering import Rendering
from trainyard.data.loader.encoded_batch import JPEG, PIXELS, put_encoded, side_of, stretches
from trainyard.datasets.pack.worker import SampleEncoder

TURNED = Rendering(exif=True)
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
    bad = decode_batch(
        contents, lambda _: crops, out, "bilinear", decoder=decoder, rendering=TURNED
    )
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
    bad = decode_batch([content, upright], crop, out, "bilinear", decoder=decoder, rendering=TURNED)
    assert bad == {}
    assert np.abs(out[0].astype(int) - out[1]).mean() < 1.5


def test_images_as_stored_without_the_key() -> None:
    """Published accuracies are those of images as stored."""
    content = tagged(6, "PNG")
    out = np.empty((1, 42, 61, 3), np.uint8)
    whole = Crops(np.array([[0.0, 0.0, 61, 42]]), np.zeros(1, bool))
    assert decode_batch([content], lambda _: whole, out, "bilinear") == {}
    assert np.array_equal(out[0], np.asarray(picture()))


def with_exif(*segments: bytes) -> bytes:
    """A JPEG with these EXIF segments before all others."""
    content = encode(picture())
    bodies = [b"Exif\0\0" + segment for segment in segments]
    app1 = b"".join(b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body for body in bodies)
    return content[:2] + app1 + content[2:]


def directory(*entries: tuple[int, int, int, bytes]) -> bytes:
    """A TIFF of one directory; an entry is a tag, a type, a count and four bytes."""
    packed = b"".join(struct.pack("<HHI4s", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


SIX = struct.pack("<HH", 6, 0)
ODD = {
    "plain": with_exif(directory((TAG, 3, 1, SIX))),
    "a second header": with_exif(b"Exif\0\0" + directory((TAG, 3, 1, SIX))),
    "two values": with_exif(directory((TAG, 3, 2, SIX))),
    **{f"type {kind}": with_exif(directory((TAG, kind, 1, SIX))) for kind in range(14)},
    "an entry outside": with_exif(directory((0x10F, 2, 400, b"\x0f\x27\0\0"), (TAG, 3, 1, SIX))),
    "two segments": with_exif(directory(), directory((TAG, 3, 1, SIX))),
    "no TIFF": with_exif(b"II"),
    "a fill byte": with_exif(directory((TAG, 3, 1, SIX))).replace(b"\xff\xe1", b"\xff\xff\xe1", 1),
    "after another segment": tagged(6),
    "progressive": tagged(6, progressive=True),
    "big-endian": tagged(6, endian=">"),
    "nonsense": tagged(9),
    "XMP attribute": encode(picture(), xmp=b'<x tiff:Orientation="6"/>'),
    "XMP element": encode(picture(), xmp=b"<tiff:Orientation>8</tiff:Orientation>"),
    "XMP beside nonsense": with_xmp(b'<x tiff:Orientation="6"/>'),
    "none": encode(picture()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", ODD)
def test_odd_exif_is_read_as_pillow_reads_it(name: str, decoder: "core.Decoder | None") -> None:
    """A parser of our own took other types, counts and segments for an orientation."""
    try:
        wanted = pillow(ODD[name]).size
    except Exception:  # Pillow fails on the EXIF alone
        wanted = picture().size
    sizes = []

    def crop(found: NDArray[np.int64]) -> Crops:
        sizes.append(tuple(found[0].tolist()))
        return Crops(np.array([[0.0, 0, *found[0]]]), np.zeros(1, bool))

    out = np.empty((1, 8, 8, 3), np.uint8)
    assert decode_batch([ODD[name]], crop, out, "bilinear", decoder=decoder, rendering=TURNED) == {}
    assert sizes == [wanted]


def test_a_header_cut_anywhere_has_an_orientation() -> None:
    content = tagged(6)
    found = [image_orientation(content[:size]) for size in range(len(content))]
    assert set(found) == {1, 6}


@needs_extension
def test_packed_records_are_turned_as_their_jpegs() -> None:
    contents = [tagged(orientation, quality=95) for orientation in (1, 6)]
    records = [core.Decoder().pack(content) or b"" for content in contents]
    crops = Crops(np.array([[0.0, 0.0, 40, 40]] * 2), np.zeros(2, bool))
    jpegs, packed = (decoded(one, crops, 20, 20, own_decoder()) for one in (contents, records))
    assert np.array_equal(jpegs, packed) and not np.array_equal(jpegs[0], jpegs[1])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_packed_pixels_are_upright(kind: str) -> None:
    """They have no EXIF, so photographs lay on their side in every run."""
    record = SampleEncoder(None, packs=True, pixels=True)(tagged(6, kind))
    assert np.array_equal(pixels_of(record), np.asarray(pillow(tagged(6, kind))))


def test_packed_grey_pixels_are_upright_and_grey() -> None:
    exif = Image.Exif()
    exif[TAG] = 6
    content = encode(picture().convert("L"), exif=exif)
    record = SampleEncoder(None, packs=True, pixels=True)(content)
    assert np.array_equal(pixels_of(record), np.asarray(pillow(content))[..., 0])


@needs_extension
def test_a_gpu_gets_turned_images_as_pixels() -> None:
    """A GPU's decoder knows no orientation."""
    contents = [tagged(1), tagged(6)]
    side = side_of(20_000, 24)
    out = np.zeros((2, side, side, 3), np.uint8)
    draws = CentralCrop(24, 1.0).draw(np.arange(2), np.zeros(2, np.int64))
    assert put_encoded(contents, draws, out, size=24, how="bilinear", rendering=TURNED) == {}
    entries, rest_BN = stretches(out)
    assert entries["kind"].tolist() == [JPEG, PIXELS]
    small = Rendering(max_pixels=9)
    assert [
        *put_encoded(contents, draws, out.copy(), size=24, how="bilinear", rendering=small)
    ] == [0, 1]
    turned = rest_BN[1, : 24 * 24 * 3].reshape(24, 24, 3)
    whole = np.empty((1, 24, 24, 3), np.uint8)
    draws = draws[1:]
    decode_batch(contents[1:], draws, whole, "bilinear", decoder=own_decoder(), rendering=TURNED)
    assert np.array_equal(turned, whole[0])
