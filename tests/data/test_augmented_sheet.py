"""`data show --augmented`: the sheet has the images of training, by its loader and its feed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.command_line import shown
from tests.errors import check, refused
from trainyard.config import load_recipe
from trainyard.data.index.build import open_index
from trainyard.data.order import training_plan
from trainyard.datasets import augmented
from trainyard.datasets.contact_sheet import Tile, random_samples
from trainyard.run.build import build_feeds, build_run_course
from trainyard.world import World

CPU = torch.device("cpu")
KEYS = {"augment.randaugment": "rand-m9-mstd0.5-inc1", "augment.erasing": "0.5", "batch.size": "64"}


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The images that a sheet draws."""
    drawn: list[Tile] = []

    def note(found: list[Tile], columns: int, title: Any, *, count: int) -> Image.Image:
        drawn.extend(found)
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(augmented, "sheet_of", note)
    return drawn


def sheet(digits: Path, visits: int, **keys: str) -> list[int]:
    index = open_index(str(digits / "train"))
    changes = KEYS | {key.replace("__", "."): value for key, value in keys.items()}
    feeds = build_feeds(load_recipe("digits", changes), World(), CPU)
    samples = random_samples(index, 3, seed=0)
    augmented.augmented_sheet(index, samples, feeds, visits=visits, title=("", ""))
    return [int(sample) for sample in samples]


def test_the_pixels_are_those_of_a_run(digits: Path, tiles: list[Tile]) -> None:
    """Crops, RandAugment and erasing of the first two epochs, with batches of 64."""
    samples = sheet(digits, 2)
    config = load_recipe("digits", KEYS | {"run.length": "46 steps"})
    index = open_index(str(digits / "train"))
    plan = training_plan(config.data, index, global_batch=64, seed=0)
    found: dict[tuple[int, int], torch.Tensor] = {}
    feeds = build_feeds(config, World(), CPU)
    with feeds.train(index, plan, build_run_course(config, len(index))) as feed:
        feed.seek(0, 0)
        for batch in feed:
            for row, (sample, epoch) in enumerate(zip(batch.ids, batch.epochs, strict=True)):
                found[int(sample), int(epoch)] = batch.images_BCHW[row]
    mean, std = (torch.tensor(of).view(-1, 1, 1) for of in (config.data.mean, config.data.std))
    for row, sample in enumerate(samples):
        stored, *seen = tiles[3 * row : 3 * row + 3]
        assert stored.detail.startswith(f"#{sample} ")
        for epoch, tile in enumerate(seen):
            image = found[sample, epoch] * std + mean
            expected = image.clamp(0, 1).mul(255).permute(1, 2, 0).numpy()
            assert np.abs(np.asarray(tile.picture) - expected).max() < 1
            assert (tile.name, tile.detail) == (stored.name, f"epoch {epoch + 1}")
    assert not np.array_equal(np.asarray(tiles[1].picture), np.asarray(tiles[2].picture))


def test_mixed_images_name_their_shares(digits: Path, tiles: list[Tile]) -> None:
    sheet(digits, 4, augment__mixup="1.0", augment__mix_mode="elem")
    mixed = [tile.name for tile in tiles if "%" in tile.name]
    assert mixed
    for name in mixed:
        shares = [int(part.partition("%")[0]) for part in name.split(", ")]
        assert abs(sum(shares) - 100) <= 1


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_grey_and_colour(channels: int, mode: str) -> None:
    assert augmented._image(np.zeros((4, 5, channels), np.uint8)).mode == mode


def test_the_command(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sheet.png"
    base = ("data", "show", digits, "--rows", "2", "--columns", "3")
    ours = ("--augmented", "digits", "--augment.flip", "1", "--data.threads", "1")
    assert str(path) in shown(capsys, *base, "--sheet", path, *ours)
    with Image.open(path) as image:
        assert image.width > image.height  # a column for the stored image, and three visits
    check(refused("data", "show", digits, "--augmented", "digits"), "option.needs-sheet")
    error = refused(*base, "--sheet", path, "--augment.flip", "1")
    check(error, "option.needs-augmented", key="augment.flip")
