"""Which transforms a recipe has, in what order, and that a feed replays them exactly."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.data.batches import batch_of_images
from trainyard.course import Course, build_course
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.erasing import RandomErasing
from trainyard.data.augment.jitter import ColorJitter
from trainyard.data.augment.mixing import Mixing
from trainyard.data.augment.randaugment import RandAugment
from trainyard.data.augment.transforms import (
    PixelTransform,
    Translate,
    batch_transforms,
    pixel_transforms,
)
from trainyard.data.batch import Batch, Keys
from trainyard.data.config import DataConfig
from trainyard.data.feeds import Feeds
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.world import World

torch.set_num_threads(1)

MIXES = {"mixup": 0.8, "cutmix": 1.0}
JITTER = (0.3, 0.3, 0.3)
COMPARED = ("images_BCHW", "labels", "mixed_labels", "lam", "weights", "ids")


def kinds(config: AugmentConfig) -> list[type]:
    """Of all transforms, in order."""
    pixels = pixel_transforms(config, seed=0, mean=(0.5, 0.5, 0.5))
    return [type(transform) for transform in (*pixels, *batch_transforms(config, seed=0))]


CONFIGS: list[tuple[dict[str, Any], list[type]]] = [
    ({}, []),
    ({"erasing": 0.25}, [RandomErasing]),
    ({"mixup": 0.2}, [Mixing]),
    ({"cutmix": 1.0}, [Mixing]),
    ({"erasing": 0.25, **MIXES}, [RandomErasing, Mixing]),
    ({"color_jitter": JITTER}, [ColorJitter]),
    ({"translate": 2, "color_jitter": JITTER}, [Translate, ColorJitter]),
    ({"randaugment": "rand-m9-mstd0.5-inc1", "mixup": 0.2}, [RandAugment, Mixing]),
    ({"randaugment": "3a", "color_jitter": JITTER}, [RandAugment, ColorJitter]),  # DeiT III
]


@pytest.mark.parametrize(("keys", "expected"), CONFIGS, ids=str)
def test_a_recipe_has_the_transforms_that_it_names(
    keys: dict[str, Any], expected: list[type]
) -> None:
    assert kinds(AugmentConfig(**keys)) == expected


def test_images_are_erased_before_they_are_mixed() -> None:
    """So where one of two images of ones was erased, the share of the other is left."""
    config = AugmentConfig(erasing=1.0, erasing_mode="const", mixup=10.0)
    batch = batch_of_images(torch.ones(2, 3, 32, 32))
    for transform in batch_transforms(config, seed=0):
        batch = transform(batch, Keys(np.arange(2), np.zeros(2, np.int64), 0))
    lam = float(batch.lam[0])
    left = batch.images_BCHW[(batch.images_BCHW > 0) & (batch.images_BCHW < 0.999)]
    assert 0.1 < lam < 0.9
    assert len(left) > 10
    assert (((left - lam).abs() < 1e-6) | ((left - (1 - lam)).abs() < 1e-6)).all()


@pytest.mark.parametrize("mix_mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("erasing_mode", ["pixel", "rand", "const"])
def test_no_value_is_read_from_the_device(mix_mode: str, erasing_mode: str) -> None:
    """On tensors of a GPU that have a shape but no values, where that raises."""
    keys = {"erasing": 1.0, **MIXES, "mix_mode": mix_mode, "erasing_mode": erasing_mode}
    config = AugmentConfig.model_validate(keys)
    with FakeTensorMode(allow_non_fake_inputs=True):
        labels = torch.zeros(8, dtype=torch.int64, device="cuda")
        images = torch.ones(8, 3, 16, 16, device="cuda")
        batch = batch_of_images(images, labels)
        for transform in batch_transforms(config, seed=0):
            batch = transform(batch, Keys(np.arange(8), np.zeros(8, np.int64), 0))
        columns = (getattr(batch, name) for name in COMPARED[:5])
        assert {column.device.type for column in columns} == {"cuda"}
        with pytest.raises(DataDependentOutputException):
            float(batch.lam[0])


# --- of each transform ---


def erased(seed: int) -> PixelTransform:
    erase = RandomErasing(1.0, "pixel", seed=seed)
    return lambda pixels_BCHW, keys: erase(batch_of_images(pixels_BCHW.float()), keys).images_BCHW


def augmented(seed: int) -> PixelTransform:
    return RandAugment("rand-m9-n2-mstd0.5-inc1", seed=seed, mean=(0.485, 0.456, 0.406))


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda seed: Translate(3, seed=seed), 12),
        (lambda seed: ColorJitter((0.4, 0.4, 0.4, 0.1), seed=seed), 20),
        (augmented, 224),  # one by one
        (augmented, 33),  # several at once
        (erased, 20),
    ],
    ids=["translation", "jitter", "large", "small", "erasing"],
)
def test_a_sample_is_augmented_by_seed_visit_and_id_alone(
    make: Callable[[int], PixelTransform], size: int
) -> None:
    """Whatever the batch, the rank and the layout in memory."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (1, 3, size, size), generator=generator, dtype=torch.uint8)
    pixels_BCHW, ids, visits = image.repeat(24, 1, 1, 1), np.arange(100, 124), np.arange(24) % 3
    whole = make(5)(pixels_BCHW.clone(), Keys(ids, visits, 0))
    assert whole.shape == pixels_BCHW.shape
    assert len({tuple(one.ravel().tolist()) for one in whole}) > 12
    for rank in range(3):
        part = pixels_BCHW[rank::3].clone(memory_format=torch.channels_last)
        keys = Keys(ids[rank::3], visits[rank::3], 77)
        assert torch.equal(make(5)(part, keys), whole[rank::3])
    for seed, more in ((6, 0), (5, 1)):
        other = make(seed)(pixels_BCHW.clone(), Keys(ids, visits + more, 0))
        assert (other != whole).flatten(1).any(1).sum() > 12


# --- in a feed ---

MODES = ("batch", "pair", "elem")


def config_of(mode: str) -> AugmentConfig:
    loaded = {"erasing": 0.5, **MIXES, "mix_prob": 0.8, "mix_mode": mode}
    return AugmentConfig.model_validate(loaded)


@pytest.fixture(scope="module")
def index(digits: Path) -> Index:
    return open_merged([str(digits / "train")], None)


@pytest.fixture(scope="module")
def course() -> Course:
    """Eight steps of 16 samples, whose images grow at the fifth; the epoch ends in the sixth."""
    return build_course(
        "8 steps", epoch_samples=88, batch=16, image_size=16, size_stages=("4 steps: 24",)
    )


def batches_of(
    index: Index,
    course: Course,
    mode: str,
    *,
    starts: Sequence[tuple[int, int]] = ((0, 0),),
    world: World = World(),  # noqa: B008
) -> list[Batch]:
    """The rest of a run's batches after seeking to the last of `starts`: (step, skipped)."""
    feeds = Feeds(
        data=DataConfig(image_size=16, threads=1),
        augment=config_of(mode),
        global_batch=16,
        seed=3,
        channels_last=True,
        world=world,
        device=torch.device("cpu"),
    )
    plan = ShuffledPlan(88, 16, seed=3)
    with feeds.train(index, plan, course) as feed:
        for step, skipped in starts[:-1]:
            feed.seek(step, skipped)
            next(feed)
        feed.seek(*starts[-1])
        return list(feed)


@pytest.fixture(scope="module")
def whole(index: Index, course: Course) -> dict[str, list[Batch]]:
    """All batches of a run, by mix_mode."""
    return {mode: batches_of(index, course, mode) for mode in MODES}


def assert_same(one: Batch, other: Batch) -> None:
    for name in COMPARED:
        assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("mode", MODES)
def test_a_feed_that_goes_back_goes_on_exactly(
    mode: str, index: Index, course: Course, whole: dict[str, list[Batch]]
) -> None:
    assert len(whole[mode]) == 8
    assert sum(bool((batch.lam < 1).any()) for batch in whole[mode]) >= 4
    again = batches_of(index, course, mode, starts=[(6, 0), (2, 0)])
    for one, other in zip(again, whole[mode][2:], strict=True):
        assert_same(one, other)


def test_samples_are_mixed_otherwise_at_the_next_visit(whole: dict[str, list[Batch]]) -> None:
    lam: dict[int, list[float]] = {}
    for batch in whole["elem"]:
        for sample, share in zip(batch.ids.tolist(), batch.lam.tolist(), strict=True):
            lam.setdefault(sample, []).append(share)
    again = [shares for shares in lam.values() if len(shares) == 2]
    assert len(again) == 8 * 16 - 88
    assert sum(one != other for one, other in again) > 30


def test_skipped_samples_are_keyed_as_if_they_had_been_seen(
    index: Index, course: Course, whole: dict[str, list[Batch]]
) -> None:
    """After going back to step 1 past the samples of step 2, the stream goes on with step 3's."""
    back = batches_of(index, course, "batch", starts=[(1, 32)])
    assert_same(back[0], whole["batch"][3])


@pytest.mark.parametrize("mode", ["batch", "elem"])
def test_lam_is_the_same_on_any_number_of_ranks(
    mode: str, index: Index, course: Course, whole: dict[str, list[Batch]]
) -> None:
    world = World(rank=1, size=2)
    for mine, batch in zip(batches_of(index, course, mode, world=world), whole[mode], strict=True):
        assert torch.equal(mine.ids, batch.ids[1::2])
        assert torch.equal(mine.lam, batch.lam[1::2])
