"""Reading JPEGs: headers, Huffman tables, restart intervals, and files that are cut or damaged."""

import io
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.data.native.decoder import PATHS, Pixels, decode, jpeg, waves
from trainyard.data._native import core

pytestmark = pytest.mark.skipif(core is None, reason="the extension is not built")


def decoded(
    content: bytes, path: str, box: tuple[int, int, int, int] | None = None
) -> tuple[Pixels, int]:
    """A box (the whole image without one) at its own size, and its status."""
    sizes, zero = np.zeros((1, 2), np.int64), np.zeros(1, np.int64)
    length, status = np.array([len(content)]), np.zeros(1, np.uint8)
    core.Decoder(path).sizes([content], zero, zero, length, sizes, status)
    if status[0] != core.OK:
        return np.zeros((0, 0, 3), np.uint8), int(status[0])
    left, top, right, bottom = box or (0, 0, *sizes[0].tolist())
    return decode(content, (left, top, right, bottom), (bottom - top, right - left), path)


def status_of(content: bytes) -> int:
    """The same by all paths."""
    (status,) = {decoded(content, path)[1] for path in PATHS}
    return status


def by_pillow(content: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def assert_decodes(content: bytes, tolerance: int) -> None:
    expected = by_pillow(content).astype(np.int64)
    for path in PATHS:
        pixels, status = decoded(content, path)
        assert status == core.OK
        assert np.abs(pixels - expected).max() <= tolerance


def before_scan(content: bytes) -> int:
    """Where the marker of the scan stands."""
    return content.index(b"\xff\xda")


def scan_of(content: bytes) -> int:
    """Where its entropy-coded bytes begin."""
    at = before_scan(content)
    return at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (7, 9), (16, 17), (33, 50), (120, 75), (20, 400)])
@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"restart_marker_blocks": 3}])
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0", "grey"])
def test_pixels_are_those_of_libjpeg(
    size: tuple[int, int], options: dict[str, Any], sampling: str
) -> None:
    if sampling == "grey":
        content = jpeg(waves(*size), "L", quality=93, **options)
    else:
        content = jpeg(waves(*size), quality=93, subsampling=sampling, **options)
    assert_decodes(content, tolerance=2)


def test_noise_fills_blocks_to_their_last_coefficient() -> None:
    noise = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for optimize in (False, True):
        assert_decodes(jpeg(noise, quality=100, subsampling=0, optimize=optimize), tolerance=2)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 8, 13, 1000])
def test_restart_intervals(blocks: int) -> None:
    content = jpeg(waves(100, 150), restart_marker_blocks=blocks, subsampling="4:2:0")
    assert_decodes(content, tolerance=2)
    box = (40, 56, 120, 97)
    whole, _ = decoded(content, PATHS[0])
    for path in PATHS:
        inside, status = decoded(content, path, box)
        assert status == core.OK
        # At the border of a box chroma has no neighbours to be interpolated with.
        expected = whole[box[1] : box[3], box[0] : box[2]]
        assert (inside[2:-2, 2:-2] == expected[2:-2, 2:-2]).all()


def test_restart_markers_out_of_order_are_refused() -> None:
    content = jpeg(waves(40, 60), restart_marker_blocks=2, subsampling=0)
    first, second = content.index(b"\xff\xd0"), content.index(b"\xff\xd1")
    swapped = bytearray(content)
    swapped[first + 1], swapped[second + 1] = 0xD1, 0xD0
    assert status_of(bytes(swapped)) == core.DAMAGED


def test_fill_bytes_before_markers_and_comments_are_taken() -> None:
    content = jpeg(waves(20, 30), quality=90, subsampling=0, comment=b"\xff\xda a comment")
    at = content.rindex(b"\xff\xc4")
    assert_decodes(content[:at] + b"\xff\xff" + content[at:], tolerance=2)


def test_sixteen_bit_quantisation_tables() -> None:
    content = jpeg(waves(32, 32), quality=50, subsampling=0)
    at = content.index(b"\xff\xdb")
    table = content[at + 5 : at + 69]
    wide = b"\xff\xdb\x00\x83\x10" + b"".join(bytes([0, value]) for value in table)
    assert_decodes(content[:at] + wide + content[at + 69 :], tolerance=2)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_file_or_a_scan_that_ends_too_early_is_damaged(mode: str) -> None:
    content = jpeg(waves(64, 80), mode, quality=95)
    scan = scan_of(content)
    for length in (2, 20, scan - 1, scan, scan + 1, scan + 100, len(content) - 40):
        assert status_of(content[:length]) in (core.DAMAGED, core.NOT_OURS)
        if length >= scan:
            assert status_of(content[:length] + b"\xff\xd9") == core.DAMAGED
            assert status_of(content[:length] + b"\xff\xd9" + content[length:]) == core.DAMAGED
    ones = b"\xff\x00" * ((len(content) - scan) // 2)  # codes that do not exist
    assert status_of(content[:scan] + ones + b"\xff\xd9") == core.DAMAGED
    for path in PATHS:  # also where what the box needs is there: a sample is bad in every crop
        assert decoded(content[:-300], path, (0, 0, 80, 16))[1] == core.DAMAGED


def others() -> dict[str, bytes]:
    """Files that are left to the libraries."""
    pixels = waves(30, 40)
    cmyk, bmp = io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels).convert("CMYK").save(cmyk, "JPEG")
    Image.fromarray(pixels).save(bmp, "BMP")
    plain = jpeg(pixels)
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"  # its last byte says RGB
    frame = plain.index(b"\xff\xc0")
    return {
        "progressive": jpeg(pixels, progressive=True),
        "cmyk": cmyk.getvalue(),
        "bmp": bmp.getvalue(),
        "rgb by keeping": jpeg(pixels, keep_rgb=True),
        "rgb by Adobe": plain[:2] + adobe + plain[2:],
        "twelve bits": plain[: frame + 4] + b"\x0c" + plain[frame + 5 :],
        "4:1:1": cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x411111])[
            1
        ].tobytes(),
        "empty": b"",
        "text": b"no image at all, but longer than a header",
    }


@pytest.mark.parametrize("kind", others())
def test_other_files_are_not_ours(kind: str) -> None:
    assert status_of(others()[kind]) == core.NOT_OURS


def broken() -> dict[str, bytes]:
    """Headers that contradict themselves."""
    content = jpeg(waves(30, 40), subsampling=0)
    frame, codes = content.index(b"\xff\xc0"), content.index(b"\xff\xc4")
    length = int.from_bytes(content[frame + 2 : frame + 4], "big") + 2
    quant = content.index(b"\xff\xdb")
    scan = before_scan(content)

    def changed(at: int, value: bytes) -> bytes:
        return content[:at] + value + content[at + len(value) :]

    return {
        "no width": changed(frame + 7, b"\x00\x00"),
        "two frames": content[:frame] + content[frame : frame + length] + content[frame:],
        "no frame": content[:frame] + content[frame + length :],
        "no tables of codes": content[:codes] + content[scan:],
        "quantisation table 15": changed(quant + 4, b"\x0f"),
        "three codes of one bit": changed(codes + 5, b"\x03"),
        "a segment past the end": changed(quant + 2, b"\xff\xff"),
        "a factor of zero": changed(frame + 11, b"\x01"),
        "table 4 in the scan": changed(scan + 6, b"\x40"),
        "a frame of a wrong length": changed(frame + 3, b"\x12"),
    }


@pytest.mark.parametrize("kind", broken())
def test_broken_headers_are_damaged(kind: str) -> None:
    assert status_of(broken()[kind]) in (core.DAMAGED, core.NOT_OURS)


@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"restart_marker_blocks": 4}])
def test_changed_bytes_are_judged_alike_by_all_paths(options: dict[str, Any]) -> None:
    content = jpeg(waves(48, 72), quality=92, **options)
    rng = np.random.default_rng(5)
    for _ in range(300):
        changed = np.frombuffer(content, np.uint8).copy()
        count = rng.integers(1, 5)
        changed[rng.integers(2, len(content), count)] = rng.integers(0, 256, count)
        first, *rest = [decoded(changed.tobytes(), path) for path in PATHS]
        for pixels, status in rest:
            assert status == first[1]
            assert status != core.OK or (pixels == first[0]).all()


def test_tables_of_one_image_are_not_used_for_the_next() -> None:
    contents = [
        jpeg(waves(40, 60, noise), quality=quality, optimize=optimize)
        for noise, quality, optimize in [(5, 95, True), (50, 60, True), (5, 95, False)]
    ] * 2
    for path in PATHS:
        out, status = np.zeros((6, 40, 60, 3), np.uint8), np.zeros(6, np.uint8)
        core.Decoder(path).decode(
            *(contents, np.arange(6), np.zeros(6, np.int64), np.array([len(c) for c in contents])),
            *(np.tile([0.0, 0, 60, 40], (6, 1)), np.zeros(6, np.bool_), out, status),
            height=40,
            width=60,
        )
        assert (status == core.OK).all()
        for content, pixels in zip(contents, out, strict=True):
            assert (decoded(content, path)[0] == pixels).all()
