"""What images hold and training does not see is told, with the range that was found."""

import logging
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.data.tars import write_files
from tests.data.test_decode import deep_png, whole
from tests.images import encode
from trainyard.data.decode.array_file import array_file
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.lost import Code, Look, look, remarks
from trainyard.data.index.build import open_index
from trainyard.datasets.verify.verify import verify

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
@pytest.mark.parametrize(("bits", "is_dark"), [(8, True), (10, True), (12, True), (16, False)])
def test_the_range_of_16_bits(name: str, bits: int, is_dark: bool) -> None:
    seen = look(DEEP[name](ramp((1 << bits) - 1)))
    assert seen == Look(0, (1 << bits) - 1, True, False, 1)
    assert [code for code, _ in seen.remarks()] == ["dark"] * is_dark


def inverted(pixels_HW: NDArray[np.uint16]) -> bytes:
    return encode(Image.fromarray(pixels_HW), "TIFF", tiffinfo={262: 0})


def frames(kind: str, count: int) -> bytes:
    images = [Image.new("RGB", (16, 16), (9 * n, 200, 255)) for n in range(count)]
    return encode(images[0], kind, save_all=True, append_images=images[1:])


OTHERS: dict[str, tuple[bytes, list[Code]]] = {
    "a white of zero": (inverted(ramp(65535)), ["negative"]),
    "a white of zero in 8 bits": (
        encode(Image.fromarray(ramp(255).astype(np.uint8)), "TIFF", tiffinfo={262: 0}),
        [],
    ),
    "pages": (frames("TIFF", 3), ["frames"]),
    "an animation": (frames("GIF", 3), ["frames"]),
    "an animated PNG": (frames("PNG", 2), ["frames"]),
    "an animated WebP": (frames("WEBP", 2), ["frames"]),
    "one page": (frames("TIFF", 1), []),
    "previews of a JPEG": (frames("MPO", 2), []),
    "a mask of classes": (encode(Image.fromarray(ramp(9).astype(np.uint8)), "PNG"), ["dark"]),
    "an array": (array_file(np.full((4, 4, 5), 16, np.uint8)), ["dark"]),
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
    dark, bright = DEEP["grey.png"](ramp(4095)), DEEP["grey.png"](ramp(60000))
    index = open_index(data_of(tmp_path / "dark", dark, DEEP["grey.png"](ramp(900)), b"none"))
    ((code, text),) = remarks(index)
    assert code == "dark"
    assert "2 of 2 " in text and " 4,095 " in text
    assert remarks(open_index(data_of(tmp_path / "some", dark, bright))) == []
    pages = open_index(data_of(tmp_path / "pages", frames("TIFF", 2), frames("TIFF", 1)))
    assert [code for code, _ in remarks(pages)] == ["frames"]


@pytest.mark.parametrize(("content", "result"), [(ramp(255), "problem"), (ramp(65535), "ok")])
def test_verify_tells_it_without_decoding_all(
    tmp_path: Path, content: NDArray[np.uint16], result: str
) -> None:
    location = data_of(tmp_path, *[DEEP["grey.png"](content)] * 4)
    checks = verify(
        location, deep=False, workers=1, counters=lambda *_: nullcontext(lambda *_: None)
    )
    found = {check.name: check.result for check in checks}
    assert found.get("pixels", "ok") == result


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("bands", "bits"), [(13, 16), (5, 8)])
def test_a_tiff_of_many_bands_is_named(order: str, bands: int, bits: int) -> None:
    """Pillow does not open it, and writes a line for each to a logger without a handler."""
    size = 4 * bands * bits // 8
    tags = {256: 2, 257: 2, 258: bits, 259: 1, 262: 1, 273: 8, 277: bands, 278: 2, 279: size}
    rows = [struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items()]
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8 + size)
    content = head + bytes(size) + struct.pack(f"{order}H", len(tags)) + b"".join(rows) + bytes(4)
    out = np.empty((1, 2, 2, 3), np.uint8)
    (reason,) = decode_batch([content], whole(), out, "bilinear").values()
    assert f"{bands} bands of {bits} bits" in reason
    assert logging.getLogger("PIL").handlers
