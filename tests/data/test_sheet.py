"""Contact sheets: the same everywhere, every tile where it belongs, damage shown as such."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFont
from sklearn.datasets import load_sample_images

from tests.command_line import shown
from tests.data.tars import Patch
from tests.errors import check, refused
from trainyard.config import load_recipe
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.data.order import training_plan
from trainyard.datasets import augmented
from trainyard.datasets.contact_sheet import (
    Tile,
    contact_sheet,
    random_samples,
    save_sheet,
    shortened,
)
from trainyard.run.build import build_feeds, build_run_course
from trainyard.world import World

TITLE = ("photos  ·  train", "8 of 8 images")
COLOURS = {"red": (220, 30, 30), "green": (20, 160, 40), "blue": (30, 40, 200)}


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Per class five plain images of its colour, as wide as they are not high, and one broken."""
    root = tmp_path_factory.mktemp("coloured")
    for name, colour in COLOURS.items():
        (root / name).mkdir()
        for number in range(5):
            Image.new("RGB", (300, 100 + 20 * number), colour).save(root / name / f"{number}.png")
    (root / "blue" / "5.png").write_bytes(b"this is not an image")
    return open_index(str(root))


def pixels(sheet: Image.Image) -> NDArray[np.int64]:
    return np.asarray(sheet).astype(np.int64)


def near(sheet: Image.Image, colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    """bool[height, width]: where the sheet has a colour."""
    is_near: NDArray[np.bool_] = np.abs(pixels(sheet) - colour).sum(axis=2) < 12
    return is_near


# --- which samples ---


def test_samples_are_random_and_the_same_everywhere(digits: Path) -> None:
    index = open_index(str(digits / "train"))
    samples = random_samples(index, 6, seed=0)
    assert samples.tolist() == [221, 1002, 848, 1161, 61, 1378]  # on any machine
    assert random_samples(index, 3, seed=0).tolist() == samples[:3].tolist()
    assert random_samples(index, 6, seed=1).tolist() != samples.tolist()
    everything = random_samples(index, 10_000, seed=0)
    assert sorted(everything.tolist()) == list(range(1433))


def test_samples_of_one_class(coloured: Index) -> None:
    green = coloured.classes.index("green")
    samples = random_samples(coloured, 100, seed=3, label=green)
    assert sorted(samples.tolist()) == np.flatnonzero(coloured.label == green).tolist()
    assert len(random_samples(coloured, 100, 3, label=17)) == 0


# --- what a sheet looks like ---


def test_every_tile_is_where_it_belongs(coloured: Index) -> None:
    order = [int(np.flatnonzero(coloured.label == coloured.classes.index(n))[0]) for n in COLOURS]
    sheet = contact_sheet(coloured, np.array(order), 2, TITLE)
    assert 0.8e6 < sheet.width * sheet.height < 2e6
    middles = []
    for colour in COLOURS.values():
        rows, columns = np.nonzero(near(sheet, colour))
        # The whole image, 3 to 1, and nothing else.
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert len(rows) == height * width
        assert width / height == pytest.approx(3, abs=0.05)
        middles.append((rows.mean(), columns.mean()))
    (red, green, blue) = middles
    assert red[0] == green[0] < blue[0]  # rows of two
    assert red[1] == blue[1] < green[1]


def test_a_broken_image_has_its_reason_in_its_place(coloured: Index) -> None:
    broken = 5  # blue comes first
    assert coloured.locate(broken)[0].endswith("5.png")
    red = (0xC6, 0x28, 0x28)
    assert not near(contact_sheet(coloured, np.array([0]), 1, TITLE), red).any()
    rows, columns = np.nonzero(near(contact_sheet(coloured, np.array([broken]), 1, TITLE), red))
    assert 50 < len(rows) < 2000
    tile = slice(88, 88 + 400), slice(24, 24 + 400)
    for places, side in ((rows, tile[0]), (columns, tile[1])):
        assert side.start <= places.min() and places.max() < side.stop
        assert abs((places.min() + places.max()) / 2 - (side.start + side.stop) / 2) < 20


def test_small_images_keep_their_pixels(digits: Path) -> None:
    """Blown up, not blurred: as many shades as there were."""
    index = open_index(str(digits / "train"))
    sheet = pixels(contact_sheet(index, np.array([0]), 1, TITLE))
    rows, columns = np.nonzero((sheet == 0).all(axis=2))
    inside = sheet[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1, 0]
    original = np.asarray(Image.open(index.locate(0)[0]))
    assert set(np.unique(inside)) <= set(np.unique(original))


def test_large_photographs_are_scaled_down(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    photo = Image.fromarray(load_sample_images().images[0])
    photo.resize((4000, 500)).save(tmp_path / "place" / "wide.jpg")
    sheet = contact_sheet(open_index(str(tmp_path)), np.arange(1), 8, TITLE)
    tile = pixels(sheet)[88 : 88 + 400, 24 : 24 + 400]
    is_ground = (tile == tile[0, 0]).all(axis=(1, 2))
    assert 45 <= (~is_ground).sum() <= 55  # 400 x 50 of 4000 x 500
    assert not is_ground[180:220].any()  # in the middle


def test_names_are_shortened_to_fit() -> None:
    font = ImageFont.load_default(14)
    assert shortened("cat", font, 100) == "cat"
    short = shortened("a very long name of a class", font, 100)
    assert short.endswith("…")
    assert short[:-1] == "a very long name of a class"[: len(short) - 1]
    assert 70 < font.getlength(short) <= 100
    assert shortened("new\nline", font, 100) == "new\ufffdline"


def test_a_sheet_appears_whole_or_not_at_all(
    coloured: Index, tmp_path: Path, monkeypatch: Patch
) -> None:
    sheet = contact_sheet(coloured, np.arange(8), 4, TITLE)
    save_sheet(tmp_path / "sheet.png", sheet)
    with Image.open(tmp_path / "sheet.png") as again:
        assert again.format == "PNG"
        assert (pixels(again) == pixels(sheet)).all()
    with pytest.raises(OSError):
        save_sheet(tmp_path / "missing" / "sheet.png", sheet)
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]


# --- data show --augmented: the images of training, by its loader and its feed ---

CPU = torch.device("cpu")
AUGMENTED = {
    "augment.randaugment": "rand-m9-mstd0.5-inc1",
    "augment.erasing": "0.5",
    "batch.size": "64",
}


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The images that a sheet draws."""
    drawn: list[Tile] = []

    def note(found: list[Tile], columns: int, title: Any, **options: int) -> Image.Image:
        drawn.extend(found)
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(augmented, "sheet_of", note)
    return drawn


def augmented_sheet_of(digits: Path, visits: int, **keys: str) -> list[int]:
    index = open_index(str(digits / "train"))
    changes = AUGMENTED | {key.replace("__", "."): value for key, value in keys.items()}
    feeds = build_feeds(load_recipe("digits", changes), World(), CPU)
    samples = random_samples(index, 3, seed=0)
    augmented.augmented_sheet(index, samples, feeds, visits=visits, title=("", ""))
    return [int(sample) for sample in samples]


def test_the_pixels_are_those_of_a_run(digits: Path, tiles: list[Tile]) -> None:
    """Crops, RandAugment and erasing of the first two epochs."""
    samples = augmented_sheet_of(digits, 2)
    config = load_recipe("digits", AUGMENTED | {"run.length": "46 steps"})
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


def test_the_first_batch_is_that_of_a_run(digits: Path, tiles: list[Tile]) -> None:
    """Its order, crops and partners of mixing; of a larger batch only the beginning is read."""
    config = load_recipe("digits", AUGMENTED | {"augment.mixup": "1.0", "data.balance": "0.5"})
    index = open_index(str(digits / "train"))
    plan = training_plan(config.data, index, global_batch=64, seed=0)
    feeds = build_feeds(config, World(), CPU)
    with feeds.train(index, plan, build_run_course(config, len(index))) as feed:
        feed.seek(0, 0)
        wanted = [*augmented._tiles(next(iter(feed)), index, feeds)]
    augmented.first_batch(index, plan, feeds, size=config.data.image_size, count=9, title=("", ""))
    assert len(tiles) == 9 and any("%" in tile.name for tile in tiles)
    for tile, other in zip(tiles, wanted, strict=False):
        assert tile[1:] == other[1:]
        assert np.array_equal(np.asarray(tile.picture), np.asarray(other.picture))


def test_mixed_images_name_their_shares(digits: Path, tiles: list[Tile]) -> None:
    augmented_sheet_of(digits, 4, augment__mixup="1.0", augment__mix_mode="elem")
    mixed = [tile.name for tile in tiles if "%" in tile.name]
    assert mixed
    for name in mixed:
        shares = [int(part.partition("%")[0]) for part in name.split(", ")]
        assert abs(sum(shares) - 100) <= 1


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_grey_and_colour(channels: int, mode: str) -> None:
    assert augmented._image(np.zeros((4, 5, channels), np.uint8)).mode == mode


def test_the_command_of_an_augmented_sheet(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sheet.png"
    base = ("data", "show", digits, "--rows", "2", "--columns", "3")
    ours = ("--augmented", "digits", "--augment.flip", "1", "--data.threads", "1")
    assert str(path) in shown(capsys, *base, "--out", path, *ours)
    with Image.open(path) as image:
        assert image.width > image.height  # a column for the stored image, and three visits
    check(refused("data", "show", digits, "--augmented", "digits"), "option.needs-sheet")
    error = refused(*base, "--out", path, "--augment.flip", "1")
    check(error, "option.needs-augmented", key="augment.flip")
