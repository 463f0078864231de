"""`trainyard data pack` as people type it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import Capture, run, shown
from tests.data.streams import write_shards
from tests.errors import check, raises, refused
from tests.web import FaultyServer
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits
from trainyard.datasets.pack.shards import choose_classes

NAMES = ("bee", "cat", "dog", "eel")


def test_the_summary(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    out = shown(capsys, "data", "pack", digits, tmp_path, "--format", "webdataset")
    first, second = out.splitlines()
    assert re.fullmatch(
        r"imagenet-train-\{000000\.\.000001\}\.tar  1,433 samples  [\d.]+ MB", first
    )
    assert re.fullmatch(r"imagenet-val-000000\.tar                364 samples  [\d.]+ kB", second)


def test_json(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("data", "pack", digits, tmp_path, "--format", "folder", "--json")
    found = json.loads(shown(capsys, *words))
    assert found["format"] == "folder"
    assert found["classes"] == [str(number) for number in range(10)]
    assert found["splits"]["train"]["location"] == str(tmp_path / "train")
    stored = sum(path.stat().st_size for path in (tmp_path / "train").rglob("*.png"))
    assert found["splits"]["train"]["bytes"] == stored
    assert found["about"]["seed"] == 0
    assert shown(capsys, *words) == json.dumps(found) + "\n"  # there is nothing left to do


def test_train_is_shuffled_by_the_seed_and_val_is_not(digits: Path, tmp_path: Path) -> None:
    labels = {}
    for name, more in (("a", ()), ("b", ("--seed", "1")), ("c", ("--no-shuffle",))):
        out = tmp_path / name
        assert run("data", "pack", digits, out, "--format", "hdf5", *more) == 0
        places = find_splits(str(out))
        labels[name] = {split: open_index(place).label for split, place in places.items()}
    stored = {split: open_index(p).label for split, p in find_splits(str(digits)).items()}
    for split in stored:
        assert np.array_equal(labels["c"][split], stored[split])
    for name in "ab":
        assert np.array_equal(labels[name]["val"], stored["val"])
        assert not np.array_equal(labels[name]["train"], stored["train"])
        assert np.array_equal(np.sort(labels[name]["train"]), np.sort(stored["train"]))
    assert not np.array_equal(labels["a"]["train"], labels["b"]["train"])


def test_shards_by_size_and_a_single_location(digits: Path, tmp_path: Path) -> None:
    words = ("--format", "webdataset", "--shard-size", "20kB", "--split", "val", "--name", "d")
    assert run("data", "pack", digits / "val", tmp_path, *words) == 0
    found = json.loads((tmp_path / "dataset.json").read_text())
    assert list(found["splits"]) == ["val"]
    assert found["about"]["image_bytes"]["val"] > 20_000
    assert len(found["splits"]["val"]["shards"]) > 1
    assert (tmp_path / "d-val-000000.tar").exists()
    assert run("data", "pack", digits / "val", tmp_path / "t", "--format", "parquet") == 0
    assert (tmp_path / "t/data/train-00000-of-00001.parquet").exists()  # it is called train


def test_named_classes(digits: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("7\n\n3\n")
    for name, wish in (("list", "3,7"), ("file", str(wanted))):
        words = ("--format", "webdataset", "--classes", wish)
        assert run("data", "pack", digits, tmp_path / name, *words) == 0
        index = open_index(find_splits(str(tmp_path / name))["train"])
        assert index.classes == ("3", "7")
        full = open_index(str(digits / "train"))
        assert np.bincount(index.label).tolist() == np.bincount(full.label)[[3, 7]].tolist()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", "option.missing"),
        ("--format zip", "option.unknown-choice"),
        ("--format hdf5 --shard-size big", "option.invalid"),
        ("--format hdf5 --shard-samples 0", "pack.empty-shard"),
        ("--format hdf5 --processes 0", "option.invalid"),
        ("--format hdf5 --quality 90", "option.quality-without-short"),
        ("--format hdf5 --pixels", "pack.format-without-pixels"),
        ("--format hdf5 --short 0", "pack.size-out-of-range"),
        ("--format hdf5 --short 9 --quality 0", "pack.quality-out-of-range"),
        ("--format hdf5 --split test", "pack.several-splits"),
        ("--format hdf5 --classes 11", "pack.too-few-classes"),
        ("--format hdf5 --classes 3,x", "pack.unknown-class"),
        ("--format hdf5 --name ../up", "pack.malformed-name"),
        ("--format folder --name imagenet", "option.name-without-effect"),
        ("--format parquet --name d", "option.name-without-effect"),
    ],
)
def test_mistakes(digits: Path, tmp_path: Path, words: str, code: str) -> None:
    check(refused("data", "pack", digits, tmp_path / "out", *words.split()), code)
    assert not (tmp_path / "out").exists()


def test_a_destination_on_a_server_is_refused(digits: Path) -> None:
    words = ("data", "pack", digits, "s3://bucket/out", "--format", "hdf5")
    check(refused(*words), "pack.destination-on-server", location="s3://bucket/out")


def test_the_hub_is_packed_in_its_own_order_alone(tmp_path: Path) -> None:
    words = ("data", "pack", "hf://datasets/a/b", tmp_path / "out", "--format", "webdataset")
    check(refused(*words), "pack.shuffled-from-hub", location="hf://datasets/a/b")


def test_images_of_a_server_are_requested_many_at_a_time(tmp_path: Path) -> None:
    """`data pack`, `verify --deep` and `show` asked for one image after another."""
    with FaultyServer(tmp_path / "source") as server:
        location = write_shards(server.folder, [200, 200])
        url = f"{server.url}/{Path(location).name}"
        commands = (
            ("data", "pack", url, tmp_path / "out", "--format", "webdataset", "--processes", 1),
            ("data", "verify", url, "--deep", "--processes", 1),
            ("data", "show", url, "--out", tmp_path / "sheet.png"),
        )
        for command in commands:
            assert run("data", "index", url) == 0
            server.requests.clear()
            assert run(*command) == 0
            assert len(server.requests) < 200, command


# --- choosing classes ---


def test_classes_at_random_depend_on_the_seed_alone() -> None:
    keep, names = choose_classes("20", None, 1000, 0)
    assert keep.tolist() == sorted(set(keep.tolist()))
    assert len(keep) == 20
    assert names == tuple(f"{number:03d}" for number in keep)
    assert choose_classes("20", None, 1000, 0)[0].tolist() == keep.tolist()
    assert choose_classes("20", None, 1000, 1)[0].tolist() != keep.tolist()
    assert choose_classes("4", NAMES, 4, 0)[1] == NAMES


def test_a_number_that_is_a_class_too_is_refused() -> None:
    """`--classes 5` drew five classes of MNIST at random."""
    digits = tuple(map(str, range(10)))
    with raises("pack.ambiguous-classes", value="5"):
        choose_classes("5", digits, 10, 0)
    assert choose_classes("5,", digits, 10, 0)[1] == ("5",)
    assert len(choose_classes("05", digits, 10, 0)[1]) == 5


def test_classes_without_names_are_chosen_by_number() -> None:
    keep, names = choose_classes("12,07,7", None, 100, 0)
    assert (keep.tolist(), names) == ([7, 12], ("07", "12"))


def test_a_class_that_is_not_there_is_named_with_the_nearest() -> None:
    with raises("pack.unknown-class", name="bees"):
        choose_classes("cat,bees", NAMES, 4, 0)
    with raises("pack.no-classes-named"):
        choose_classes(",", NAMES, 4, 0)
