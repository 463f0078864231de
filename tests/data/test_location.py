import re
from pathlib import Path

import pytest

from trainyard.data.index.splits import find_splits, train_and_val
from trainyard.data.storage.location import expand_braces, find_place
from trainyard.errors import DataError


def files(location: str) -> list[Path]:
    place = find_place(location)
    return [Path(place.path(name)) for name in place.names]


def root(location: str) -> str:
    return find_place(location).root


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


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


def test_an_empty_range_leaves_no_names_and_nothing_is_expanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainyard.data.storage.location._expanded", None)

    assert expand_braces("{0..3}{1..0}.tar") == []


def test_expand_braces_of_a_large_data_set() -> None:
    names = expand_braces("imagenet-train-{000000..001281}.tar")

    assert len(names) == 1282
    assert names[-1] == "imagenet-train-001281.tar"


def test_files_of_a_brace_list_keeps_its_order(tmp_path: Path) -> None:
    touch(tmp_path, "9.tar", "10.tar", "11.tar", "12.tar")

    found = files(f"{tmp_path}/{{9..11}}.tar")

    assert found == [tmp_path / "9.tar", tmp_path / "10.tar", tmp_path / "11.tar"]


def test_files_of_a_glob_is_sorted(tmp_path: Path) -> None:
    touch(tmp_path, *(f"train-{number}.tar" for number in (3, 1, 0, 2)), "val-0.tar", "notes.txt")

    found = files(f"{tmp_path}/train-*.tar")

    assert found == [tmp_path / f"train-{number}.tar" for number in range(4)]


def test_files_takes_a_real_name_that_looks_like_a_glob(tmp_path: Path) -> None:
    touch(tmp_path, "run[1].tar", "run1.tar")

    assert files(f"{tmp_path}/run[1].tar") == [tmp_path / "run[1].tar"]


def test_files_names_the_first_missing_file_and_counts_them(tmp_path: Path) -> None:
    touch(tmp_path, "0.tar", "2.tar")

    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/1.tar: no such file")) as error:
        files(f"{tmp_path}/{{0..3}}.tar")

    assert "2 of 4" in str(error.value)


@pytest.mark.parametrize("name", ["absent.tar", "absent-*.tar", "{3..1}.tar"])
def test_files_of_nothing_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "1.tar", "2.tar", "3.tar")

    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/{name}")):
        files(f"{tmp_path}/{name}")


def test_files_does_not_take_a_folder_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "0.tar").mkdir()

    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/0.tar")):
        files(f"{tmp_path}/{{0..0}}.tar")


def test_location_root(tmp_path: Path) -> None:
    touch(tmp_path, "a/0.tar", "a/1.tar", "b/0.tar")

    assert root(f"{tmp_path}/a") == f"{tmp_path}/a"
    assert root(f"{tmp_path}/a/") == f"{tmp_path}/a/"
    assert root(f"{tmp_path}/a/0.tar") == f"{tmp_path}/a"
    assert root(f"{tmp_path}/a/{{0..1}}.tar") == f"{tmp_path}/a"
    assert root(f"{tmp_path}/*/0.tar") == str(tmp_path)


def test_location_root_of_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "0.tar", "a/1.tar")
    monkeypatch.chdir(tmp_path)

    assert root("0.tar") == "."
    assert root("a/*.tar") == "a"


def test_find_splits_of_folders(tmp_path: Path) -> None:
    touch(tmp_path, "train/cat/1.jpg", "val/cat/2.jpg", "test/cat/3.jpg")

    assert find_splits(str(tmp_path)) == {"train": f"{tmp_path}/train", "val": f"{tmp_path}/val"}


@pytest.mark.parametrize(
    ("train", "val"), [("Train", "Val"), ("training", "valid"), ("train", "test")]
)
def test_find_splits_of_folders_with_other_names(train: str, val: str, tmp_path: Path) -> None:
    for name in (train, val):
        (tmp_path / name / "cat").mkdir(parents=True)
    assert find_splits(str(tmp_path)) == {
        "train": str(tmp_path / train),
        "val": str(tmp_path / val),
    }


def test_test_images_are_for_validation_only_where_there_are_no_others(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / name / "cat").mkdir(parents=True)
    assert find_splits(str(tmp_path))["val"] == str(tmp_path / "valid")


def test_test_images_without_classes_are_no_validation_data(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1.jpg").touch()
    assert find_splits(str(tmp_path)) == {"train": str(tmp_path / "train")}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train-1.tar.gz", "decompress it"),
        ("train-1.TGZ", "decompress it"),
        ("train-1.TAR", "rename it to train-1.tar"),
    ],
)
def test_a_shard_that_would_be_left_out_is_an_error(name: str, remedy: str, tmp_path: Path) -> None:
    for shard in ("train-0.tar", "val-0.tar", name):
        (tmp_path / shard).touch()
    with pytest.raises(DataError, match=f"{name}: a shard of train .*: {remedy}"):
        find_splits(str(tmp_path))


def test_find_splits_of_shards(tmp_path: Path) -> None:
    folder = tmp_path / "set[1] {0..1}"  # a folder's own name is never a pattern
    touch(folder, "x-train-0.tar", "x-train-1.tar", "x-validation-0.tar", "x-test-0.tar")

    splits = find_splits(str(folder))

    assert {split: files(location) for split, location in splits.items()} == {
        "train": [folder / "x-train-0.tar", folder / "x-train-1.tar"],
        "val": [folder / "x-validation-0.tar"],
    }


def test_find_splits_of_one_split_or_none(tmp_path: Path) -> None:
    touch(tmp_path, "a/train/cat/1.jpg", "b/cat/1.jpg", "d/train.txt")
    (tmp_path / "c.tar").write_bytes(bytes(1024))  # an empty archive

    assert find_splits(f"{tmp_path}/a") == {"train": f"{tmp_path}/a/train"}
    assert find_splits(f"{tmp_path}/b") == {}
    assert find_splits(f"{tmp_path}/c.tar") == {}
    assert find_splits(f"{tmp_path}/d") == {}


def test_train_and_val_names_what_is_missing(tmp_path: Path) -> None:
    touch(tmp_path, "whole/train/cat/1.jpg", "whole/x-val-0.tar", "half/val/cat/1.jpg")

    assert train_and_val(f"{tmp_path}/whole") == find_splits(f"{tmp_path}/whole")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/half: has no train data")):
        train_and_val(f"{tmp_path}/half")


def test_find_splits_of_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: no such file or folder"):
        find_splits(f"{tmp_path}/absent")


def test_split_names_are_whole_words(tmp_path: Path) -> None:
    words = ("retrieval-train", "constraint-val", "interval", "medieval", "evaluation")
    touch(tmp_path, *(f"{word}-00000{number}.tar" for word in words for number in (0, 1)))

    splits = find_splits(str(tmp_path))

    assert {split: [path.name for path in files(place)] for split, place in splits.items()} == {
        "train": ["retrieval-train-000000.tar", "retrieval-train-000001.tar"],
        "val": ["constraint-val-000000.tar", "constraint-val-000001.tar"],
    }


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (["a-train-0.tar", "b-train-0.tar"], ["constraint-val-0.tar"]),
        (["coco_train2017.tar"], ["coco_val2017.tar"]),
        (["training.h5"], ["valid.h5"]),
        (["x-train-0.packed"], ["x-validation-0.packed"]),
        (["train-00000-of-00001"], ["retrain-val-00000-of-00001"]),
        (["cocoTrain-1.tar", "cocoTrain-2.tar"], ["cocoVal-1.tar"]),
    ],
)
def test_find_splits_takes_the_shards_whose_names_have_the_word(
    tmp_path: Path, train: list[str], val: list[str]
) -> None:
    touch(tmp_path, *train, *val)

    found = {split: files(place) for split, place in find_splits(str(tmp_path)).items()}

    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "train": train,
        "val": val,
    }


def test_a_shard_called_by_both_splits_is_an_error_that_names_it(tmp_path: Path) -> None:
    touch(tmp_path, "train-0.tar", "train-minus-val-0.tar", "val-0.tar")

    with pytest.raises(DataError, match=r"/train-minus-val-0\.tar: its name says train and val"):
        find_splits(str(tmp_path))


def test_shards_that_no_pattern_tells_apart_are_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "a-train.tar", "train-b.tar", "retrain-c.tar", "val.tar")

    with pytest.raises(DataError, match=r"tells its train shards, such as a-train\.tar"):
        find_splits(str(tmp_path))


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
    with pytest.raises(DataError, match=r"^http://h1/a\.tar and http://h2/a\.tar: have no folder"):
        find_place("http://h{1..2}/a.tar")
