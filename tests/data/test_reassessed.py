"""Labels made anew belong to images by the numbers in their names, in every format."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run
from tests.data.looks import silent
from tests.errors import raises
from tests.mini_imagenet import MiniImageNet, write_mini_imagenet
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.real_labels import read_labels
from trainyard.data.index.splits import find_splits
from trainyard.data.reading.reader import Reader
from trainyard.datasets.prepare.imagenet import prepare_imagenet_1k
from trainyard.datasets.prepare.preparation import Preparation

NUM_VAL, NUM_CLASSES = 20, 5


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> MiniImageNet:
    return write_mini_imagenet(tmp_path_factory.mktemp("archives"))


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Labels that spell each image's number to the base of five; the tenth has none."""
    return write(tmp_path, [of(number) for number in range(1, NUM_VAL + 1)])


def write(folder: Path, tree: Any) -> Path:
    path = folder / "real.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def of(number: int) -> list[int]:
    return [] if number == 10 else [number // 5, number % 5]


def prepared(mini: MiniImageNet, folder: Path, kind: str, samples: int | None = None) -> str:
    """The location of the validation data, in shards of so many samples."""
    preparation = Preparation(folder, silent, format=kind, checksum=False, shard_samples=samples)
    prepare_imagenet_1k(mini.folder, preparation, repair=False)
    return find_splits(str(folder))["val"]


@pytest.fixture(scope="module")
def shards(mini: MiniImageNet, tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(mini, tmp_path_factory.mktemp("shards") / "data", "webdataset")


@pytest.mark.parametrize(("kind", "samples"), [("webdataset", 3), ("hdf5", None), ("folder", None)])
def test_each_image_gets_its_own_labels(
    kind: str, samples: int | None, mini: MiniImageNet, real: Path, tmp_path: Path
) -> None:
    index = open_index(prepared(mini, tmp_path / "data", kind, samples))
    number_of = {
        image: int(re.sub(r"\D", "", name.removeprefix("ILSVRC2012")))
        for images in mini.val.values()
        for name, image in images.items()
    }
    labels, reader = read_labels(real, index), Reader(index)
    assert len(labels) == NUM_VAL
    for sample in range(NUM_VAL):
        assert labels[sample] == of(number_of[reader.read(sample)])


def test_a_folder_may_have_some_of_the_images(
    mini: MiniImageNet, real: Path, tmp_path: Path
) -> None:
    val = Path(prepared(mini, tmp_path / "data", "folder"))
    for path in val.glob("*/ILSVRC2012_val_0000000*"):
        path.unlink()
    index = open_index(str(val))
    assert sorted(read_labels(real, index)) == sorted(of(n) for n in range(10, NUM_VAL + 1))


def test_images_whose_numbers_are_not_known(
    mini: MiniImageNet, shards: str, real: Path, tmp_path: Path
) -> None:
    named = prepared(mini, tmp_path / "files", "folder")
    packed = tmp_path / "packed"  # in an order of its own
    assert run("data", "pack", shards, packed, "--format", "webdataset") == 0
    renamed = Path(shutil.copytree(named, tmp_path / "renamed"))
    first = next(renamed.glob("*/*_*"))
    first.rename(first.with_name("cat.jpg"))
    train = find_splits(str(Path(shards).parent))["train"]
    indices = [open_index(str(where)) for where in (*packed.glob("*.tar"), renamed, train)]
    for index in (*indices, open_merged([named, str(renamed)], None)):
        with raises("labels.unknown-image-numbers", path=real):
            read_labels(real, index)


@pytest.mark.parametrize(
    ("tree", "code", "fields"),
    [
        ("[", "file.unreadable", {}),
        ({"1": [2]}, "labels.not-a-list", {}),
        ([[1]] * 19, "labels.too-few", {"num_labels": 19, "number": 20}),
        ([[1]] * 19 + [5], "labels.not-class-numbers", {"value": "5", "number": 20}),
        ([[1], [5]], "labels.not-class-numbers", {"number": 2}),
        ([[-1]], "labels.not-class-numbers", {"number": 1}),
        ([[True]], "labels.not-class-numbers", {"number": 1}),
        ([["n02119789"]], "labels.not-class-numbers", {"number": 1}),
    ],
)
def test_files_of_other_labels(
    tree: Any, code: str, fields: dict[str, object], shards: str, tmp_path: Path
) -> None:
    index = open_index(shards)
    path = write(tmp_path, tree)
    with raises(code, **fields):
        read_labels(path, index)
