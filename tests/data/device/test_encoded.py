"""Slots of encoded images: what a loader process leaves to a GPU, and what it does itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.images import encode
from trainyard.data.decode.crops import CentralCrop, RandomResizedCrop
from trainyard.data.decode.decode import decode_batch
from trainyard.data.loader import encoded_batch as module
from trainyard.data.loader.encoded_batch import ENTRY, JPEG, NOTHING, PIXELS, put_encoded, stretches
from trainyard.data.storage.encoded import EncodedSpans, in_memory
from trainyard.data.storage.source import LocalFile

SIZE = 32
CROP = RandomResizedCrop(seed=3, scale=(0.2, 1.0), ratio=(0.8, 1.25), flip=0.5)


def image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


PHOTOGRAPHS = [
    encode(image(80, 60)),
    encode(image(50, 90).convert("L")),
    encode(image(64, 64), progressive=True),
]


def put(
    contents: "EncodedSpans | Sequence[bytes]",
    count: int,
    *,
    mean: float = 60_000,
    crop: Any = CROP,
) -> tuple[NDArray[np.void], NDArray[np.uint8], dict[int, str]]:
    """What lies in a new slot then, and what was bad."""
    side = module.side_of(mean, SIZE)
    images_BHWC = np.full((count, side, side, 3), 255, np.uint8)
    ids = np.arange(count) + 100
    draws = crop.draw(ids, ids % 7)
    bad = put_encoded(contents, draws, images_BHWC, size=SIZE, how="bilinear")
    return *stretches(images_BHWC), bad


def crops_of(count: int, sizes: Any, crop: Any = CROP) -> Any:
    ids = np.arange(count) + 100
    return crop.draw(ids, ids % 7)(np.array(sizes))


@pytest.mark.parametrize("crop", [CROP, CentralCrop(SIZE, 0.875)], ids=["random", "central"])
def test_jpegs_are_left_as_they_are_with_the_plans_crops(crop: Any) -> None:
    entries, rest_BN, bad = put(PHOTOGRAPHS, 3, crop=crop)
    crops = crops_of(3, [(80, 60), (50, 90), (64, 64)], crop)
    assert bad == {}
    assert entries["kind"].tolist() == [JPEG] * 3
    assert np.array_equal(entries["box"], crops.boxes)
    assert np.array_equal(entries["flip"], crops.flips)
    assert (entries["resizes_first"] == crops.resizes_first).all()
    for content, entry, rest in zip(PHOTOGRAPHS, entries, rest_BN, strict=True):
        assert rest[: entry["length"]].tobytes() == content


OTHERS = {
    "png": encode(image(80, 60), "PNG"),
    "cmyk": encode(image(80, 60).convert("CMYK")),
    "long": encode(image(200, 200), quality=100, subsampling=0),
    "wide": encode(image(2000, 1500), quality=10),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_for_a_gpu_is_there_as_pixels(name: str) -> None:
    """With a crop of nearly all of it, and 10 kB for an image."""
    contents = [PHOTOGRAPHS[0], OTHERS[name], PHOTOGRAPHS[1]]
    mean = 50_000 if name == "wide" else 5_000
    crop = RandomResizedCrop(seed=3, scale=(0.9, 1.0), ratio=(0.75, 1.5), flip=0.5)
    entries, rest_BN, bad = put(contents, 3, mean=mean, crop=crop)
    assert bad == {}
    assert entries["kind"].tolist() == [JPEG, PIXELS, JPEG]
    ids = np.arange(3) + 100
    expected = np.empty((1, SIZE, SIZE, 3), np.uint8)
    decode_batch(contents[1:2], crop.draw(ids, ids % 7)[1:2], expected, "bilinear")
    assert entries["length"][1] == expected.size
    found = rest_BN[1, : expected.size].reshape(expected.shape)
    assert np.abs(found.astype(int) - expected).max() <= 2


def test_of_bad_images_nothing_is_there_and_the_reason_is_told() -> None:
    contents = [b"", PHOTOGRAPHS[0], b"no image", PHOTOGRAPHS[0][:100]]
    entries, _, bad = put(contents, 4)
    assert entries["kind"].tolist() == [NOTHING, JPEG, NOTHING, NOTHING]
    assert sorted(bad) == [0, 2, 3]
    assert (bad[0], bad[2]) == ("the file is empty", "not an image")


def test_an_image_that_cannot_be_read_is_bad(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(PHOTOGRAPHS[1][:50])
    where = in_memory(PHOTOGRAPHS)[1:]
    sources = PHOTOGRAPHS[0], LocalFile(str(tmp_path / "cut")), PHOTOGRAPHS[2]
    entries, _, bad = put(EncodedSpans(sources, *where), 3)
    assert entries["kind"].tolist() == [JPEG, NOTHING, JPEG]
    assert bad == {1: f"{tmp_path / 'cut'} is truncated or has changed since it was indexed"}


def test_a_stretch_holds_an_entry_and_what_follows() -> None:
    for mean, size in ((110_000, 224), (3_000, 224), (50_000, 64)):
        side = module.side_of(mean, size)
        room = 3 * side**2 - ENTRY.itemsize
        assert room >= max(2 * mean, 3 * size**2)
        assert room < 1.01 * max(2 * mean, 3 * size**2) + 1000
