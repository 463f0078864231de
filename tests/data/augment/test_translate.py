"""Translation of batches against torchvision's padding and cropping of one image at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from tests.errors import raises
from trainyard.data.augment.transforms import Translate
from trainyard.data.batch import Keys


def keys(count: int, visit: int = 0) -> Keys:
    return Keys(np.arange(count), np.full(count, visit), 0)


def pixels(height: int, width: int, count: int) -> Tensor:
    """The same noise `count` times."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (1, 3, height, width), generator=generator, dtype=torch.uint8)
    return image.repeat(count, 1, 1, 1)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_image_is_a_crop_of_the_padded_one(most: int, layout: torch.memory_format) -> None:
    """All offsets occur, about equally often, and height and width may differ."""
    places = (2 * most + 1) ** 2
    images = pixels(9, 13, count=60 * places).to(memory_format=layout)
    padded = functional.pad(images[:1], [most], padding_mode="reflect")[0]
    crops = padded.unfold(1, 9, 1).unfold(2, 13, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    moved = Translate(most, seed=5)(images, keys(len(images)))
    assert moved.dtype == torch.uint8
    same = (moved[:, None] == crops[None]).flatten(2).all(dim=2)
    assert same.sum(dim=1).eq(1).all()
    assert same.shape[1] == places
    assert same.sum(dim=0).min() > 30
    assert same.sum(dim=0).max() < 100


def test_the_draw_is_of_the_sample_its_visit_and_the_seed_alone() -> None:
    images, move = pixels(12, 12, count=40), Translate(3, seed=1)
    whole = move(images, keys(40))
    part = move(images[:7], Keys(np.arange(13, 20), np.zeros(7, np.int64), 99))
    assert torch.equal(part, whole[13:20])
    for other in (move(images, keys(40, visit=1)), Translate(3, seed=2)(images, keys(40))):
        assert (other != whole).flatten(1).any(dim=1).sum() > 30


def test_a_move_beyond_the_image_is_refused() -> None:
    with raises("recipe.translate-too-large", value=8, size=8):
        Translate(8, seed=0)(pixels(8, 12, count=2), keys(2))
