"""Random erasing against timm's, given the same random numbers, and its noise."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import timm.data.random_erasing
import torch
from numpy.typing import NDArray

from tests.data.batches import batch_of_images
from trainyard.data.augment.erasing import RandomErasing, normals
from trainyard.data.batch import Batch, Keys
from trainyard.data.rng import fold_in, splitmix64, uniforms

torch.set_num_threads(1)

TimmErasing: Any = timm.data.random_erasing.RandomErasing
MODES = ["pixel", "rand", "const"]
MARK = 1000.0  # far from any noise


def batch_of(count: int, size: tuple[int, int] = (20, 24)) -> Batch:
    return batch_of_images(torch.full((count, 3, *size), MARK))


def keys_of(count: int, visit: int = 0) -> Keys:
    return Keys(np.arange(count) * 7, np.full(count, visit), 0)


def erase(
    count: int,
    keys: Keys,
    size: tuple[int, int] = (20, 24),
    probability: float = 1.0,
    mode: str = "pixel",
) -> torch.Tensor:
    return RandomErasing(probability, mode, seed=3)(batch_of(count, size), keys).images_BCHW


class FakeRandom:
    """The random module as timm.data.random_erasing uses it, with the numbers of one image."""

    def __init__(self, random: NDArray[np.float64]) -> None:
        self.chance, self.places = float(random[0]), iter(random[1:3].tolist())
        self.tries: Iterator[float] = iter(random[3:].reshape(2, 10).T.ravel().tolist())

    def random(self) -> float:
        return self.chance

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * next(self.tries)

    def randint(self, low: int, high: int) -> int:
        return low + int((high - low + 1) * next(self.places))


@pytest.mark.parametrize("size", [(20, 24), (6, 40), (40, 5), (3, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("probability", [1.0, 0.3])
def test_what_is_erased_is_timms(
    size: tuple[int, int], probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, keys = 200, keys_of(200, visit=4)
    found = erase(count, keys, size, probability, "const")
    key = fold_in(3, np.full(count, 7), keys.visits, keys.ids, np.zeros(count, np.int64))
    theirs = TimmErasing(probability, mode="const", device="cpu")
    expected = batch_of(count, size).images_BCHW
    for image, random in zip(expected, uniforms(key, 23), strict=True):
        monkeypatch.setattr(timm.data.random_erasing, "random", FakeRandom(random))
        theirs(image)
    assert torch.equal(found, expected)
    if size == (20, 24):
        share = (found == 0).flatten(1).any(dim=1).float().mean()
        assert share == pytest.approx(probability, abs=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode(mode: str) -> None:
    """Pixels outside stay; keyed by visit and id alone; of equal effect in either layout."""
    keys = keys_of(300, visit=2)
    boxes = erase(300, keys, mode="const") == 0
    found = erase(300, keys, mode=mode)
    assert (found[~boxes] == MARK).all()
    assert (found[boxes] != MARK).all()
    assert (erase(300, keys, mode=mode, probability=0.0) == MARK).all()
    some = erase(300, keys, mode=mode, probability=0.5)
    for rank in range(3):
        share = Keys(keys.ids[rank::3], keys.visits[rank::3], 777)
        assert torch.equal(erase(100, share, mode=mode, probability=0.5), some[rank::3])
    batch = batch_of(300)
    images = batch.images_BCHW.clone(memory_format=torch.channels_last)
    erased = RandomErasing(1.0, mode, seed=3)(replace(batch, images_BCHW=images), keys)
    assert erased.images_BCHW is images
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, found)


# --- what fills ---


def test_the_noise_is_the_inverse_normal_of_the_keyed_sequence() -> None:
    keys = splitmix64(np.arange(50, dtype=np.uint64))
    places = np.arange(50) * 1009
    found = normals(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(places), 3)
    golden = np.uint64(0x9E3779B97F4A7C15)
    for row, (key, place) in enumerate(zip(keys, places, strict=True)):
        counters = np.arange(place * 3 + 1, place * 3 + 4).astype(np.uint64)
        words = splitmix64(key + counters * golden)
        shares = (2 * (words >> np.uint64(40)).astype(float) + 1) / 2**25
        expected = [NormalDist().inv_cdf(share) for share in shares]
        assert found[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_noise_differs_by_pixel_or_is_one_colour() -> None:
    keys = keys_of(50)
    boxes = erase(50, keys, mode="const")[:, 0] == 0
    pixels, colours = (erase(50, keys, mode=mode) for mode in ("pixel", "rand"))
    seen = set()
    for image in range(50):
        inside = pixels[image].permute(1, 2, 0)[boxes[image]]
        assert len(set(inside.ravel().tolist())) == inside.numel()
        first, *others = colours[image].permute(1, 2, 0)[boxes[image]].tolist()
        assert all(colour == first for colour in others)
        seen |= set(first)
    assert len(seen) == 150
