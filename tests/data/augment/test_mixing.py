"""mixup and CutMix against timm's, given the same random numbers, and their distribution."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm.data.mixup
import torch
from numpy.typing import NDArray
from scipy import stats
from timm.loss import SoftTargetCrossEntropy
from torch.nn import functional as F

from tests.data.batches import batch_of_images
from tests.data.tars import Patch
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.mixing import Mixing, symmetric_beta
from trainyard.data.batch import Batch, Keys
from trainyard.data.rng import fold_in, uniforms
from trainyard.training.config import LossConfig
from trainyard.training.losses import build_loss

torch.set_num_threads(1)

CLASSES = 7
BOTH = {"mixup": 0.8, "cutmix": 1.0}


def config(**keys: Any) -> AugmentConfig:
    return AugmentConfig(**keys)


def batch_of(count: int, *, size: tuple[int, int] = (13, 16), bad: tuple[int, ...] = ()) -> Batch:
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    weights = torch.ones(count)
    weights[list(bad)] = 0
    images = torch.randn(count, 3, 13, 16, generator=generator)
    return batch_of_images(images, labels, weights)


def keys_of(count: int, *, visit: int = 0, position: int = 0) -> Keys:
    ids = np.random.default_rng(visit).permutation(10 * count)[:count].astype(np.int64)
    return Keys(ids, np.full(count, visit), position)


def mix(settings: AugmentConfig, batch: Batch, keys: Keys, seed: int = 5) -> Batch:
    copy = replace(batch, images_BCHW=batch.images_BCHW.clone())
    return Mixing(settings, seed=seed)(copy, keys)


def dense(batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
    own, other = (
        F.one_hot(labels, CLASSES).float() for labels in (batch.labels, batch.mixed_labels)
    )
    lam = batch.lam[:, None]
    return (1 - smoothing) * (lam * own + (1 - lam) * other) + smoothing / CLASSES


# --- equal to timm ---


class FakeRandom:
    """numpy.random as timm.data.mixup uses it, with numbers handed in: a row of six per draw."""

    def __init__(self, random: NDArray[np.float64], settings: AugmentConfig) -> None:
        self.random, self.settings = random, settings
        self.scalar = settings.mix_mode == "batch"
        both = settings.mixup > 0 and settings.cutmix > 0
        # The order of timm's calls of rand(): of a batch first whether to mix, then how.
        self.chances = [0, 1] if self.scalar else ([1, 0] if both else [0])
        self.next_row = self.next_side = 0
        if not self.scalar:
            self.rows = iter(self.cut_rows())

    def cut_rows(self) -> list[int]:
        """The draws for which timm will ask for a box, in order; those not mixed it passes over."""
        settings = self.settings
        cut = self.random[:, 1] < (settings.switch_prob if settings.mixup else 1)
        return [
            row
            for row in range(len(self.random))
            if cut[row] and settings.cutmix and self.random[row, 0] < settings.mix_prob
        ]

    def answer(self, column: NDArray[np.float64]) -> Any:
        return float(column[0]) if self.scalar else column

    def rand(self, *size: int) -> Any:
        return self.answer(self.random[:, self.chances.pop(0)])

    def beta(self, a: float, b: float, size: int | None = None) -> Any:
        assert a == b
        alpha = np.full(len(self.random), a)
        return self.answer(symmetric_beta(alpha, self.random[:, 2], self.random[:, 3]))

    def randint(self, low: int, high: int, size: int | None = None) -> int:
        assert low == 0
        if self.next_side == 0:
            self.row = 0 if self.scalar else next(self.rows)
        centre = self.random[self.row, 4 + self.next_side]
        self.next_side = 1 - self.next_side
        return int(high * centre)


def timms(
    monkeypatch: Patch,
    settings: AugmentConfig,
    batch: Batch,
    random: NDArray[np.float64],
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and dense targets of timm, which draws `random`."""
    fake = SimpleNamespace(**{name: getattr(np, name) for name in dir(np) if name[0] != "_"})
    fake.random = FakeRandom(random, settings)
    monkeypatch.setattr(timm.data.mixup, "np", fake)
    mixup: Any = timm.data.mixup.Mixup(  # type: ignore[no-untyped-call]
        settings.mixup,
        settings.cutmix,
        prob=settings.mix_prob,
        switch_prob=settings.switch_prob,
        mode=settings.mix_mode,
        label_smoothing=smoothing,
        num_classes=CLASSES,
    )
    images, targets = mixup(batch.images_BCHW.clone(), batch.labels)
    return images, targets


def draws(settings: AugmentConfig, keys: Keys, seed: int) -> NDArray[np.float64]:
    """The uniform numbers of a batch: a row for each draw that timm makes."""
    if settings.mix_mode == "batch":
        return uniforms(fold_in(seed, np.array([8]), np.array([keys.position])), 6)
    count = len(keys.ids) // (2 if settings.mix_mode == "pair" else 1)
    return uniforms(fold_in(seed, np.full(count, 8), keys.visits[:count], keys.ids[:count]), 6)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize(
    "kind",
    [{"mixup": 0.8}, {"cutmix": 1.0}, BOTH, BOTH | {"mix_prob": 0.6, "switch_prob": 0.3}],
    ids=["mixup", "cutmix", "both", "not always"],
)
def test_images_and_targets_are_timms(
    mode: str, kind: dict[str, float], monkeypatch: Patch
) -> None:
    settings = config(mix_mode=mode, **kind)
    mixed = 0
    for number in range(20):
        batch, keys = batch_of(12), keys_of(12, visit=number, position=12 * number)
        found = mix(settings, batch, keys, seed=number)
        random = draws(settings, keys, seed=number)
        images, targets = timms(monkeypatch, settings, batch, random, smoothing=0.1)
        torch.testing.assert_close(found.images_BCHW, images, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(dense(found, 0.1), targets, rtol=1e-6, atol=1e-6)
        mixed += int((found.lam < 1).sum())
        if "mixup" not in kind:  # lam is what is left of an image
            own = (found.images_BCHW == batch.images_BCHW)[:, 0].float().mean(dim=(1, 2))
            torch.testing.assert_close(own, found.lam)
        if mode == "pair":
            assert torch.equal(found.lam, found.lam.flip(0))
        logits = torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(number))
        losses = build_loss(LossConfig(), 0.1, teacher=None)(logits, found)
        expected = SoftTargetCrossEntropy()(logits, targets)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(losses.mean(), expected, rtol=1e-6, atol=1e-6)
        plain = mix(settings.model_copy(update={"mix_prob": 0.0}), batch, keys)
        assert torch.equal(plain.images_BCHW, batch.images_BCHW)
        assert torch.equal(plain.lam, torch.ones(12))
    assert mixed > 50


# --- distribution ---


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 30.0])
def test_beta_draws_are_of_the_beta_distribution(alpha: float) -> None:
    random = np.random.default_rng(1).random((2, 100_000))
    drawn = symmetric_beta(np.full(100_000, alpha), *random)
    assert np.isfinite(drawn).all()
    assert (drawn >= 0).all()
    assert (drawn <= 1).all()
    quantiles = np.linspace(0.05, 0.95, 19)
    expected = stats.beta.ppf(quantiles, alpha, alpha)
    shares = [(drawn <= value).mean() for value in expected]
    # The standard error of such a share is 0.0016; a value that many draws share is a step.
    distinct = (expected > 1e-9) & (expected < 1 - 1e-9)
    np.testing.assert_allclose(np.array(shares)[distinct], quantiles[distinct], atol=0.006)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.02)


def test_draws_at_the_ends_of_the_uniform_numbers_are_finite() -> None:
    ends = np.array([0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53])
    radius, angle = np.meshgrid(ends, ends)
    for alpha in (0.001, 0.2, 1.0, 1000.0):
        drawn = symmetric_beta(np.full(radius.shape, alpha), radius, angle)
        assert ((drawn >= 0) & (drawn <= 1)).all()


# --- keys ---


def test_a_batch_is_keyed_by_its_position_alone() -> None:
    settings = config(**BOTH)
    batch = batch_of(8)
    one, other = (mix(settings, batch, keys_of(8, visit=visit, position=64)) for visit in (0, 1))
    assert torch.equal(one.images_BCHW, other.images_BCHW)
    lams = {float(mix(settings, batch, keys_of(8, position=p)).lam[0]) for p in range(0, 640, 64)}
    assert len(lams) == 10
    assert float(mix(settings, batch, keys_of(8, position=64), seed=6).lam[0]) not in lams


def test_samples_are_keyed_by_visit_and_id_alone() -> None:
    """In another share of the batch a sample has other partners, but the same lam."""
    settings = config(mixup=0.8, mix_mode="elem")
    batch, keys = batch_of(12), keys_of(12, visit=3, position=0)
    whole = mix(settings, batch, keys)
    for rank in range(2):
        rows = slice(rank, None, 2)
        part = batch_of_images(batch.images_BCHW[rows], batch.labels[rows], batch.weights[rows])
        share = mix(settings, part, Keys(keys.ids[rank::2], keys.visits[rank::2], 999))
        assert torch.equal(share.lam, whole.lam[rank::2])
    again = mix(settings, batch, keys._replace(visits=keys.visits + 1))
    assert (again.lam != whole.lam).all()
    assert len(set(whole.lam.tolist())) == 12


# --- odd shares, bad samples, layouts ---


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("count", [1, 7])
def test_the_middle_of_an_odd_share_is_its_own_partner(mode: str, count: int) -> None:
    batch = batch_of(count)
    found = mix(config(mixup=1.0, mix_mode=mode), batch, keys_of(count))
    middle = count // 2
    torch.testing.assert_close(found.images_BCHW[middle], batch.images_BCHW[middle])
    assert found.mixed_labels[middle] == found.labels[middle]
    assert torch.equal(found.mixed_labels, batch.labels.flip(0))


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_a_sample_with_a_bad_partner_is_not_mixed(mode: str, kind: dict[str, float]) -> None:
    settings = config(mix_mode=mode, **kind)
    whole = mix(settings, batch_of(8), keys_of(8))
    batch = batch_of(8, bad=(1, 5))
    found = mix(settings, batch, keys_of(8))
    spared = [6, 2]
    assert torch.equal(found.images_BCHW[spared], batch.images_BCHW[spared])
    assert found.lam[spared].tolist() == [1, 1]
    assert torch.equal(found.mixed_labels[spared], batch.labels[spared])
    assert torch.equal(found.weights, batch.weights)
    others = [0, 3, 4, 7]
    assert torch.equal(found.images_BCHW[others], whole.images_BCHW[others])
    assert torch.equal(found.lam[others], whole.lam[others])


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", [{"mixup": 0.8}, {"cutmix": 1.0}, BOTH])
def test_images_are_mixed_in_place_in_their_layout(mode: str, kind: dict[str, float]) -> None:
    settings = config(mix_mode=mode, **kind)
    batch = batch_of(6)
    expected = mix(settings, batch, keys_of(6))
    images = batch.images_BCHW.clone(memory_format=torch.channels_last)
    found = Mixing(settings, seed=5)(replace(batch, images_BCHW=images), keys_of(6))
    assert found.images_BCHW is images
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, expected.images_BCHW)
    assert not torch.equal(images, batch.images_BCHW)
