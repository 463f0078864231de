"""Troubles that people reported of other trainers, tried on this one: the right data, or an error.

Each test names its reports. Images say the class that they are of, so a sample under another class
is found wherever the labels come from.
"""

import csv
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.tars import write_files, write_tar
from tests.errors import raises
from tests.images import encode
from trainyard.data.config import DataConfig
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import merged_splits
from trainyard.data.open_datasets import open_datasets
from trainyard.data.stream.shards import Stream
from trainyard.errors import DataError
from trainyard.world import World

Samples = list[tuple[str, str]]  # the class that an image says, and the one that it counts for


def image(class_name: str, number: int = 0) -> bytes:
    """A picture with its class in a comment, and other bytes for every number."""
    pixels = np.full((8, 8, 3), number % 256, np.uint8)
    return encode(Image.fromarray(pixels), comment=f"<{class_name}>")


def write_classes(
    folder: Path, classes: Iterable[str], count: int = 3, first: int = 0, suffix: str = ".jpg"
) -> None:
    """A folder per class; images of other `first` numbers are other images."""
    for class_name in classes:
        for number in range(first, first + count):
            write_files(folder / class_name, {f"{number}{suffix}": image(class_name, number)})


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def opened(**keys: Any) -> dict[str, Samples]:
    """The samples of both splits, under the classes that a run trains and scores them as."""
    data = open_datasets(DataConfig(**keys), World(), lambda *_: None)
    assert not isinstance(data.train, Stream)
    result: dict[str, Samples] = {}
    for split, index in (("train", data.train), ("val", data.val)):
        rows = []
        for sample in range(len(index)):
            path, offset, size = index.locate(sample)
            content = Path(path).read_bytes()[offset : offset + size]
            said = content.partition(b"<")[2].partition(b">")[0].decode()
            rows.append((said, data.train.classes[index.label[sample]]))
        result[split] = rows
    return result


def opened_whole(location: Path) -> dict[str, Samples]:
    """The samples of the splits that `--data` finds."""
    return opened(**merged_splits([str(location)]))


def right_or_refused(samples: dict[str, Samples]) -> None:
    assert all(said == counted for rows in samples.values() for said, counted in rows)


# --- the classes of validation data ---


def test_a_class_without_validation_images_shifts_no_label(tmp_path: Path) -> None:
    """ultralytics#13936: four rotations, validation without 180: 90 was scored as 180."""
    rotations = ("0", "90", "180", "270")
    write_classes(tmp_path / "train", rotations)
    write_classes(tmp_path / "val", ("0", "90", "270"), first=10)
    try:
        samples = opened_whole(tmp_path)
    except DataError as error:
        assert "180" in str(error)
    else:
        right_or_refused(samples)


@pytest.mark.parametrize(
    ("train", "val"), [("abc", "bc"), ("abc", "bcd"), ("abc", "cab"), ("bcd", "abc")]
)
def test_other_classes_in_validation_are_never_scored_by_their_place(
    tmp_path: Path, train: str, val: str
) -> None:
    """ultralytics pull 26192; VGGFace2-pytorch#7: as many classes, or fewer, but others."""
    write_classes(tmp_path / "train", train)
    write_classes(tmp_path / "val", val, first=10)
    try:
        right_or_refused(opened_whole(tmp_path))
    except DataError as error:
        missing = set(train) ^ set(val)
        assert any(f"'{name}'" in str(error) for name in missing)


def test_numbers_in_a_list_are_the_folders_of_that_name(tmp_path: Path) -> None:
    """DIGITS#665, pytorch/vision#714, pytorch#22566: folders 0 to 11 sort as 0, 1, 10, 11, 2."""
    names = [str(number) for number in range(12)]
    write_classes(tmp_path / "train", names)
    write_classes(tmp_path / "others", names, first=10)
    rows = [(f"others/{name}/{number}.jpg", name) for name in names for number in range(10, 13)]
    listed = write_csv(tmp_path / "val.csv", [("path", "label"), *rows])
    right_or_refused(opened(train=str(tmp_path / "train"), val=str(listed)))


def test_numbers_in_shards_are_the_folders_of_that_name(tmp_path: Path) -> None:
    """ImageNetV2#10: folder 100 had label 2; here the other side are shards with numbers."""
    names = [str(number) for number in range(12)]
    write_classes(tmp_path / "train", names)
    members = []
    for key, name in enumerate(names):
        members += [(f"{key:03d}.jpg", image(name, 10)), (f"{key:03d}.cls", name.encode())]
    shard = write_tar(tmp_path / "val.tar", members)
    try:
        right_or_refused(opened(train=str(tmp_path / "train"), val=str(shard)))
    except DataError as error:
        assert "val.tar" in str(error)


# --- names of classes ---


def test_one_name_in_two_unicode_forms_is_one_class(tmp_path: Path) -> None:
    """renpy pull 2327, PFERD pull 141: macOS writes é as two characters, archives as one."""
    one, two = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    for split, name, first in (("train", one, 0), ("val", two, 10)):
        for number in range(3):
            write_files(tmp_path / split / name, {f"{number}.jpg": image("x", first + number)})
            write_files(tmp_path / split / "bar", {f"{number}.jpg": image("y", first + number)})
    samples = opened_whole(tmp_path)
    assert {counted for _, counted in samples["train"]} == {"bar", one}
    assert {counted for _, counted in samples["val"]} == {"bar", one}


@pytest.mark.parametrize("name", ["NA", "nan", "None", "null", "N/A", "True", "1e5", "NULL"])
def test_words_that_mean_nothing_to_a_table_are_classes(tmp_path: Path, name: str) -> None:
    """cellxgene#1111, pydatalab pull 398: the label NA became a missing value, its rows went."""
    write_classes(tmp_path, ("cat", name.replace("/", "_")))
    rows = [("cat/0.jpg", "cat"), (f"{name.replace('/', '_')}/0.jpg", name)]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    index = open_index(str(listed))
    assert (len(index), set(index.classes)) == (2, {"cat", name})


def test_zeros_before_a_number_make_another_class(tmp_path: Path) -> None:
    """molgenis-service-armadillo#1027: 001 was read as the number 1."""
    write_classes(tmp_path, ("a", "b"))
    rows = [("a/0.jpg", "001"), ("a/1.jpg", "1"), ("b/0.jpg", "01"), ("b/1.jpg", "1.0")]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    assert open_index(str(listed)).classes == ("001", "01", "1", "1.0")


# --- splits ---


def test_words_of_splits_in_names_of_images_are_only_words(tmp_path: Path) -> None:
    """datasets#5021: with "photo of a train.jpg" among them, all other images were passed over."""
    names = ("photo of a cat", "photo of a train", "photo of test tubes", "val")
    for class_name in ("cat", "thing"):
        write_files(
            tmp_path / class_name, {f"{n}.jpg": image(class_name, i) for i, n in enumerate(names)}
        )
    index = open_index(str(tmp_path))
    assert (len(index), index.classes) == (8, ("cat", "thing"))


def test_flat_validation_images_are_refused(tmp_path: Path) -> None:
    """pytorchnet#5: ImageNet's 50,000 validation images lay in one folder, beside train."""
    write_classes(tmp_path / "train", ("n01440764", "n01443537"))
    images = {f"ILSVRC2012_val_{n:08d}.JPEG": image("?", n) for n in range(4)}
    write_files(tmp_path / "val", images)
    with raises("data.missing-split", location=tmp_path, names="val"):
        opened_whole(tmp_path)


# --- files ---


# --- tars ---


# --- pixels ---
