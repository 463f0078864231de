"""Damaged and odd files of a data set: none ends in a traceback, and none is passed over."""

import gzip
import io
import json
import logging
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.command_line import Capture, run
from tests.data.looks import silent
from tests.data.tars import write_files
from tests.images import P3, deep_png, encode, icc, png
from trainyard.data.decode.array_file import array_file
from trainyard.data.decode.crops import CentralCrop
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.lost import Code, Look, look, remarks
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.storage.manifest import read_manifest
from trainyard.datasets.verify.verify import verify

GOOD = 4  # images of each class that are whole


def photo(number: int = 0) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(pixels).resize((64, 48), Image.Resampling.BICUBIC)


JPEG, PNG = encode(photo(), "JPEG"), encode(photo(), "PNG")
GIF, BMP, TIFF, WEBP, PPM = (
    encode(photo(), kind) for kind in ("GIF", "BMP", "TIFF", "WEBP", "PPM")
)


def without(marker: int) -> bytes:
    """The JPEG without its segments of a kind."""
    content = JPEG
    while (at := content.find(bytes([0xFF, marker]))) >= 0:
        content = (
            content[:at] + content[at + 2 + struct.unpack(">H", content[at + 2 : at + 4])[0] :]
        )
    return content


def with_frame(change: Callable[[bytearray], object]) -> bytes:
    """The JPEG with another frame header: precision, height, width, components."""
    content = bytearray(JPEG)
    at = content.index(b"\xff\xc0")
    frame = content[at + 4 : at + 19]
    change(frame)
    content[at + 4 : at + 19] = frame
    return bytes(content)


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(photo(), "JPEG", exif=exif)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


BAD = {
    "one-byte.jpg": b"\xff",
    "text.jpg": b"404 not found\n",
    "page.png": b"<!DOCTYPE html><html><body>Sign in</body></html>",
    "zeros.jpg": bytes(1000),
    "noise.png": np.random.default_rng(0).bytes(1000),
    "start.jpg": JPEG[:2],
    "header.jpg": JPEG[:100],
    "half.jpg": JPEG[: len(JPEG) // 2],
    "end.jpg": JPEG[:-40],
    "no-width.jpg": with_frame(lambda frame: frame.__setitem__(slice(3, 5), bytes(2))),
    "vast.jpg": with_frame(lambda frame: frame.__setitem__(slice(1, 5), b"\xff\xf0\xff\xf0")),
    "12-bit.jpg": with_frame(lambda frame: frame.__setitem__(0, 12)),
    "one-component.jpg": with_frame(lambda frame: frame.__setitem__(5, 9)),
    "no-quantisation.jpg": without(0xDB),
    "lossless.jpg": JPEG.replace(b"\xff\xc0", b"\xff\xc3"),
    "noise-before.jpg": b"noise" + JPEG,
    "half.png": PNG[: len(PNG) // 2],
    "checksum.png": PNG[:60] + bytes([PNG[60] ^ 0xFF]) + PNG[61:],
    "bomb.png": png(60_000, 60_000, 8, 2, zlib.compress(bytes(10**6))),
    "no-width.png": png(0, 8, 8, 2, zlib.compress(bytes(100))),
    "no-pixels.png": png(8, 8, 8, 2, None),
    "short-pixels.png": png(64, 64, 8, 2, zlib.compress(bytes(100))),
    "no-zlib.png": png(8, 8, 8, 2, b"these are no pixels"),
    "half.gif": GIF[:40],
    "half.bmp": BMP[: len(BMP) // 2],
    "half.tif": TIFF[: len(TIFF) // 2],
    "half.webp": WEBP[: len(WEBP) // 2],
    "half.ppm": PPM[: len(PPM) // 2],
    "compressed.jpg": gzip.compress(JPEG),
    "drawing.png": b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>',
    "document.jpg": b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n",
    "postscript.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
}
ODD = {
    "cmyk.jpg": encode(photo(1).convert("CMYK"), "JPEG"),
    "png.jpg": encode(photo(2), "PNG"),
    "jpeg.png": encode(photo(3), "JPEG"),
    "gif.jpg": encode(photo(4), "GIF"),
    "16-bit.png": encode(Image.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30)), "PNG"),
    "float.tif": encode(Image.fromarray(np.ones((30, 30), np.float32)), "TIFF"),
    "tiny.png": encode(photo(5).resize((1, 1)), "PNG"),
    "turned.jpg": turned(),
}
LEFT_OUT = {
    "empty.jpg": b"",
    "photo.heix": JPEG,
    "raw.cr2": JPEG,
    "half.npy": npy(np.zeros((8, 8, 3), np.uint8))[:150],
    "pickled.npy": npy(np.array([{"a": 1}], dtype=object)),
    "flat.npy": npy(np.zeros(9, np.uint8)),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two classes with all of these files. Not to be written to."""
    folder = tmp_path_factory.mktemp("damaged") / "train"
    for number, (name, content) in enumerate((BAD | ODD | LEFT_OUT).items()):
        path = folder / ("ant", "bee")[number % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for number in range(2 * GOOD):
        photo(100 + number).save(folder / ("ant", "bee")[number % 2] / f"good-{number}.jpg")
    (folder / "ant" / "link.jpg").symlink_to("absent.jpg")
    return folder.parent


def test_verify_names_each(damaged: Path, capsys: Capture) -> None:
    assert run("data", "verify", damaged, "--deep", "--json") == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    found: dict[str, set[str]] = {}
    checks = json.loads(printed.out)["checks"]
    for check in checks:
        found[check["name"]] = {Path(row["file"]).name for row in check["found"]}
    assert found["images"] == BAD.keys()
    assert found["oddities"] | found["orientation"] >= ODD.keys()
    [left_out] = [check for check in checks if check["name"] == "left out"]
    assert left_out["count"] == len(LEFT_OUT) + 1  # and the link


@pytest.mark.parametrize("options", [(), ("--short", 24)])
def test_pack_leaves_nothing_out(
    damaged: Path, options: tuple[object, ...], tmp_path: Path, capsys: Capture
) -> None:
    """Training quarantines what is damaged. A pack that decodes reports it."""
    location, deep = tmp_path / "data", ("16-bit.png", "float.tif")
    shutil.copytree(damaged, location, symlinks=True, ignore=shutil.ignore_patterns(*deep))
    words = ("data", "pack", location, tmp_path / "out", "--format", "webdataset", "--processes", 1)
    assert run(*words, *options) == 0
    assert "Traceback" not in capsys.readouterr().err
    packed = open_index(find_splits(str(tmp_path / "out"))["train"])
    assert len(packed) == len(BAD) + len(ODD) - len(deep) + 2 * GOOD
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None
    odd = manifest.about["odd"]
    assert odd["not an image"]["count"] >= 10
    assert odd.get("cannot be decoded", {"count": 0})["count"] == (len(BAD) if options else 0)


# --- what images hold and training does not see: told, with the range that was found ---

Encoder = Callable[[NDArray[np.uint16]], bytes]


def _deep(kind: str, **options: Any) -> Encoder:
    return lambda pixels: encode(Image.fromarray(pixels), kind, **options)


def _rgb(pixels_HW: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return np.stack([pixels_HW] * 3, axis=2)


DEEP: dict[str, Encoder] = {
    "grey.png": _deep("PNG"),
    "grey.tif": _deep("TIFF"),
    "rgb.png": lambda pixels: deep_png(_rgb(pixels), 2),
    "grey.pgm": lambda pixels: b"P5 16 16 65535\n" + pixels.astype(">u2").tobytes(),
}


def ramp(top: int) -> NDArray[np.uint16]:
    """uint16[16, 16] from 0 to `top`."""
    return np.linspace(0, top, 256).reshape(16, 16).astype(np.uint16)


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("bits", [8, 10, 12, 16])
def test_the_range_of_16_bits(name: str, bits: int) -> None:
    kind = {"png": "PNG", "tif": "TIFF", "pgm": "PPM"}[name[-3:]]
    assert look(DEEP[name](ramp((1 << bits) - 1))) == Look(0, (1 << bits) - 1, True, 1, kind=kind)


def frames(kind: str, count: int) -> bytes:
    images = [Image.new("RGB", (16, 16), (9 * n, 200, 255)) for n in range(count)]
    return encode(images[0], kind, save_all=True, append_images=images[1:])


def clear(opacity: int) -> bytes:
    return encode(Image.new("RGBA", (9, 9), (250, 0, 0, opacity)), "PNG")


def in_gamma(gamma: float, *others: tuple[bytes, bytes]) -> bytes:
    """A PNG whose values are light to the power of `gamma`."""
    content = encode(photo(), "PNG")
    for name, data in ((b"gAMA", struct.pack(">I", round(100_000 * gamma))), *others):
        checksum = struct.pack(">I", zlib.crc32(name + data))
        chunk = struct.pack(">I", len(data)) + name + data + checksum
        content = content[:33] + chunk + content[33:]
    return content


OTHERS: dict[str, tuple[bytes, list[Code]]] = {
    "pages": (frames("TIFF", 3), ["frames"]),
    "an animation": (frames("GIF", 3), ["frames"]),
    "an animated PNG": (frames("PNG", 2), ["frames"]),
    "an animated WebP": (frames("WEBP", 2), ["frames"]),
    "one page": (frames("TIFF", 1), []),
    "pictures of a camera": (frames("MPO", 2), ["frames"]),
    "a mask of classes": (encode(Image.fromarray(ramp(9).astype(np.uint8)), "PNG"), ["dark"]),
    "an array": (array_file(np.full((4, 4, 5), 16, np.uint8)), ["dark"]),
    "transparent pixels": (
        encode(Image.new("RGBA", (9, 9), (250, 0, 0, 254)), "PNG"),
        ["transparent"],
    ),
    "an opaque fourth channel": (encode(Image.new("RGBA", (9, 9), (250, 0, 0, 255)), "PNG"), []),
    "Display P3": (encode(photo(), "JPEG", icc_profile=icc(P3)), ["profile"]),
    "Display P3 of a palette": (
        encode(photo().quantize(64), "PNG", icc_profile=icc(P3)),
        ["profile"],
    ),
    "the profile of sRGB": (encode(photo(), "WEBP", icc_profile=icc()), []),
    "a damaged profile": (encode(photo(), "PNG", icc_profile=bytes(200)), []),
    "light itself": (in_gamma(1), ["profile"]),
    "the gamma of sRGB": (in_gamma(1 / 2.2), []),
    "a gamma that sRGB overrules": (in_gamma(1, (b"sRGB", b"\0")), []),
    "a picture": (encode(Image.fromarray(ramp(255).astype(np.uint8)), "JPEG"), []),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_things_that_training_does_not_see(name: str) -> None:
    content, codes = OTHERS[name]
    assert [code for code, _ in look(content).remarks()] == codes


def data_of(folder: Path, *contents: bytes) -> str:
    files = {f"{n % 2}/{n}.png": content for n, content in enumerate(contents)}
    return write_files(folder, files)


def test_a_data_set_is_told_by_the_range_of_all_that_are_looked_at(tmp_path: Path) -> None:
    black, dark, bright = (
        encode(Image.fromarray(ramp(top).astype(np.uint8)), "PNG") for top in (9, 12, 250)
    )
    ((code, text),) = remarks(open_index(data_of(tmp_path / "dark", black, dark, b"none")))
    assert code == "dark"
    assert "2 of 2 " in text and " 12 " in text
    assert remarks(open_index(data_of(tmp_path / "some", black, bright))) == []
    several = [frames(kind, 2) for kind in ("TIFF", "GIF", "TIFF", "PNG", "WEBP", "MPO")]
    pages = open_index(data_of(tmp_path / "pages", *several, frames("TIFF", 1)))
    ((code, text),) = remarks(pages)
    assert code == "frames"
    assert "6 of 7 " in text and "(2 TIFF, 1 WEBP, 1 GIF, 1 PNG, 1 MPO)" in text


@pytest.mark.parametrize(("content", "result"), [(ramp(255), "note"), (ramp(65535), "note")])
def test_verify_tells_it_without_decoding_all(
    tmp_path: Path, content: NDArray[np.uint16], result: str
) -> None:
    location = data_of(tmp_path, *[DEEP["grey.png"](content)] * 4)
    checks = verify(location, deep=False, workers=1, counters=silent)
    found = {check.name: check.result for check in checks}
    assert found.get("pixels", "ok") == result


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("bands", "bits"), [(13, 16), (5, 8)])
def test_a_tiff_of_many_bands_is_named(
    order: str, bands: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow does not open it, and writes a line for each to a logger without a handler."""
    size = 4 * bands * bits // 8
    tags = {256: 2, 257: 2, 258: bits, 259: 1, 262: 1, 273: 8, 277: bands, 278: 2, 279: size}
    rows = [struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items()]
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8 + size)
    content = head + bytes(size) + struct.pack(f"{order}H", len(tags)) + b"".join(rows) + bytes(4)
    out = np.empty((1, 2, 2, 3), np.uint8)
    (reason,) = decode_batch([content], CentralCrop(2, 1.0), out, "bilinear").values()
    assert f"{bands} channels" in reason
    monkeypatch.setitem(sys.modules, "tifffile", None)
    (reason,) = decode_batch([content], CentralCrop(2, 1.0), out, "bilinear").values()
    assert "of many bands" in reason and "[tiff]" in reason
    assert logging.getLogger("PIL").handlers
