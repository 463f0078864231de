"""Packed records: JPEGs regrouped and given back, crops read from them, and what is damaged."""

import io
import struct
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.native.decoder import PATHS, Pixels, decode, jpeg
from tests.fuzz.seeds import damaged
from trainyard.data._native import core
from trainyard.data.decode.packed_record import jpeg_head, pixels_of, record_of_pixels
from trainyard.data.storage.source import LocalFile

pytestmark = pytest.mark.skipif(core is None, reason="the extension is not built")
SAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth areas, edges and some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / (3 + c) + y / (5 + seed)) for c in range(3)], axis=-1)
    noise = rng.normal(0, rng.uniform(0, 25), (height, width, 3))
    edges = 60 * ((x // 9 + y // 7) % 2)[..., None]
    pixels: Pixels = (110 + 70 * waves + edges + noise).clip(0, 255).astype(np.uint8)
    return pixels


def packed(content: bytes) -> bytes:
    record = core.Decoder().pack(content)
    assert record is not None
    return record


def decoded(
    content: bytes, box: tuple[float, ...], size: tuple[int, int], path: str, **options: Any
) -> Pixels:
    """A box at a size (height, width) by one path."""
    pixels, status = decode(content, box, size, path, **options)
    assert status == core.OK
    return pixels


def every_kind() -> dict[str, bytes]:
    """JPEGs of all kinds that are packed, by what is special about each."""
    made = {}
    for name, sampling in SAMPLINGS.items():
        for quality in (15, 75, 100):
            for height, width in ((1, 1), (16, 16), (33, 65), (70, 41)):
                content = jpeg(picture(height, width), quality=quality, subsampling=sampling)
                made[f"{name} q{quality} {width} x {height}"] = content
    for quality in (30, 98):
        made[f"grey q{quality}"] = jpeg(picture(37, 52), "L", quality=quality)
    made["best codes"] = jpeg(picture(60, 60), optimize=True)
    for rows in (1, 2):
        made[f"restarts by {rows} rows"] = jpeg(picture(90, 50), restart_marker_rows=rows)
    made["restarts by 3 MCUs"] = jpeg(picture(90, 130), restart_marker_blocks=3)
    made["restarts by MCU, grey"] = jpeg(picture(20, 90), "L", restart_marker_blocks=1)
    made["EXIF"] = jpeg(picture(20, 20), exif=b"Exif\0\0" + bytes(5000), comment=b"a comment")
    made["more behind the end"] = jpeg(picture(20, 30)) + b"\xff\xd8 another picture \xff\xd9"
    return made


KINDS = every_kind()


# --- there and back ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_gives_the_jpeg_back(kind: str) -> None:
    content = KINDS[kind]
    record = packed(content)
    assert len(record) % 64 == 0
    assert not any(record[-64:])
    assert core.Decoder().unpack(record) == content
    assert {core.Decoder(path).pack(content) for path in PATHS} == {record}


def test_wide_values_are_kept() -> None:
    rng = np.random.default_rng(0)
    extreme = rng.integers(0, 2, (48, 48, 1), np.uint8).repeat(3, 2) * 255
    content = jpeg(extreme, quality=100, subsampling=0)
    record = packed(content)
    assert core.Decoder().unpack(record) == content
    first = decoded(record, (0, 0, 48, 48), (48, 48), PATHS[0])
    assert all(
        np.array_equal(decoded(record, (0, 0, 48, 48), (48, 48), path), first) for path in PATHS
    )


def padded_with(content: bytes, padding: str) -> bytes:
    """A grey JPEG of one interval whose last bits are others than ones."""
    end = content.rindex(b"\xff\xd9")
    bits = f"{content[end - 1]:08b}"
    kept = bits.rstrip("1")
    last = int((kept + padding * 8)[:8], 2)
    return content[: end - 1] + bytes((last,)) + content[end:]


def test_padding_of_zeros_comes_back() -> None:
    content = padded_with(KINDS["grey q30"], "0")
    assert content != KINDS["grey q30"]
    assert core.Decoder().unpack(packed(content)) == content


@pytest.mark.parametrize("unusual", ["padding", "fill bytes", "bytes before the end"])
def test_what_would_come_back_otherwise_written_is_not_packed(unusual: str) -> None:
    content = KINDS["grey q30"]
    end = content.rindex(b"\xff\xd9")
    match unusual:
        case "padding":
            content = padded_with(content, "01")
        case "fill bytes":
            content = content[:end] + b"\xff" + content[end:]
        case _:
            content = content[:end] + b"\x12\x34" + content[end:]
    assert core.Decoder().pack(content) is None


@pytest.mark.parametrize(
    "content",
    [
        jpeg(picture(40, 40), progressive=True),
        jpeg(picture(40, 40), "CMYK"),
        KINDS["4:4:4 q75 65 x 33"][:-300],
        KINDS["4:4:4 q75 65 x 33"][:100],
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"",
    ],
    ids=["progressive", "CMYK", "cut short", "cut in the header", "PNG", "empty"],
)
def test_what_cannot_be_packed(content: bytes) -> None:
    assert core.Decoder().pack(content) is None


def photographs() -> list[bytes]:
    flower = Image.fromarray(load_sample_images().images[1])
    return [
        jpeg(np.asarray(flower.resize(size)), mode, **options)
        for size in ((96, 64), (200, 133))
        for mode, options in (
            ("RGB", {"quality": 90, "subsampling": 0}),
            ("RGB", {"quality": 60, "optimize": True}),
            ("RGB", {"quality": 75, "restart_marker_blocks": 4}),
            ("L", {"quality": 85}),
        )
    ]


def test_a_damaged_photograph_comes_back_to_the_byte_or_is_not_packed() -> None:
    num_packed = 0
    for content in islice(damaged(photographs(), np.random.default_rng(3)), 4000):
        record = core.Decoder().pack(content)
        if record is None:
            continue
        num_packed += 1
        assert core.Decoder().unpack(record) == content
        width, height = struct.unpack_from("<II", record, 12)
        box, size = (0, 0, width, height), (11, 13)
        for path in PATHS:
            found, expected = (decoded(each, box, size, path) for each in (record, content))
            assert np.array_equal(found, expected)
    assert num_packed > 1000
    print(f"{num_packed} of 4,000 are packed")


# --- crops ---


def boxes(height: int, width: int, count: int) -> list[tuple[float, ...]]:
    rng = np.random.default_rng(height * width)
    found: list[tuple[float, ...]] = [(0, 0, width, height)]
    for number in range(count):
        x, y = np.sort(rng.uniform(0, width, 2)), np.sort(rng.uniform(0, height, 2))
        if number % 2:  # whole pixels
            x, y = np.floor(x), np.floor(y)
        found.append((x[0], y[0], max(x[1], x[0] + 0.5), max(y[1], y[0] + 0.5)))
    return [(a, b, min(c, width), min(d, height)) for a, b, c, d in found]


@pytest.mark.parametrize("kind", ["4:4:4 q75 65 x 33", "4:2:2 q100 41 x 70", "4:2:0 q15 65 x 33"])
@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("beyond", [False, True])
def test_a_crop_of_a_record_is_that_of_the_jpeg(kind: str, bicubic: bool, beyond: bool) -> None:
    content = KINDS[kind]
    record = packed(content)
    width, height = Image.open(io.BytesIO(content)).size
    options = {"bicubic": bicubic, "beyond": beyond}
    for number, box in enumerate(boxes(height, width, 6)):
        more = options | {"flip": number % 2 == 1}
        expected = decoded(content, box, (19, 23), PATHS[0], **more)
        for path in PATHS:
            assert np.array_equal(decoded(record, box, (19, 23), path, **more), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_records_are_what_libjpeg_decodes(kind: str) -> None:
    content = KINDS[kind]
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    height, width = expected.shape[:2]
    found = decoded(packed(content), (0, 0, width, height), (height, width), PATHS[0])
    assert np.abs(found.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["RGB", "L"])
def test_crops_of_pixels(kind: str, path: str) -> None:
    image = Image.fromarray(picture(57, 83)).convert(kind)
    record = record_of_pixels(np.asarray(image))
    assert np.array_equal(pixels_of(record), np.asarray(image))
    image = image.convert("RGB")
    whole = decoded(record, (0, 0, 83, 57), (57, 83), path)
    assert np.array_equal(whole, np.asarray(image))
    for left, top, right, bottom in ((0, 0, 83, 57), (10, 5, 60, 50), (82, 56, 83, 57)):
        expected = image.crop((left, top, right, bottom)).resize(
            (24, 24), Image.Resampling.BILINEAR
        )
        found = decoded(record, (left, top, right, bottom), (24, 24), path)
        assert np.abs(found.astype(int) - np.asarray(expected)).max() <= 1


def in_file(path: Path, content: bytes) -> LocalFile:
    path.write_bytes(content + b"another image")
    return LocalFile(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_record_in_a_file_the_rows_of_the_crop_are_read(kind: str, tmp_path: Path) -> None:
    """Rows that no crop of the upper part needs are overwritten: nobody sees it."""
    content = KINDS[kind]
    record = packed(content)
    width, height = Image.open(io.BytesIO(content)).size
    for box in [*boxes(height, width, 6), (0, 0, width, max(1, height // 3))]:
        expected = decoded(record, box, (19, 23), PATHS[0])
        source = in_file(tmp_path / "whole", record)
        assert np.array_equal(decoded(record, box, (19, 23), PATHS[0], source=source), expected)
    if height > 48 and "EXIF" not in kind:
        lower = len(record) // 8
        source = in_file(tmp_path / "overwritten", record[:-lower] + b"\xff" * lower)
        assert np.array_equal(decoded(record, box, (19, 23), PATHS[0], source=source), expected)


def test_sizes_of_records() -> None:
    contents = [
        packed(KINDS["4:2:0 q75 41 x 70"]),
        record_of_pixels(picture(3, 9)),
        b"\xa7TYpack\n",
    ]
    sizes, status = np.zeros((3, 2), np.int64), np.zeros(3, np.uint8)
    zeros, lengths = np.zeros(3, np.int64), np.array([len(content) for content in contents])
    core.Decoder().sizes(contents, np.arange(3), zeros, lengths, sizes, status)
    assert sizes[:2].tolist() == [[41, 70], [9, 3]]
    assert status[:2].tolist() == [0, 0]
    assert status[2] != 0


# --- what is damaged ---


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["4:2:0 q75 65 x 33", "grey q98", "pixels", "grey pixels"])
def test_a_record_that_is_cut_short_is_an_error(path: str, kind: str) -> None:
    pixels = {"pixels": picture(20, 30), "grey pixels": picture(20, 30)[..., 0]}
    record = record_of_pixels(pixels[kind]) if kind in pixels else packed(KINDS[kind])
    for length in {*range(0, len(record) - 128, 37), *range(len(record) - 128, len(record))}:
        _, status = decode(record[:length], (0, 0, 30, 20), (8, 8), path)
        assert status != core.OK
        assert core.Decoder(path).unpack(record[:length]) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["4:2:0 q75 65 x 33", "4:4:4 q100 41 x 70", "grey q98"])
def test_hostile_records_do_no_harm(path: str, kind: str, tmp_path: Path) -> None:
    """The extension neither crashes nor says OK without a picture; sanitizers look closer."""
    record = packed(KINDS[kind])
    rng = np.random.default_rng(1)
    table = record.index(b"\xff\xda")
    seen = set()
    for number in range(400):
        changed = bytearray(record)
        at = int(rng.integers(8, (64, table + 200, len(record))[number % 3]))
        changed[at : at + 4] = rng.bytes(min(4, len(record) - at))
        box = (3, 2, 30, 29)
        pixels, status = decode(bytes(changed), box, (11, 7), path)
        source = in_file(tmp_path / "record", bytes(changed))
        read, status_of_file = decode(bytes(changed), box, (11, 7), path, source=source)
        assert status_of_file != core.OK or np.array_equal(read, pixels)
        seen |= {status, status_of_file}
        core.Decoder(path).unpack(bytes(changed))
    assert {core.OK, core.DAMAGED} <= seen


@pytest.mark.parametrize(("at", "value"), [(8, 2), (10, 4), (12, 0), (20, 255), (28, 200)])
def test_wrong_headers(at: int, value: int) -> None:
    changed = bytearray(packed(KINDS["grey q30"]))
    changed[at] = value
    assert decode(bytes(changed), (0, 0, 9, 9), (8, 8), PATHS[0])[1] != core.OK
    assert core.Decoder().unpack(bytes(changed)) is None


@pytest.mark.parametrize("pixels", [picture(20, 30), picture(20, 30)[..., 0]])
def test_plain_python_refuses_damage_with_one_kind_of_error(pixels: Pixels) -> None:
    record = record_of_pixels(pixels)
    rng = np.random.default_rng(2)
    for number in range(300):
        changed = bytearray(record)
        changed[int(rng.integers(8, 48))] ^= 1 << int(rng.integers(8))
        for content in (bytes(changed), record[: number * 2]):
            for read in (pixels_of, jpeg_head):
                try:
                    read(content)
                except ValueError:
                    continue
