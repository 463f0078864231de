import tracemalloc
from pathlib import Path

import pytest

from tests.data.tars import Patch, write_files
from tests.errors import raises
from trainyard.data.index.splits import find_splits, train_and_val
from trainyard.data.storage.location import expand_braces, find_place


def files(location: str) -> list[Path]:
    place = find_place(location)
    return [Path(place.path(name)) for name in place.names]


def root(location: str) -> str:
    return find_place(location).root


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a{0..2}.tar", ["a0.tar", "a1.tar", "a2.tar"]),
        ("a{08..10}", ["a08", "a09", "a10"]),
        ("{98..101}", ["98", "99", "100", "101"]),
        ("{000003..000003}", ["000003"]),
        ("{0..1}/{5..6}", ["0/5", "0/6", "1/5", "1/6"]),
        ("a{x}b{..}", ["a{x}b{..}"]),
        ("{{0..1}..3}", ["{0..3}", "{1..3}"]),  # which were not counted
    ],
)
def test_expand_braces(text: str, names: list[str]) -> None:
    assert expand_braces(text) == names


def test_an_empty_range_leaves_no_names_and_nothing_is_expanded() -> None:
    tracemalloc.start()
    assert expand_braces("{0..99999}{1..0}.tar") == []
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("location", "names"),
    [
        ("{9..11}.tar", "9.tar 10.tar 11.tar"),  # keeps its order
        ("train-*.tar", "train-0.tar train-1.tar train-2.tar"),  # is sorted
        ("run[1].tar", "run[1].tar"),  # a real name that looks like a glob
    ],
)
def test_files_of_a_location(tmp_path: Path, location: str, names: str) -> None:
    others = ("12.tar", "run1.tar", "val-0.tar", "notes.txt", "train-2.tar", "train-0.tar")
    write_files(tmp_path, [*others, *names.split()])
    write_files(tmp_path, ["train-1.tar"])
    assert files(f"{tmp_path}/{location}") == [tmp_path / name for name in names.split()]


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("{0..3}.tar", "1.tar"),
        *((name, name) for name in ("absent.tar", "absent-*.tar")),
        ("{5..5}.tar", "5.tar"),  # a folder is no file
    ],
)
def test_files_that_are_not_there_are_named(tmp_path: Path, location: str, name: str) -> None:
    write_files(tmp_path, ["0.tar", "2.tar", "5.tar/1.jpg"])
    with raises("data.not-found", path=tmp_path / name):
        files(f"{tmp_path}/{location}")
    with raises("data.no-match", location=f"{tmp_path}/{{3..1}}.tar"):
        files(f"{tmp_path}/{{3..1}}.tar")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        *(("a", "a"), ("a/", "a/"), ("a/0.tar", "a"), ("a/{0..1}.tar", "a"), ("a/*.tar", "a")),
        *(("*/0.tar", "."), ("0.tar", ".")),
    ],
)
def test_location_root(tmp_path: Path, monkeypatch: Patch, location: str, expected: str) -> None:
    write_files(tmp_path, ["0.tar", "a/0.tar", "a/1.tar", "b/0.tar"])
    absolute = root(f"{tmp_path}/{location}")
    assert absolute == f"{tmp_path}/{expected}".removesuffix("/.")
    monkeypatch.chdir(tmp_path)
    assert root(location) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("Train/cat/1.jpg Val/cat/2.jpg", {"train": "Train", "val": "Val"}),
        ("train/cat/1.jpg test/1.jpg", {"train": "train"}),  # test images without classes
        ("train/cat/1.jpg", {"train": "train"}),
        ("cat/1.jpg", {}),
        ("train.txt", {}),
    ],
)
def test_find_splits_of_folders(tmp_path: Path, names: str, expected: dict[str, str]) -> None:
    write_files(tmp_path, names.split())
    found = {split: str(tmp_path / name) for split, name in expected.items()}
    assert find_splits(str(tmp_path)) == found


def test_find_splits_of_a_file_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.tar").write_bytes(bytes(1024))  # an empty archive
    assert find_splits(f"{tmp_path}/c.tar") == {}
    with raises("data.not-found", path=f"{tmp_path}/absent"):
        find_splits(f"{tmp_path}/absent")


@pytest.mark.parametrize(
    ("name", "others", "code"),
    [
        *(
            (name, ("train-0.tar", "val-0.tar"), "data.shard-passed-over")
            for name in ("train-1.tar.gz", "train-1.TGZ", "train-1.TAR")
        ),
        ("train-minus-val-0.tar", ("train-0.tar", "val-0.tar"), "data.file-of-two-splits"),
        ("a-train.tar", ("train-b.tar", "retrain-c.tar", "val.tar"), "data.no-shard-pattern"),
    ],
)
def test_shards_of_no_certain_split_are_an_error(
    name: str, others: tuple[str, ...], code: str, tmp_path: Path
) -> None:
    write_files(tmp_path, [name, *others])
    with raises(code) as caught:
        find_splits(str(tmp_path))
    named = caught.value.fields
    assert str(named.get("path", f"{tmp_path}/{named.get('name')}")) == f"{tmp_path}/{name}"


def test_train_and_val_names_what_is_missing(tmp_path: Path) -> None:
    write_files(tmp_path, ["whole/train/cat/1.jpg", "whole/x-val-0.tar", "half/val/cat/1.jpg"])
    assert train_and_val(f"{tmp_path}/whole") == find_splits(f"{tmp_path}/whole")
    with raises("data.missing-split", location=f"{tmp_path}/half", names="train"):
        train_and_val(f"{tmp_path}/half")


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (["a-train-0.tar", "b-train-0.tar"], ["constraint-val-0.tar"]),
        (["coco_train2017.tar"], ["coco_val2017.tar"]),
        (["retrieval-train-0.tar", "retrieval-train-1.tar"], ["constraint-val-0.tar"]),
        (["training.h5"], ["valid.h5"]),
        (["x-train-0.packed"], ["x-validation-0.packed"]),
        (["train-00000-of-00001"], ["retrain-val-00000-of-00001"]),
        (["cocoTrain-1.tar", "cocoTrain-2.tar"], ["cocoVal-1.tar"]),
    ],
)
def test_find_splits_takes_the_shards_whose_names_have_the_word(
    tmp_path: Path, train: list[str], val: list[str]
) -> None:
    folder = tmp_path / "set[1] {0..1}"  # a folder's own name is never a pattern
    others = [f"{word}-0.tar" for word in ("interval", "medieval", "evaluation", "x-test")]
    write_files(folder, [*train, *val, *(others if ".tar" in train[0] else ())])
    found = {split: files(place) for split, place in find_splits(str(folder)).items()}
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "train": train,
        "val": val,
    }


@pytest.mark.parametrize(
    ("location", "root", "names"),
    [
        ("http://host/a.tar", "http://host", ["a.tar"]),
        ("http://host//a.tar", "http://host//", ["a.tar"]),
        ("http://host/x//a-{8..10}.tar", "http://host/x//", ["a-8.tar", "a-9.tar", "a-10.tar"]),
        ("s3://bucket//x//y/{0..1}/a.tar", "s3://bucket//x//y", ["0/a.tar", "1/a.tar"]),
        ("http://host:80", "http://host:80", [""]),
        ("http://host/a.tar?sig=1", "http://host", ["a.tar"]),
    ],
)
def test_urls_stay_as_they_are_written(location: str, root: str, names: list[str]) -> None:
    place = find_place(location)
    assert (place.root, list(place.names)) == (root, names)
    written = expand_braces(location.partition("?")[0])
    assert [place.path(name).rstrip("/") for name in place.names] == written


def test_urls_without_a_folder_in_common() -> None:
    with raises("data.no-common-folder", first="http://h1/a.tar", last="http://h2/a.tar"):
        find_place("http://h{1..2}/a.tar")
