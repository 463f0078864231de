"""Each kind of image file holds one picture: training, `predict` and the code of cards see it."""

import base64
import io
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageCms

from tests.data.tars import write_files
from tests.images import P3, deep_png, encode, icc, png
from trainyard.classifier import load
from trainyard.data._native import own_decoder
from trainyard.data.decode.crops import CentralCrop, Fit, FittedCrop, RandomResizedCrop
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.rendering import BACKGROUND, Range, Rendering
from trainyard.data.index.build import open_index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.sampler.plan import OnePassPlan
from trainyard.export.card import card
from trainyard.export.check import Measured
from trainyard.export.description import describe

Pixels = NDArray[np.uint8]
SIZE = HEIGHT, WIDTH = 24, 40
_Y, _X = np.mgrid[:HEIGHT, :WIDTH]
RGB: Pixels = np.stack([6 * _X, 10 * _Y, 255 - 3 * _X - 2 * _Y], axis=2).astype(np.uint8)
PICTURE = Image.fromarray(RGB)
GREY: Pixels = np.asarray(PICTURE.convert("L"))
OPAQUE, HALF = np.full_like(GREY, 255), np.full_like(GREY, 128)
WHOLE: Range = (0, 65535)


class Kind(NamedTuple):
    content: bytes
    truth: Pixels = RGB
    most: int = 0
    """Largest difference that the format leaves."""
    range: Range | None = None


def colours(grey_HW: NDArray[Any]) -> Pixels:
    return np.repeat(grey_HW[..., None], 3, axis=2).astype(np.uint8)


def rgb_of(image: Image.Image) -> Pixels:
    return np.asarray(image.convert("RGB"))


def tiff(pixels: NDArray[Any], photometric: str | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, photometric=photometric, metadata=None, **options)
    return file.getvalue()


def laid(opacity: float, truth: Pixels = RGB) -> Pixels:
    """The picture of an opacity on the background."""
    return np.rint(opacity * truth + (1 - opacity) * np.array(BACKGROUND)).astype(np.uint8)


def hidden(levels_HW: NDArray[Any], key: int, truth: Pixels) -> Pixels:
    """The picture with the background where a level is transparent."""
    return np.where((levels_HW == key)[..., None], np.array(BACKGROUND, np.uint8), truth)


# --- JPEG ---


def stored(text: str) -> bytes:
    """A JPEG that Pillow does not write: `PICTURE` by libjpeg-turbo's cjpeg -quality 90."""
    return zlib.decompress(base64.b64decode(text))


FOUR_ONE_ONE = """
eNr7f+P/AwYBLzdPNwZGRgYGRiBk+H+bwZmBmYkJhICABYhYOVhZWVhYudjZ2Th4uHh4uLm4uXn5hAR4+QT5uLkFxAQE
hUVERUV5+MUlxEQkhERERUCGMDID9bCwcrKycorwcvOKkAz+H2AQ5GCQYNBgZnRkYBJkZBZk/H8EyAc6lZkBCbAyMDFz
AGUkBRgYWRlQAAubsuFCoJQYIyPIg0iAg40TKC4ryMDIzIoiw8SqyMymbOTI8v8WAw8zI9BiZkEGe4bHU3xO9bNfNNay
kXc5veJDrbDR4oPd5Va5qr4dT5f0L0oLqXBxnLd5mau/m/7c00LpbRwzS+X4QcJ2nTMDH/xSS3VvvXvn5ZaZp5MsM5Vf
zJwqJyiQvublxOCL7Y7ngcq3IEw/AzH90Ld3Jbd8nm+U2TLxC1CSo8P4WsmJlS8OLXjaaXz4/00ACKxnAw==
"""
FOUR_FOUR_ZERO = """
eNr7f+P/AwYBLzdPNwZGRgYGRiBk+H+bwZmBmYkJhICABYhYOVhZWVhYudjZ2Th4uHh4uLm4uXn5hAR4+QT5uLkFxAQE
hUVERUV5+MUlxEQkhERERUCGMDID9bCwcrKycorwcvOKkAz+H2AQ5GCQYNBgZhRiYBJkZBZk/H8EyGcEAQYEYGdgZeYA
ykgKMDCyMqAAFjZlw4VAKXF0PQxs7BycQAkZQQagP1GkWBSVmNkMWYP+32LgYWYEWswsyGDP8PGUWqp78ym1WPe25/np
bztWSevrCC1KC6mwARGcQKEuI7BQ6hWIEFcxUEgLUxUOoWKXMys+tPf+4vHt01X4VzG5Vtho8SGWnS8MjQID6m0893XO
DHzIFP1F4pfGCvt5KvdBqht9gaq7tPifd5pfNNayUfCua5Z3lWT/fGT+/5sAey5piQ==
"""
ARITHMETIC = """
eNr7f+P/AwYBLzdPNwZGRgYGRiBk+H+bwZmBmYkJhICABYhYOVhZWVhYudjZ2Th4uHh4uLm4uXn5hAR4+QT5uLkFxAQE
hUVERUV5+MUlxEQkhERERUCGMDID9bCwcrKycorwcvOKkAz+n2QQ5GCQYNBgZhRkYBJkZBZk/H+GgYtBQICVUUCQ9f8t
Bh5mRqAEsyCDPcN/hucLxXpn912fyRgj4pwU57GW78/8uZdqHVRPelizcRs63rkwT7ppbVblWfNdJirCOqyup1in/Tnv
m5jh4hF8YzevqID94lO3tRMEg5qzHnT4JeY4Hg4xCNz254RPn/i+xa5revnvcRuJ37HdreHwY2cF719h/qa57j8VytR4
1gjtimQOvHCyaGPcBduFFQvV1nC+Uwj9Ydu0291mb0iAZMpKDint9aKO+xT+3wQAhzdf6A==
"""
CMYK = PICTURE.convert("CMYK")


def ycck() -> bytes:
    """As Photoshop stores CMYK: inverted, and its colours as those of YCbCr."""
    ink = np.asarray(CMYK)
    luminance = np.asarray(Image.fromarray(ink[..., :3]).convert("YCbCr"))
    planes = Image.fromarray(np.dstack([255 - luminance, ink[..., 3]]), "CMYK")
    content = encode(planes, "JPEG", quality=95, subsampling=0)
    at = content.index(b"Adobe") + 11
    return content[:at] + b"\2" + content[at + 1 :]


JPEGS: dict[str, Kind] = {
    "4:4:4": Kind(encode(PICTURE, "JPEG", quality=95, subsampling=0), most=4),
    "4:2:2": Kind(encode(PICTURE, "JPEG", quality=95, subsampling=1), most=6),
    "4:2:0": Kind(encode(PICTURE, "JPEG", quality=95, subsampling=2), most=10),
    "4:1:1": Kind(stored(FOUR_ONE_ONE), most=16),
    "4:4:0": Kind(stored(FOUR_FOUR_ZERO), most=16),
    "arithmetic": Kind(stored(ARITHMETIC), most=10),
    "progressive": Kind(encode(PICTURE, "JPEG", quality=95, progressive=True), most=10),
    "restarts": Kind(encode(PICTURE, "JPEG", quality=95, restart_marker_blocks=1), most=10),
    "stored as RGB": Kind(encode(PICTURE, "JPEG", quality=95, keep_rgb=True), most=2),
    "grey": Kind(encode(PICTURE.convert("L"), "JPEG", quality=95), colours(GREY), 2),
    "CMYK": Kind(encode(CMYK, "JPEG", quality=95), most=2),
    "YCCK": Kind(ycck(), most=4),
    "Display P3": Kind(encode(PICTURE, "JPEG", quality=95, icc_profile=icc(P3)), most=10),
    "with bytes behind": Kind(encode(PICTURE, "JPEG", quality=95) + bytes(9000), most=10),
    "two pictures": Kind(
        encode(PICTURE, "MPO", quality=95, save_all=True, append_images=[CMYK.convert("RGB")]),
        most=10,
    ),
}

# --- PNG ---

PALETTE = PICTURE.quantize(16)


def with_chunk(content: bytes, name: bytes, data: bytes) -> bytes:
    """A PNG with a chunk before its pixels."""
    checksum = struct.pack(">I", zlib.crc32(name + data))
    return content[:33] + struct.pack(">I", len(data)) + name + data + checksum + content[33:]


def interlaced(pixels: NDArray[Any], colour_type: int) -> bytes:
    """A PNG in Adam7's seven passes."""
    rows, depth = b"", 8 * pixels.itemsize
    for x, y, across, down in (
        *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
        *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
    ):
        part = pixels[y::down, x::across].astype(f">u{pixels.itemsize}")
        rows += b"".join(b"\0" + row.tobytes() for row in part)
    content = png(WIDTH, HEIGHT, depth, colour_type, zlib.compress(rows))
    head = content[12:28] + b"\1"
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


def shallow(levels_HW: NDArray[Any], bits: int, key: int | None = None) -> bytes:
    """A grey PNG of 1, 2 or 4 bits, whose level `key` is transparent."""
    each = np.unpackbits(levels_HW.astype(np.uint8)[..., None], axis=2)[..., 8 - bits :]
    rows = np.packbits(each.reshape(HEIGHT, -1), axis=1)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    content = png(WIDTH, HEIGHT, bits, 0, data)
    return content if key is None else with_chunk(content, b"tRNS", struct.pack(">H", key))


def levels(bits: int) -> NDArray[Any]:
    return GREY >> (8 - bits)


def shown(bits: int) -> Pixels:
    return colours(levels(bits) * (255 // (2**bits - 1)))


def keyed(pixels: NDArray[np.uint16], colour_type: int, *key: int) -> bytes:
    return with_chunk(deep_png(pixels, colour_type), b"tRNS", struct.pack(f">{len(key)}H", *key))


DEEP, DEEP_GREY = RGB.astype(np.uint16) * 257, GREY.astype(np.uint16) * 257
KEY = int(GREY[3, 4])
THREE = colours(GREY).astype(np.uint16) * 257
PNGS: dict[str, Kind] = {
    "RGB": Kind(encode(PICTURE, "PNG")),
    "interlaced": Kind(interlaced(RGB, 2)),
    "interlaced of 16 bits": Kind(interlaced(DEEP, 2), range=WHOLE),
    **{
        f"grey of {bits} bits": Kind(shallow(levels(bits), bits), shown(bits)) for bits in (1, 2, 4)
    },
    **{
        f"grey of {bits} bits with a key": Kind(
            shallow(levels(bits), bits, 1), hidden(levels(bits), 1, shown(bits))
        )
        for bits in (1, 2, 4)
    },
    "palette": Kind(encode(PALETTE, "PNG"), rgb_of(PALETTE)),
    "palette of 2 bits": Kind(encode(PICTURE.quantize(4), "PNG"), rgb_of(PICTURE.quantize(4))),
    "palette with a key": Kind(
        encode(PALETTE, "PNG", transparency=3),
        hidden(np.asarray(PALETTE), 3, rgb_of(PALETTE)),
    ),
    "palette with opacities": Kind(
        encode(PALETTE, "PNG", transparency=bytes([128] * 16)), laid(128 / 255, rgb_of(PALETTE)), 1
    ),
    "RGBA": Kind(encode(Image.fromarray(np.dstack([RGB, HALF])), "PNG"), laid(128 / 255), 1),
    "LA": Kind(
        encode(Image.fromarray(np.dstack([GREY, HALF])), "PNG"),
        laid(128 / 255, colours(GREY)),
        1,
    ),
    "RGB with a key": Kind(
        encode(Image.fromarray(colours(GREY)), "PNG", transparency=(KEY,) * 3),
        hidden(GREY, KEY, colours(GREY)),
    ),
    "grey of 16 bits": Kind(deep_png(DEEP_GREY, 0), colours(GREY), range=WHOLE),
    "grey of 16 bits with a key": Kind(
        keyed(DEEP_GREY, 0, KEY * 257), hidden(GREY, KEY, colours(GREY)), range=WHOLE
    ),
    "RGB of 16 bits with a key": Kind(
        keyed(THREE, 2, *(KEY * 257,) * 3), hidden(GREY, KEY, colours(GREY)), range=WHOLE
    ),
    "the key of 16 bits without a range": Kind(
        keyed(THREE, 2, *(KEY * 257,) * 3), hidden(GREY, KEY, colours(GREY))
    ),
    "gamma": Kind(with_chunk(encode(PICTURE, "PNG"), b"gAMA", struct.pack(">I", 100_000))),
    "Display P3": Kind(encode(PICTURE, "PNG", icc_profile=icc(P3))),
    "animation": Kind(encode(PICTURE, "PNG", save_all=True, append_images=[CMYK.convert("RGB")])),
}

# --- TIFF ---

LAB = ImageCms.profileToProfile(
    PICTURE, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
)
assert LAB is not None
ONE_BIT = PICTURE.convert("1")
IN_RANGE: dict[str, tuple[NDArray[Any], Range]] = {
    "12 bits in 16": ((DEEP_GREY // 257 * 16), (0, 4080)),
    "signed 8 bits": ((GREY.astype(np.int16) - 128).astype(np.int8), (-128, 127)),
    "signed 16 bits": (GREY.astype(np.int16) - 100, (-100, 155)),
    "signed 32 bits": (GREY.astype(np.int32) * 1000 - 500, (-500, 254_500)),
    "unsigned 32 bits": (GREY.astype(np.uint32) * 16_000_000, (0, 255 * 16_000_000)),
    "floats": (GREY.astype(np.float32), (0, 255)),
}
DEEP_LAYOUTS: dict[str, dict[str, Any]] = {
    "strips": {"rowsperstrip": 5},
    "tiles": {"tile": (16, 16)},
    "deflated tiles": {"tile": (16, 16), "compression": "zlib", "predictor": True},
    "big-endian": {"byteorder": ">"},
    "BigTIFF": {"bigtiff": True},
}
TIFFS: dict[str, Kind] = {
    **{f"RGB in {name}": Kind(tiff(RGB, "rgb", **how)) for name, how in DEEP_LAYOUTS.items()},
    **{
        f"RGB of 16 bits in {name}": Kind(tiff(DEEP, "rgb", **how), range=WHOLE)
        for name, how in DEEP_LAYOUTS.items()
    },
    **{
        f"grey of {name}": Kind(tiff(values), colours(GREY), range=limits)
        for name, (values, limits) in IN_RANGE.items()
    },
    "planes": Kind(tiff(RGB.transpose(2, 0, 1), "rgb", planarconfig="separate")),
    **{
        f"compressed by {how}": Kind(encode(PICTURE, "TIFF", compression=how))
        for how in ("tiff_lzw", "packbits", "tiff_adobe_deflate")
    },
    "compressed by jpeg": Kind(encode(PICTURE, "TIFF", compression="jpeg", quality=95), most=6),
    "one bit by group4": Kind(encode(ONE_BIT, "TIFF", compression="group4"), rgb_of(ONE_BIT)),
    "white is 0": Kind(tiff(255 - GREY, "miniswhite"), colours(GREY)),
    "white is 0 in 16 bits": Kind(tiff(65535 - DEEP_GREY, "miniswhite"), colours(GREY)),
    "white is 0 in 16 bits of a range": Kind(
        tiff(65535 - DEEP_GREY, "miniswhite"), colours(GREY), range=WHOLE
    ),
    "alpha": Kind(
        tiff(np.dstack([RGB, HALF]), "rgb", extrasamples=["unassalpha"]), laid(128 / 255), 1
    ),
    "alpha that is multiplied": Kind(
        tiff(np.dstack([RGB // 255 * 128, HALF]), "rgb", extrasamples=["assocalpha"]),
        laid(128 / 255, RGB // 255 * 255),
        3,
    ),
    "another band": Kind(tiff(np.dstack([RGB, HALF]), "rgb", extrasamples=["unspecified"])),
    "CMYK": Kind(encode(CMYK, "TIFF")),
    "LAB": Kind(encode(LAB, "TIFF"), rgb_of(LAB)),
    "pages": Kind(encode(PICTURE, "TIFF", save_all=True, append_images=[CMYK.convert("RGB")])),
}

# --- others ---


def bmp(rows: NDArray[Any], bits: int, *, kind: int = 0, masks: Sequence[int] = ()) -> bytes:
    """A BMP of rows from the top, with a header of version 4 where it has four masks."""
    lines = [row.tobytes() for row in rows]
    data = b"".join(line + bytes(-len(line) % 4) for line in lines)
    size = 108 if len(masks) == 4 else 40
    head = struct.pack("<IiiHHIIiiII", size, WIDTH, -HEIGHT, 1, bits, kind, len(data), 0, 0, 0, 0)
    head = (head + struct.pack(f"<{len(masks)}I", *masks)).ljust(size, b"\0")
    return (
        b"BM" + struct.pack("<IHHI", 14 + len(head) + len(data), 0, 0, 14 + len(head)) + head + data
    )


BGR = RGB[..., ::-1]
_RED, _GREEN, _BLUE = (RGB[..., each].astype(np.uint16) for each in range(3))
FRAMES: dict[str, Any] = {"save_all": True, "append_images": [CMYK.convert("RGB")]}
OTHERS: dict[str, Kind] = {
    "BMP of 24 bits": Kind(encode(PICTURE, "BMP")),
    "BMP from the top": Kind(bmp(BGR, 24)),
    "BMP of 32 bits without opacity": Kind(bmp(np.dstack([BGR, 0 * HALF]), 32)),
    "BMP of 32 bits with opacity": Kind(
        bmp(np.dstack([BGR, HALF]), 32, kind=3, masks=(0xFF0000, 0xFF00, 0xFF, 0xFF000000)),
        laid(128 / 255),
        1,
    ),
    "BMP of 565 bits": Kind(
        bmp(
            (_RED >> 3 << 11) | (_GREEN >> 2 << 5) | (_BLUE >> 3),
            16,
            kind=3,
            masks=(0xF800, 0x7E0, 0x1F),
        ),
        most=8,
    ),
    "BMP of a palette": Kind(encode(PALETTE, "BMP"), rgb_of(PALETTE)),
    "BMP of one bit": Kind(encode(ONE_BIT, "BMP"), rgb_of(ONE_BIT)),
    "GIF": Kind(encode(PALETTE, "GIF"), rgb_of(PALETTE)),
    "GIF with a key": Kind(
        encode(PALETTE, "GIF", transparency=3), hidden(np.asarray(PALETTE), 3, rgb_of(PALETTE))
    ),
    "GIF of frames": Kind(
        encode(
            PALETTE,
            "GIF",
            save_all=True,
            append_images=[PALETTE.transpose(Image.Transpose.ROTATE_180)],
        ),
        rgb_of(PALETTE),
    ),
    "WebP without loss": Kind(encode(PICTURE, "WEBP", lossless=True)),
    "WebP with loss": Kind(encode(PICTURE, "WEBP", quality=95), most=12),
    "WebP with opacity": Kind(
        encode(Image.fromarray(np.dstack([RGB, HALF])), "WEBP", lossless=True), laid(128 / 255), 1
    ),
    "WebP of frames": Kind(encode(PICTURE, "WEBP", lossless=True, **FRAMES)),
    "PPM": Kind(encode(PICTURE, "PPM")),
    "PPM of 101 levels": Kind(
        b"P6 40 24 100\n" + np.rint(RGB * (100 / 255)).astype(np.uint8).tobytes(), most=2
    ),
    "PPM in text": Kind(b"P3 40 24 255\n" + b" ".join(str(one).encode() for one in RGB.flat)),
    "PBM": Kind(encode(ONE_BIT, "PPM"), rgb_of(ONE_BIT)),
    "JPEG 2000": Kind(encode(PICTURE, "JPEG2000")),
    "JPEG 2000 of 16 bits": Kind(
        encode(Image.fromarray(DEEP_GREY), "JPEG2000"), colours(GREY), range=WHOLE
    ),
}
FOLDERS = {"JPEG": JPEGS, "PNG": PNGS, "TIFF": TIFFS, "": OTHERS}
KINDS = {
    f"{folder} {name}".strip(): kind
    for folder, kinds in FOLDERS.items()
    for name, kind in kinds.items()
}

LONG = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))


def cut(kind: str, **options: Any) -> bytes:
    content = encode(LONG, kind, **options)
    return content[: 3 * len(content) // 4]


TRUNCATED = "truncated|Truncated|decod|unrecognized|broken|not enough|cannot"
BAD: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "the file is empty"),
    "a text": (b"404 not found", "not an image"),
    "a JPEG that is cut": (cut("JPEG"), TRUNCATED),
    "a progressive JPEG that is cut": (cut("JPEG", progressive=True), TRUNCATED),
    "a PNG that is cut": (cut("PNG"), TRUNCATED),
    "a TIFF that is cut": (cut("TIFF"), TRUNCATED),
    "a deflated TIFF that is cut": (cut("TIFF", compression="tiff_adobe_deflate"), ""),
    "a GIF that is cut": (cut("GIF"), TRUNCATED),
    "a WebP that is cut": (cut("WEBP"), ""),
    "a BMP that is cut": (cut("BMP"), TRUNCATED),
    "13 bands": (
        tiff(np.zeros((8, 8, 13), np.uint8), "minisblack", planarconfig="contig"),
        "13 channels",
    ),
    "doubles": (tiff(GREY.astype(np.float64)), "an array of float64: set data.range"),
    "planes of 16 bits": (
        tiff(DEEP.transpose(2, 0, 1), "rgb", planarconfig="separate"),
        "a TIFF in RGB .* store it as a PNG",
    ),
    "signed without a range": (tiff(GREY.astype(np.int8)), "a TIFF in L .* set data.range"),
}


def seen(content: bytes, limits: Range | None, *, native: bool) -> Pixels | str:
    """The pixels that training sees of a whole image, or why it is bad."""
    out = np.empty((1, *SIZE, 3), np.uint8)
    bad = decode_batch(
        [content],
        FittedCrop(SIZE, 1.0),
        out,
        "bilinear",
        decoder=own_decoder() if native else None,
        rendering=Rendering(range=limits),
    )
    pixels_HWC: Pixels = out[0]
    return bad[0] if bad else pixels_HWC


def difference(found: NDArray[Any], truth: Pixels) -> int:
    return int(np.abs(found.astype(int) - truth).max())


@pytest.mark.parametrize("native", [True, False], ids=["extension", "libraries"])
@pytest.mark.parametrize("name", KINDS)
def test_training_sees_the_picture_of_every_kind(name: str, native: bool) -> None:
    content, truth, most, limits = KINDS[name]
    found = seen(content, limits, native=native)
    assert not isinstance(found, str), found
    assert difference(found, truth) <= most


@pytest.mark.parametrize("native", [True, False], ids=["extension", "libraries"])
@pytest.mark.parametrize("name", BAD)
def test_what_has_no_picture_is_bad_and_says_why(name: str, native: bool) -> None:
    content, reason = BAD[name]
    found = seen(content, None, native=native)
    assert isinstance(found, str) and found
    assert re.search(reason, found), found


# --- by the loader, by `predict` and by the code of cards ---

# Pillow alone does not tell: a transparent level of 16 bits, or of less than 8 once it is loaded,
# and a white of 0.
NOT_ON_CARDS = {
    "PNG grey of 2 bits with a key",
    "PNG grey of 4 bits with a key",
    "PNG grey of 16 bits with a key",
    "TIFF white is 0 in 16 bits",
    "TIFF white is 0 in 16 bits of a range",
}
OF_ONE_RANGE = {name: kind for name, kind in KINDS.items() if kind.range in (None, WHOLE)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All kinds in two classes, by name; their suffixes are those of other formats."""
    folder = tmp_path_factory.mktemp("kinds")
    contents = {name: kind.content for name, kind in OF_ONE_RANGE.items()}
    contents |= {
        name: content
        for name, (content, reason) in BAD.items()
        if content and "data.range" not in reason
    }
    paths = {
        name: folder / ("ant", "bee")[number % 2] / f"{number}.{('jpg', 'png', 'tif')[number % 3]}"
        for number, name in enumerate(contents)
    }
    write_files(folder, {str(path): contents[name] for name, path in paths.items()})
    return paths


def test_a_loader_gives_each_picture_and_leaves_out_the_bad_ones(files: dict[str, Path]) -> None:
    index = open_index(str(next(iter(files.values())).parents[1]))
    spec = LoaderSpec(
        plan=OnePassPlan(len(index), 16),
        crop=FittedCrop(SIZE, 1.0),
        image_size=SIZE,
        interpolation="bilinear",
        rendering=Rendering(range=WHOLE),
        stop=-(-len(index) // 16),
        threads=2,
    )
    found = dict[str, tuple[Pixels, float]]()
    with Loader(index, spec) as loader:
        for batch in loader:
            for position, sample in enumerate(batch.ids.tolist()):
                pixels_HWC = batch.images_BHWC[position].copy()
                found[index.locate(sample)[0]] = pixels_HWC, float(batch.weights[position])
    assert found.keys() == {str(path) for path in files.values()}
    for name, path in files.items():
        pixels_HWC, weight = found[str(path)]
        assert weight == (name in KINDS), name
        if name in KINDS:
            assert difference(pixels_HWC, KINDS[name].truth) <= KINDS[name].most + 1, name


def test_predictions_see_the_picture_of_each_kind(files: dict[str, Path], averaged: Path) -> None:
    """A file as training does; an opened image, of which Pillow tells less, is as near."""
    size = {"data.eval_size": str([*SIZE]), "data.fit": "squash", "data.crop_pct": "1"}
    classifier = load(averaged, overrides=size | {"data.range": str([*WHOLE])})
    mean, std = (np.array(of) for of in (classifier.config.data.mean, classifier.config.data.std))
    for name, (content, truth, most, _) in OF_ONE_RANGE.items():
        for given in (files[name], Image.open(io.BytesIO(content))):
            image_BCHW = classifier.preprocess([given]).cpu().numpy()
            pixels_HWC = np.rint(255 * (image_BCHW[0].transpose(1, 2, 0) * std + mean))
            assert difference(pixels_HWC, truth) <= most + 1, name


def test_the_code_of_a_card_sees_the_picture_of_each_kind(averaged: Path) -> None:
    about = describe(load(averaged))
    text = card(about, "onnx-photograph", "m.onnx", Measured(0, 0, 0))
    code = text[text.index("image = Image.open(") : text.index("probabilities, names =")]
    for name, kind in OF_ONE_RANGE.items():
        known: dict[str, Any] = {"np": np, "Image": Image, "file": io.BytesIO(kind.content)}
        exec(code.replace('"image.png"', "file"), known)
        assert (difference(known["photograph"], kind.truth) <= kind.most + 1) == (
            name not in NOT_ON_CARDS
        ), name


# --- odd sizes ---


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (20_000, 1), (2, 3)])
def test_points_and_lines_are_resized_as_by_the_libraries(
    size: tuple[int, int], kind: str, fit: Fit
) -> None:
    width, height = size
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    content = encode(Image.fromarray(pixels_HWC), kind)
    pad = (1, 2, 3) if fit == "pad" else None
    central = CentralCrop(32, 0.875) if fit == "crop" else FittedCrop(32, 1.0, pad)
    drawn = RandomResizedCrop(0, (0.1, 1), (0.75, 1.33), 0.5, fit=fit, pad=pad)
    for crop in (central, drawn.draw(np.arange(1), np.zeros(1, np.int64))):
        ours, theirs = np.empty((2, 1, 32, 32, 3), np.uint8)
        assert decode_batch([content], crop, ours, "bilinear", decoder=own_decoder()) == {}
        assert decode_batch([content], crop, theirs, "bilinear") == {}
        assert difference(ours, theirs) <= 1
