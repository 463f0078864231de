"""An image to validate on that is trained on is found before a run begins, and by `data verify`."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.looks import opened
from tests.data.streams import write_shards
from tests.data.tars import Patch, write_files
from tests.errors import raises
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.overlap import check_apart, hash_names, same_samples


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four shards of two images each."""
    write_shards(tmp_path / "shards", [2, 2, 2, 2], classes=2)
    return tmp_path / "shards"


JOIN = {"order": "join", "samples": 8}


def test_shards_of_their_own_are_taken(shards: Path) -> None:
    found = opened(f"{shards}/part-{{000..002}}.tar", f"{shards}/part-003.tar")
    assert (len(found.train), len(found.val)) == (6, 2)
    assert len(opened(f"{shards}/part-{{000..002}}.tar", f"{shards}/part-003.tar", **JOIN).val)


@pytest.mark.parametrize(
    ("train", "val", "options", "fields"),
    [
        ("{}/part-{{000..002}}.tar", "{}/part-{{002..003}}.tar", {}, {"num_shared": 2}),
        ("{}", "{}/../link.tar", {}, {"num_shared": 2, "num_images": 2}),
        (("{}/../other", "{}/*.tar"), "{}/part-003.tar", {}, {"num_shared": 2}),
        ("{}/part-{{000..003}}.tar", "{}/part-003.tar", JOIN, {"num_shared": 2}),
        ("{}/../folders", "{}/../folders/cat/val", {}, {"num_shared": 1}),
        ("{}/../linked/train", "{}/../linked/val", {}, {"num_shared": 1}),
        ("{}/../hard/train", "{}/../hard/val", {}, {"num_shared": 1}),
        ("{}/part-{{000..003}}.tar", "{}/../hard.tar", JOIN, {"num_shared": 2}),
    ],
    ids=[
        *("a shard", "a link", "one of several", "a stream", "a folder inside", "a linked image"),
        *("a hard link", "a hard link of a shard"),
    ],
)
def test_validation_images_that_are_training_images_are_named(
    shards: Path,
    tmp_path: Path,
    train: Any,
    val: str,
    options: dict[str, Any],
    fields: dict[str, object],
) -> None:
    (tmp_path / "link.tar").symlink_to(shards / "part-001.tar")
    write_shards(tmp_path / "other", [3], classes=2)
    write_files(tmp_path / "folders", ["cat/1.jpg", "cat/val/cat/2.jpg", "dog/1.jpg"])
    write_files(tmp_path / "linked", ["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/2.jpg"])
    (tmp_path / "linked/val/cat/3.jpg").symlink_to("../../train/cat/1.jpg")
    write_files(tmp_path / "hard", ["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/2.jpg"])
    (tmp_path / "hard/val/cat/3.jpg").hardlink_to(tmp_path / "hard/train/cat/1.jpg")
    (tmp_path / "hard.tar").hardlink_to(shards / "part-001.tar")
    place = str(shards)
    many = tuple(each.format(place) for each in train) if isinstance(train, tuple) else None
    with raises("data.val-in-train", **fields):
        opened(many or train.format(place), val.format(place), **options)


@pytest.mark.parametrize(
    ("locations", "num_shared"),
    [
        (("{}/shards", "{}/shards"), 8),
        (
            (
                "{}/shards/part-000.tar",
                "{}/shards/part-001.tar",
                "{}/shards/../shards/part-000.tar",
            ),
            2,
        ),
        (("{}/pets", "{}/pets/one"), 2),
        (("{}/pets/one", "{}/list.csv"), 1),
        (("{}/pets/one", "{}/linked"), 2),
    ],
    ids=["twice", "a shard among others", "a folder inside", "a list", "a link"],
)
def test_an_image_in_two_of_several_locations_is_named(
    locations: tuple[str, ...], num_shared: int, shards: Path, tmp_path: Path
) -> None:
    write_files(tmp_path / "pets", ["one/cat/1.jpg", "one/dog/2.jpg", "two/dog/3.jpg"])
    (tmp_path / "list.csv").write_text(
        "path,label\npets/one/cat/1.jpg,cat\npets/two/dog/3.jpg,dog\n"
    )
    (tmp_path / "linked").symlink_to("pets/one")
    places = [place.format(tmp_path) for place in locations]
    with raises("data.image-in-two-locations", location=places[-1], num_shared=num_shared):
        open_merged(places, None)


@pytest.mark.parametrize("few", [0, 100])
def test_a_class_that_links_to_one_of_the_other_split(few: int, tmp_path: Path) -> None:
    write_files(tmp_path, ["train/cat/1.jpg", "train/dog/deep/2.jpg", "val/cat/3.jpg"])
    (tmp_path / "val/dog").symlink_to("../train/dog")
    train, val = (open_index(str(tmp_path / split)) for split in ("train", "val"))
    with raises("data.val-in-train", path=f"{tmp_path}/val/dog/deep/2.jpg", num_shared=1):
        check_apart(train, val, few=few)


def test_many_images_in_folders_apart_are_taken_without_a_look_at_their_names(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Also where one split watches the other for a class that it has no image of."""
    write_files(tmp_path, ["train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg", "more/cat/4.jpg"])
    (tmp_path / "val/dog").mkdir()
    monkeypatch.setattr("trainyard.data.index.overlap.same_samples", None)
    train, more, val = (str(tmp_path / name) for name in ("train", "more", "val"))
    watching = open_index(val)
    check_apart(open_index(train), watching, few=0)
    check_apart(open_merged((train, more), None), watching, few=0)


def test_files_of_two_kinds_are_apart_without_a_look_at_their_names(
    shards: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    write_files(tmp_path / "val", ["000/1.jpg", "001/2.jpg"])
    monkeypatch.setattr("trainyard.data.index.overlap.hash_names", None)
    found = [open_index(str(place)) for place in (shards, tmp_path / "val")]
    assert len(same_samples(*found)) == 0


def test_hashes_of_names_take_no_objects() -> None:
    assert hash_names(["cat", "dog"]).tolist() == [3429664268601861939, 11501171807684625465]
    tracemalloc.start()
    hashes = hash_names(map(str, range(20_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(hashes)) == 20_000
    assert peak < 4 * hashes.nbytes


def test_hard_links_that_a_share_divides_are_found(tmp_path: Path) -> None:
    """A disk whose equal files are one, as DVC's cache is, has copies on both sides."""
    names = [f"{pet}/{number}.jpg" for pet in ("cat", "dog") for number in range(8)]
    place = Path(write_files(tmp_path / "pets", names))
    assert len(opened(str(place), None, val_share=0.5).val) == 8
    for name in names:
        (place / name).with_suffix(".png").hardlink_to(place / name)
    with raises("data.val-in-train"):
        opened(str(place), None, val_share=0.5)
