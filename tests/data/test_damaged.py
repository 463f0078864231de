"""Damaged and odd files of a data set: none ends in a traceback, and none is passed over."""

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line import Capture, run
from tests.images import encode
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.storage.manifest import read_manifest

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


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(width: int, height: int, data: bytes | None) -> bytes:
    """A PNG of these sides, whose pixels are `data`."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = b"" if data is None else chunk(b"IDAT", data)
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")


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
    "bomb.png": png(60_000, 60_000, zlib.compress(bytes(10**6))),
    "no-width.png": png(0, 8, zlib.compress(bytes(100))),
    "no-pixels.png": png(8, 8, None),
    "short-pixels.png": png(64, 64, zlib.compress(bytes(100))),
    "no-zlib.png": png(8, 8, b"these are no pixels"),
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
    words = ("data", "pack", damaged, tmp_path / "out", "--format", "webdataset", "--workers", 1)
    assert run(*words, *options) == 0
    assert "Traceback" not in capsys.readouterr().err
    packed = open_index(find_splits(str(tmp_path / "out"))["train"])
    assert len(packed) == len(BAD) + len(ODD) + 2 * GOOD
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None
    odd = manifest.about["odd"]
    assert odd["not an image"]["count"] >= 10
    assert odd.get("cannot be decoded", {"count": 0})["count"] == (len(BAD) if options else 0)
