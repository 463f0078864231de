"""Every validation image counts once, on any number of ranks."""

import os
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor

from tests.spawn import spawn
from trainyard.config import RunConfig, load_recipe
from trainyard.data.datasets import Feeds
from trainyard.data.index import Index
from trainyard.data.indexing import open_index
from trainyard.train.evaluate import Evaluation, evaluate
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


def evaluate_all(world: World, places: dict[str, Path]) -> dict[str, Evaluation]:
    torch.set_num_threads(1)
    return {name: evaluate_one(world, open_index(str(path))) for name, path in places.items()}


def evaluate_one(world: World, index: Index) -> Evaluation:
    config = recipe()
    device = torch.device("cpu")
    feeds = Feeds(
        data=config.data,
        augment=config.augment,
        global_batch=config.batch.size,
        seed=0,
        channels_last=True,
        world=world,
        device=device,
    )
    model = build(len(index.classes))
    with feeds.evaluation(index) as feed:
        result = evaluate(model, feed, world=world, device=device)
    assert model.training  # as it was before
    return result


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


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_equal_to_a_plain_evaluation(
    size: int, places: dict[str, Path], expected: dict[str, Evaluation]
) -> None:
    for results in spawn(evaluate_all, size, places):
        for name, result in results.items():
            reference = expected[name]
            assert (result.samples, result.bad) == (reference.samples, reference.bad), name
            assert result.top1 == pytest.approx(reference.top1, rel=1e-12), name
            assert result.top5 == pytest.approx(reference.top5, rel=1e-12), name
            assert result.loss == pytest.approx(reference.loss, rel=1e-5), name


def test_the_plain_evaluation_tells_something(expected: dict[str, Evaluation]) -> None:
    assert expected["digits"].samples == 364
    assert 0 < expected["digits"].top1 < expected["digits"].top5 < 1
    assert expected["three images"].samples == 3
    assert expected["three images"].top5 == 1  # of three classes all are among the best five
    assert expected["two damaged"].bad == NUM_BAD
