"""Reading PNGs: the pixels of Pillow, bit for bit, and every other file is left to Pillow."""

import io
import itertools
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from sklearn.datasets import load_sample_images

from tests.data.native.decoder import PATHS, Pixels, decode
from trainyard.data._native import core

pytestmark = pytest.mark.skipif(core is None, reason="the extension is not built")
PHOTOGRAPH = load_sample_images().images[0]
SAMPLES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
KINDS = {1: 0, 2: 4, 3: 2, 4: 6}  # colour type by the number of samples


def decoded(content: bytes) -> tuple[Pixels, int]:
    """The whole image at its own size, and its status: of `sizes`, or else of `decode`."""
    sizes, zero = np.zeros((1, 2), np.int64), np.zeros(1, np.int64)
    status = np.zeros(1, np.uint8)
    core.Decoder().sizes([content], zero, zero, np.array([len(content)]), sizes, status)
    if status[0] != core.OK:
        return np.zeros((0, 0, 3), np.uint8), int(status[0])
    width, height = sizes[0].tolist()
    return decode(content, (0, 0, width, height), (height, width), PATHS[0])


def by_pillow(content: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def assert_decodes(content: bytes) -> None:
    pixels, status = decoded(content)
    assert status == core.OK
    np.testing.assert_array_equal(pixels, by_pillow(content))


def png(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def by_hand(
    size: tuple[int, int], samples: int, stream: bytes, *, parts: int = 1, interlaced: int = 0
) -> bytes:
    """A file of a zlib stream of filtered rows, in so many IDAT chunks."""
    header = struct.pack(">IIBBBBB", *size, 8, KINDS[samples], 0, 0, interlaced)
    cuts = [len(stream) * part // parts for part in range(parts + 1)]
    data = b"".join(chunk(b"IDAT", stream[a:b]) for a, b in itertools.pairwise(cuts))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def rows(size: tuple[int, int], samples: int) -> bytes:
    """Rows of any bytes, with every filter in turn."""
    rng = np.random.default_rng(samples)
    any_bytes = rng.integers(0, 256, (size[1], 1 + size[0] * samples), np.uint8)
    any_bytes[:, 0] = np.arange(size[1]) % 5
    return any_bytes.tobytes()


def streams(raw: bytes) -> Iterator[bytes]:
    """Stored, fixed and own codes, with and without repeats, in small windows, in many blocks."""
    for level, window, memory, strategy in itertools.product((0, 1, 9), (9, 15), (1, 9), range(5)):
        press = zlib.compressobj(level, zlib.DEFLATED, window, memory, strategy)
        half = press.compress(raw[: len(raw) // 2]) + press.flush(zlib.Z_FULL_FLUSH)
        yield half + press.compress(raw[len(raw) // 2 :]) + press.flush()


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (28, 28), (300, 7), (451, 300)])
@pytest.mark.parametrize("mode", [*SAMPLES, "P"])
def test_files_of_every_mode(mode: str, size: tuple[int, int]) -> None:
    image = Image.fromarray(PHOTOGRAPH).resize(size)
    shown = image.quantize(256) if mode == "P" else image.convert(mode)
    bits = {"bits": 8} if mode == "P" else {}
    for level in (0, 1, 9):
        assert_decodes(png(shown, compress_level=level, **bits))


@pytest.mark.parametrize("mode", [*SAMPLES, "P"])
def test_luma_of_grey_is_grey_and_that_of_colours_is_left_to_pillow(mode: str) -> None:
    image = Image.fromarray(PHOTOGRAPH[:30, :20])
    content = png(image.quantize(256) if mode == "P" else image.convert(mode))
    pixels, status = decode(content, (0, 0, 20, 30), (30, 20), PATHS[0], channels=1)
    if mode in ("L", "LA"):
        assert status == core.OK
        np.testing.assert_array_equal(pixels[..., 0], np.asarray(image.convert("L")))
    else:
        assert status == core.NOT_OURS


@pytest.mark.parametrize("samples", KINDS)
def test_every_filter_and_every_kind_of_block(samples: int) -> None:
    size = (23, 19)
    repeated = (rows(size, samples)[: 1 + size[0] * samples] * size[1])[:]
    for raw in (rows(size, samples), repeated):
        for number, stream in enumerate(streams(raw)):
            assert_decodes(by_hand(size, samples, stream, parts=1 + number % 4))


def unusual() -> dict[str, bytes]:
    image = Image.fromarray(PHOTOGRAPH[:40, :50])
    turned, described = Image.Exif(), PngImagePlugin.PngInfo()
    turned[0x0112] = 6
    described.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    raw = rows((8, 8), 3)
    return {
        "16 bits": png(Image.fromarray(np.full((9, 9), 40_000, np.uint16))),
        "1 bit": png(image.convert("1")),
        "few colours": png(image.quantize(4)),
        "a transparent colour": png(image.quantize(256), transparency=3, bits=8),
        "EXIF": png(image, exif=turned),
        "XMP": png(image, pnginfo=described),
        "animated": png(image, save_all=True, append_images=[image.rotate(9)]),
        "interlaced": by_hand((8, 8), 3, zlib.compress(raw), interlaced=1),
    }


@pytest.mark.parametrize("name", unusual())
def test_unusual_files_are_left_to_pillow(name: str) -> None:
    assert decoded(unusual()[name])[1] == core.NOT_OURS


def test_harmless_text_is_no_hindrance() -> None:
    described = PngImagePlugin.PngInfo()
    described.add_text("Software", "a program")
    assert_decodes(png(Image.fromarray(PHOTOGRAPH[:40, :50]), pnginfo=described))


def wrong() -> dict[str, bytes]:
    size, samples = (8, 8), 3
    raw = rows(size, samples)
    whole = by_hand(size, samples, zlib.compress(raw))
    huge = by_hand((60_000, 2_000), samples, zlib.compress(raw))
    return {
        "a row too few": by_hand(size, samples, zlib.compress(raw[:-25])),
        "a row too many": by_hand(size, samples, zlib.compress(raw + raw[-25:])),
        "a filter that is none": by_hand(size, samples, zlib.compress(b"\x05" + raw[1:])),
        "another sum": by_hand(size, samples, zlib.compress(raw)[:-1] + b"\x00"),
        "no pixels": by_hand(size, samples, b""),
        "cut off": whole[:-20],
        "another header": whole[:19] + b"\x09" + whole[20:],
        "more pixels than its bytes can make": huge,
    }


@pytest.mark.parametrize("name", wrong())
def test_wrong_files_are_left_to_pillow(name: str) -> None:
    assert decoded(wrong()[name])[1] == core.DAMAGED


def test_a_damaged_file_is_refused_or_has_pillows_pixels() -> None:
    """Any byte of small files changed or cut off: nothing that Pillow refuses is taken."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(PHOTOGRAPH[:16, :16])
    files = [png(image.convert(mode)) for mode in SAMPLES]
    files += [
        png(image.quantize(256), bits=8),
        by_hand((8, 8), 1, zlib.compress(rows((8, 8), 1), 0)),
    ]
    taken = 0
    for content in files:
        for place in range(8, len(content)):
            changed = bytearray(content)
            changed[place] ^= int(rng.integers(1, 256))
            for damaged in (bytes(changed), content[:place]):
                pixels, status = decoded(damaged)
                if status == core.OK:
                    taken += 1
                    np.testing.assert_array_equal(pixels, by_pillow(damaged))
    assert taken  # harmless changes: of check sums that Pillow does not read either
