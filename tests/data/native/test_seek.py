"""Seek tables: decoding from where a crop begins gives the same bits as decoding from the start."""

from typing import Any

import numpy as np
import pytest

from tests.data.native.decoder import PATHS, Pixels, decode, jpeg, waves
from trainyard.data._native import core
from trainyard.data.storage.encoded import in_memory

pytestmark = pytest.mark.skipif(core is None, reason="the extension is not built")
Box = tuple[int, int, int, int]
SIZES = [(1, 1), (8, 8), (9, 129), (128, 128), (130, 257), (333, 40), (97, 500)]
SAMPLINGS = ["4:4:4", "4:2:2", "4:2:0", "grey"]


def picture(height: int, width: int, sampling: str, **options: Any) -> bytes:
    pixels = waves(height, width)
    if sampling == "grey":
        return jpeg(pixels, "L", **options)
    return jpeg(pixels, subsampling=sampling, **options)


def table_of(content: bytes) -> bytes:
    """The same by all paths."""
    (table,) = {core.Decoder(path).seek_table(content) for path in PATHS}
    assert table is not None
    return table


def boxes_in(height: int, width: int, seed: int = 0) -> list[Box]:
    """The whole image, its corners, and some boxes."""
    rng = np.random.default_rng(seed)
    boxes: list[Box] = [
        (0, 0, width, height),
        (width - 1, height - 1, width, height),
        (0, height - 1, width, height),
        (width - 1, 0, width, height),
    ]
    for _ in range(8):
        left, right = sorted(rng.integers(0, width, 2))
        top, bottom = sorted(rng.integers(0, height, 2))
        boxes.append((int(left), int(top), int(right) + 1, int(bottom) + 1))
    return boxes


def decoded(content: bytes, box: Box, path: str, table: bytes | None = None) -> tuple[Pixels, int]:
    """A box at a size of 20 x 24 pixels, and its status."""
    seek: dict[str, Any] = {}
    if table is not None:
        seek["seek"] = in_memory([table])
    return decode(content, box, (20, 24), path, **seek)


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 5}, {"restart_marker_rows": 1}])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", SIZES)
def test_the_table_changes_no_bit(
    size: tuple[int, int], sampling: str, options: dict[str, Any]
) -> None:
    content = picture(*size, sampling, quality=95, **options)
    table = table_of(content)
    for box in boxes_in(*size):
        for path in PATHS:
            expected, status = decoded(content, box, path)
            assert status == core.OK
            pixels, status = decoded(content, box, path, table)
            assert status == core.OK
            assert (pixels == expected).all()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_entries_stand_for_tiles_of_128_pixels(sampling: str) -> None:
    content = picture(130, 257, sampling)
    rows = 9 if sampling == "4:2:0" else 17
    assert len(table_of(content)) == 3 * rows * core.SEEK_ENTRY


def test_nothing_but_the_tiles_is_read() -> None:
    """What lies before the box may be lost without harm, as far as the table leads past it."""
    content = bytearray(picture(256, 256, "4:4:4", quality=95))
    table, box = table_of(bytes(content)), (130, 160, 250, 250)
    expected, _ = decoded(bytes(content), box, PATHS[0], table)
    scan = content.index(b"\xff\xda") + 14
    content[scan : scan + 5000] = bytes(5000)
    for path in PATHS:
        pixels, status = decoded(bytes(content), box, path, table)
        assert status == core.OK
        assert (pixels == expected).all()


def test_a_table_that_does_not_fit_is_not_used() -> None:
    content = picture(100, 300, "4:4:4")
    table, box = table_of(content), (150, 40, 280, 90)
    expected, _ = decoded(content, box, PATHS[0])
    nonsense = bytes(len(table) - core.SEEK_ENTRY)
    for path in PATHS:
        for wrong in (nonsense, table[: -core.SEEK_ENTRY], table * 2, b""):
            pixels, status = decoded(content, box, path, wrong)
            assert status == core.OK
            assert (pixels == expected).all()


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 5}])
def test_with_the_table_of_another_image_it_is_decoded_without(options: dict[str, Any]) -> None:
    content = picture(256, 256, "4:4:4", **options)
    table = table_of(picture(256, 256, "4:4:4", quality=60))
    for box in boxes_in(256, 256, seed=3):
        expected, _ = decoded(content, box, PATHS[0])
        for path in PATHS:
            pixels, status = decoded(content, box, path, table)
            assert status == core.OK
            assert (pixels == expected).all()


def test_a_damaged_image_is_so_with_a_table_and_without() -> None:
    whole = picture(256, 256, "4:4:4", quality=95)
    table, content = table_of(whole), bytearray(whole)
    scan = content.index(b"\xff\xda") + 14
    content[scan : scan + 5000] = b"\xfe" * 5000
    for path in PATHS:
        for chosen in (None, table):
            assert decoded(bytes(content), (0, 0, 256, 256), path, chosen)[1] == core.DAMAGED


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 5}])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_hostile_tables_are_judged_alike_by_all_paths(
    sampling: str, options: dict[str, Any]
) -> None:
    content = picture(70, 300, sampling, **options)
    table = np.frombuffer(table_of(content), np.uint8)
    rng = np.random.default_rng(1)
    for box in boxes_in(70, 300, seed=2) * 10:
        hostile = table.copy()
        kind = rng.integers(3)
        if kind == 0:  # a few bytes
            hostile[rng.integers(0, len(table), 8)] = rng.integers(0, 256, 8)
        elif kind == 1:  # entries in any order
            entries = hostile.reshape(-1, core.SEEK_ENTRY)
            hostile = rng.permutation(entries).ravel()
        else:
            hostile = rng.integers(0, 256, len(table), dtype=np.uint8)
        first, *rest = [decoded(content, box, path, hostile.tobytes()) for path in PATHS]
        for pixels, status in [first, *rest]:
            assert status == core.OK
            assert (pixels == first[0]).all()


@pytest.mark.parametrize("cut", [1, 200, 2000])
def test_there_is_no_table_of_damaged_or_other_files(cut: int) -> None:
    content = picture(90, 140, "4:4:4")
    progressive = picture(90, 140, "4:4:4", progressive=True)
    for path in PATHS:
        assert core.Decoder(path).seek_table(content[: len(content) - 2 - cut]) is None
        assert core.Decoder(path).seek_table(progressive) is None
        assert core.Decoder(path).seek_table(b"") is None
