"""Every validation image counts once, on any number of ranks."""

import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import pil_to_tensor

from tests import loaders
from tests.data.batches import batch_of_images
from tests.errors import raises
from tests.spawn import spawn, train_joined
from tests.steps import CPU
from trainyard.config import RunConfig, load_recipe
from trainyard.data.batch import Batch
from trainyard.data.device.feed import split
from trainyard.data.feeds import Feeds
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.run.labels import labels_of
from trainyard.training.evaluate import Evaluator, Views
from trainyard.training.predictions import NOWHERE, Evaluation, Predictions, summary
from trainyard.world import World

NUM_BAD = 2


@pytest.fixture(scope="module")
def places(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Validation data by name."""
    few = tmp_path_factory.mktemp("few")  # an image of each of three classes
    for label in "012":
        first = min((digits / "val" / label).iterdir())
        (few / label).mkdir()
        shutil.copy(first, few / label)
    damaged = tmp_path_factory.mktemp("damaged")
    shutil.copytree(digits / "val" / "3", damaged / "3")
    shutil.copytree(digits / "val" / "4", damaged / "4")
    for path in sorted(damaged.glob("4/*"))[:NUM_BAD]:
        os.truncate(path, 40)
    return {"digits": digits / "val", "three images": few, "two damaged": damaged}


def recipe() -> RunConfig:
    return load_recipe("digits", {"batch.size": "50", "data.crop_pct": "0.9"})


def build(num_classes: int) -> nn.Module:
    """Fixed weights; batch norm that would show in the result if it were left in training mode."""
    torch.manual_seed(3)
    model: nn.Module = timm.create_model("test_resnet", num_classes=num_classes)
    return model.train()


def evaluate_all(world: World, places: dict[str, Path]) -> dict[str, Predictions]:
    torch.set_num_threads(1)
    loaders.install_in_fork()
    return {name: evaluate_one(world, open_index(str(path))) for name, path in places.items()}


def evaluator_of(num_samples: int, **options: Any) -> Evaluator:
    given: dict[str, Any] = {"world": World(), "device": CPU, **options}
    return Evaluator(num_samples=num_samples, **given)


def evaluate_one(world: World, index: Index) -> Predictions:
    config = recipe()
    feeds = Feeds(
        data=config.data,
        augment=config.augment,
        global_batch=config.batch.size,
        seed=0,
        channels_last=True,
        world=world,
        device=CPU,
    )
    model = build(len(index.classes))
    with feeds.evaluation(index) as feed:
        models = {"": model, "twice": model}
        found = evaluator_of(len(index), world=world).predictions(models, feed)
    assert model.training  # as it was before
    assert all(map(np.array_equal, astuple(found[""]), astuple(found["twice"])))
    return found[""]


def plain_evaluation(folder: Path) -> Evaluation:
    """One image at a time, by Pillow, torch and counting."""
    data = recipe().data
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    model = build(len(classes)).eval()
    samples = top1 = top5 = bad = 0
    losses = []
    for path in sorted(folder.glob("*/*.png")):
        try:
            image = Image.open(path).convert("RGB")
        except OSError:
            bad += 1
            continue
        short = int(32 / 0.9)
        margin = round((short - 32) / 2)
        scale = image.width / short
        box = (margin * scale, margin * scale, (margin + 32) * scale, (margin + 32) * scale)
        image = image.resize((32, 32), Image.Resampling.BICUBIC, box=box)
        pixels = pil_to_tensor(image) / 255
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
        label = classes.index(path.parent.name)
        with torch.no_grad():
            logits = model(((pixels - mean) / std)[None])[0]
        order = logits.argsort(descending=True).tolist()
        samples += 1
        top1 += order[0] == label
        top5 += label in order[:5]
        losses.append(float(-logits.log_softmax(dim=0)[label]))
    return Evaluation(samples, bad, top1 / samples, top5 / samples, sum(losses) / samples)


@pytest.fixture(scope="module")
def expected(places: dict[str, Path]) -> dict[str, Evaluation]:
    return {name: plain_evaluation(path) for name, path in places.items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5])
def test_equal_to_a_plain_evaluation(
    size: int, places: dict[str, Path], expected: dict[str, Evaluation]
) -> None:
    for results in spawn(evaluate_all, size, places):
        for name, predictions in results.items():
            result = predictions.evaluation()
            reference = expected[name]
            assert (result.samples, result.bad) == (reference.samples, reference.bad), name
            assert result.top1 == pytest.approx(reference.top1, rel=1e-12), name
            assert result.top5 == pytest.approx(reference.top5, rel=1e-12), name
            # The decoder's pixels differ from Pillow's by at most 1 of 255.
            assert result.loss == pytest.approx(reference.loss, rel=1e-3), name


def summaries(world: World, places: dict[str, Path], listing: str) -> list[dict[str, Any]]:
    """All metrics, of one label for each image and of lists; ranks have unequal shares."""
    torch.set_num_threads(1)
    loaders.install_in_fork()
    config = recipe()
    feeds = Feeds(
        data=config.data,
        augment=config.augment,
        global_batch=51,
        seed=0,
        channels_last=True,
        world=world,
        device=CPU,
    )
    found = []
    for location in (str(places["digits"]), listing):
        index = open_index(location)
        with feeds.evaluation(index) as feed:
            evaluator = evaluator_of(len(index), world=world)
            has_lists = index.lists is not None
            judge: Any = evaluator.label_scores if has_lists else evaluator.predictions
            said = judge({"": build(len(index.classes))}, feed)
        found.append(summary(said, labels_of(index, len(index.classes))))
    return found


@pytest.mark.slow
def test_all_metrics_are_equal_on_any_number_of_ranks(
    places: dict[str, Path], listed_digits: Path
) -> None:
    """Also the means over classes: each rank sees only some samples of a class."""
    listing = f"{listed_digits}#val"
    ((single, several),) = spawn(summaries, 1, places, listing)
    for found in spawn(summaries, 3, places, listing):
        assert found == [pytest.approx(single, rel=1e-6), pytest.approx(several, rel=1e-6)]
    shares = ("balanced_accuracy", "macro_f1"), ("map", "macro_f1", "micro_f1")
    for metrics, keys in zip((single, several), shares, strict=True):
        assert all(0 < metrics[key] < 1 for key in keys)


def score_one_image(world: World) -> list[list[float]]:
    num = 1 if world.is_first else 0
    parts = split([batch_of_images(torch.ones(num, 5, 1, 1))], 4)
    (said,) = evaluator_of(1, world=world).label_scores({"": Look()}, parts).values()
    found: list[list[float]] = said.logits.tolist()
    return found


def test_virtual_ranks_score_labels_with_fewer_images_than_ranks() -> None:
    """A rank without an image had no scores, and a sum over ranks of another shape."""
    assert spawn(score_one_image, 2) == [[[1.0]] * 5] * 2


def test_the_plain_evaluation_tells_something(expected: dict[str, Evaluation]) -> None:
    assert expected["digits"].samples == 364
    assert 0 < expected["digits"].top1 < expected["digits"].top5 < 1
    assert expected["three images"].samples == 3
    assert expected["three images"].top5 == 1  # of three classes all are among the best five
    assert expected["two damaged"].bad == NUM_BAD


# --- scores that are given, with a sample or two per batch ---


class Look(nn.Module):
    """The scores that an image is; of a mirrored one the same, as they are one pixel wide."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW[:, :, 0, 0]


def batches(logits: Tensor, labels: Iterable[int], bad: Iterable[int] = ()) -> list[Batch]:
    """Batches whose images are the logits themselves, [B, C, 1, 1]."""
    found, num = torch.tensor(list(labels)), len(logits)
    weights = torch.tensor([float(sample not in bad) for sample in range(num)])
    order = torch.arange(num).flip(0)  # ids decide, not the order
    return [
        replace(batch_of_images(logits[part, :, None, None], found[part], weights[part]), ids=part)
        for part in torch.split(order, 2)
    ]


def judge(
    logits: Tensor,
    labels: Iterable[int],
    bad: Iterable[int] = (),
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> Predictions:
    given, num = batches(logits, labels, bad), len(logits)
    return evaluator_of(num, **options).predictions({"": model or Look()}, given)[""]


def test_of_equal_scores_the_lower_class_comes_first() -> None:
    said = judge(torch.zeros(8, 8), range(8))
    assert said.rank_of_truth.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert said.guess.tolist() == [0] * 8
    assert (said.evaluation().top1, said.evaluation().top5) == (1 / 8, 5 / 8)
    some = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 4)
    assert judge(some, range(4)).rank_of_truth.tolist() == [3, 1, 2, 4]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 2])  # the true class's score, or another's
def test_scores_that_are_not_finite_are_wrong(value: float, where: int) -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    logits[1, where] = value
    said = judge(logits, [0, 0])
    assert said.rank_of_truth.tolist() == [1, NOWHERE]
    assert said.guess.tolist() == [0, -1]
    assert said.not_finite() == 1
    found = said.evaluation()
    assert (found.samples, found.top1, found.top5) == (2, 0.5, 0.5)  # of three classes, too


def test_a_bad_sample_counts_for_nothing_whatever_its_scores() -> None:
    logits = torch.tensor([[9.0, 0.0], [math.nan, 0.0], [9.0, 0.0]])
    found = judge(logits, [0, 0, 1], bad=[1]).evaluation()
    assert (found.samples, found.bad, found.top1) == (2, 1, 0.5)
    assert found.loss == pytest.approx(4.5 + math.log(1 + math.exp(-9)), rel=1e-6)


def test_confidence_and_loss_are_of_the_softmax() -> None:
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    labels = [0, 1, 2, 3, 4, 0, 1, 2, 3]
    said = judge(logits, labels)
    probabilities = logits.double().softmax(dim=1)
    np.testing.assert_allclose(said.confidence, probabilities.amax(dim=1), rtol=1e-6)
    np.testing.assert_allclose(said.loss, -probabilities[range(9), labels].log().numpy(), rtol=1e-5)


def test_only_some_classes_take_part() -> None:
    logits = torch.tensor([[5.0, 1.0, 3.0, 2.0], [5.0, 1.0, 0.0, 2.0]])
    said = judge(logits, [0, 0], columns=torch.tensor([2, 3]))  # label 0 is logit 2
    assert said.rank_of_truth.tolist() == [1, 2]
    assert said.guess.tolist() == [0, 1]
    expected = logits[:, 2:].softmax(dim=1).amax(dim=1)
    np.testing.assert_allclose(said.confidence, expected, rtol=1e-6)


class Lopsided(nn.Module):
    """Scores that depend on which side is which."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW[:, :, 0, 0] - 0.5 * images_BCHW[:, :, 0, 1]


def test_a_flip_judges_the_mean_of_the_softmax() -> None:
    images = torch.randn(6, 4, 1, 2, generator=torch.Generator().manual_seed(1))
    batch = batch_of_images(images, torch.arange(6) % 4)
    models = {"": Lopsided()}
    said = evaluator_of(6, views=Views(True)).predictions(models, [batch])[""]
    model = Lopsided()
    both = (model(images).softmax(dim=1) + model(images.flip(3)).softmax(dim=1)) / 2
    assert said.guess.tolist() == both.argmax(dim=1).tolist()
    assert said.guess.tolist() != model(images).argmax(dim=1).tolist()
    np.testing.assert_allclose(said.confidence, both.amax(dim=1), rtol=1e-6)
    np.testing.assert_allclose(said.loss, -both[range(6), batch.labels].log(), rtol=1e-5)


def test_a_flip_scores_labels_by_the_mean_of_the_sigmoid() -> None:
    images = 4 * torch.randn(6, 4, 1, 2, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([1.0, 1, 1, 1, 1, 0])
    batch = replace(batch_of_images(images, weights=weights), ids=torch.arange(6).flip(0))
    models: dict[str, nn.Module] = {"": Lopsided()}
    said = evaluator_of(6, views=Views(True)).label_scores(models, [batch])[""]
    both = Lopsided()(images).sigmoid() + Lopsided()(images.flip(3)).sigmoid()
    expected = (both / 2).logit().T.flip(1)
    assert said.read.tolist() == [False, True, True, True, True, True]
    np.testing.assert_allclose(said.logits[:, 1:], expected[:, 1:], rtol=1e-4)


@pytest.mark.parametrize("scales", [(1.0, 2.0), (1.0, 1.5, 2.0), (2.0,)])
def test_scales_judge_the_mean_over_enlargements_of_the_middle(scales: tuple[float, ...]) -> None:
    images = torch.randn(6, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    batch = batch_of_images(images, torch.arange(6) % 4)
    model, views = Lopsided(), Views(True, scales)
    found = evaluator_of(6, views=views).predictions({"": model}, [batch])
    listed = evaluator_of(6, views=views).label_scores({"": model}, [batch])[""]
    expected, alone = [], []
    for scale in scales:
        rows = {1.0: slice(0, 6), 1.5: slice(1, 5), 2.0: slice(1, 4)}[scale]
        view = F.interpolate(images[:, :, rows, rows], (6, 6), mode="bilinear")
        for each in (view, view.flip(3)):
            expected.append(model(each).softmax(dim=1))
            alone.append(model(each).sigmoid())
    mean = torch.stack(expected).mean(dim=0)
    np.testing.assert_allclose(found[""].loss, -mean[range(6), batch.labels].log(), rtol=1e-5)
    logits = torch.stack(alone).mean(dim=0).logit().T
    np.testing.assert_allclose(listed.logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_views_keep_kind_and_size(dtype: torch.dtype, channels: int) -> None:
    images = torch.randn(2, channels, 7, 12).to(dtype, memory_format=torch.channels_last)
    views = [*Views(True, (1.0, 1.15, 100.0)).of(images)]
    assert len(views) == 6 and torch.equal(views[0], images)
    assert {(view.shape, view.dtype) for view in views} == {(images.shape, dtype)}
    torch.testing.assert_close(views[4], images[:, :, 3:4, 5:6].expand_as(images))


def test_the_forward_pass_has_the_precision_asked_for() -> None:
    seen = []

    class Linear(nn.Linear):
        def forward(self, images_BCHW: Tensor) -> Tensor:
            scores = super().forward(images_BCHW[:, :, 0, 0])
            seen.append(scores.dtype)
            return scores

    said = judge(torch.ones(2, 4), [0, 1], model=Linear(4, 4), precision=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    assert said.loss.dtype == np.float32


def test_without_samples_nothing_breaks() -> None:
    found = evaluator_of(3).predictions({"": Look()}, [])[""].evaluation()
    assert found == Evaluation(samples=0, bad=3, top1=0, top5=0, loss=0)


def evaluate_run(world: World, config: RunConfig, folder: Path) -> list[dict[str, float]]:
    """A run whose second rank scores a little differently, as another processor may."""

    def scored(*arguments: Any) -> dict[str, float]:
        found = dict(summary(*arguments))
        return found | {"top1": found["top1"] - 0.001 * world.rank}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainyard.run.trainer.summary", scored)
        outcome = train_joined(config, folder, world)
    return [outcome.last, outcome.best]


@pytest.mark.slow
def test_the_first_rank_decides_which_evaluation_is_the_best(digits: Path, tmp_path: Path) -> None:
    """Ranks that disagree about it wait for each other in the save of the best one."""
    config = load_recipe(
        "debug",
        {
            "data.train": f"{digits}/train",
            "data.val": f"{digits}/val",
            "data.threads": "1",
            "run.length": "2 steps",
            "run.eval_every": "1 step",
        },
    )
    one, other = spawn(evaluate_run, 2, config, tmp_path / "run")
    assert one == other


@pytest.mark.parametrize("scales", [(0.5,), (1.0, float("nan")), ()])
def test_views_are_no_smaller_than_the_image(scales: tuple[float, ...]) -> None:
    with raises("option.out-of-range", option="scales"):
        [*Views(scales=scales).of(torch.zeros(1, 3, 4, 4))]
