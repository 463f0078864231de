"""Names of numbered classes in a file beside the data."""

import json
from pathlib import Path

import pytest

from tests.data.tars import write_files, write_tar
from trainyard.data.index.build import open_index

NAMES = ("tench", "hen, small", "ant")


def a_list(folder: Path, numbers: tuple[int, ...] = (0, 1, 2)) -> str:
    write_files(folder, [f"{n}.jpg" for n in numbers])
    (folder / "list.csv").write_text("\n".join(["path,label", *(f"{n}.jpg,{n}" for n in numbers)]))
    return str(folder / "list.csv")


def labels(location: str) -> list[str]:
    index = open_index(location)
    return [index.classes[n] for n in index.label.tolist()]


LINES = "\n".join(NAMES)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("label.labels.txt", LINES),
        ("classnames.txt", f"\ufeff{LINES}\n\n"),
        ("classes.txt", "2 ant\n0 tench\n1 hen, small\n"),
        ("class_to_idx.json", json.dumps({name: n for n, name in enumerate(NAMES)})),
        ("label_num_to_disease_map.json", json.dumps(dict(enumerate(NAMES)))),
        ("label_map.json", json.dumps(NAMES)),
    ],
)
def test_a_file_beside_names_the_classes(
    tmp_path: Path, file: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    location = a_list(tmp_path)
    (tmp_path / file).write_text(text)
    assert labels(location) == [*NAMES]
    assert f"{tmp_path}/{file}" in capfd.readouterr().err
    assert open_index(location).classes == tuple(sorted(NAMES))
    (tmp_path / file).write_text(text.replace("ant", "elk"))
    assert labels(location) == ["tench", "hen, small", "elk"]  # the saved index is stale


@pytest.mark.parametrize(
    ("numbers", "file", "text"),
    [
        ((0, 1, 2), "classes.txt", "a\nb\n"),
        ((0, 1, 2), "classes.txt", "a\nb\nc\nd\n"),
        ((1, 2, 3), "classes.txt", "a\nb\nc\n"),
        ((0, 1, 2), "classes.txt", "1 a\n2 b\n3 c\n"),
        ((0, 1, 2), "classes.txt", "a\nb\na\n"),
        ((0, 1, 2), "class_to_idx.json", '{"a": 0, "b": 1, "c": 1}'),
        ((0, 1, 2), "class_to_idx.json", "[1, 2"),
        ((0, 1, 2), "label_map.json", '{"0": "a", "2": "c"}'),
    ],
)
def test_a_file_that_does_not_fit_is_told_and_not_used(
    tmp_path: Path,
    numbers: tuple[int, ...],
    file: str,
    text: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    location = a_list(tmp_path, numbers)
    (tmp_path / file).write_text(text)
    assert labels(location) == [*map(str, numbers)]
    assert f"{tmp_path}/{file}" in capfd.readouterr().err


def test_two_files_that_differ_name_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    location = a_list(tmp_path)
    (tmp_path / "classes.txt").write_text(LINES)
    (tmp_path / "classnames.txt").write_text(LINES)
    assert labels(location) == [*NAMES]
    (tmp_path / "classnames.txt").write_text("a\nb\nc\n")
    assert labels(location) == ["0", "1", "2"]
    assert "classnames.txt" in capfd.readouterr().err


def test_labels_that_are_no_numbers_keep_their_names(tmp_path: Path) -> None:
    write_files(tmp_path, ["0.jpg", "1.jpg"])
    (tmp_path / "classes.txt").write_text("a\nb\n")
    for one, other in (("x", "y"), ("00", "01")):
        (tmp_path / "list.csv").write_text(f"path,label\n0.jpg,{one}\n1.jpg,{other}\n")
        assert labels(str(tmp_path / "list.csv")) == [one, other]


def test_numbers_of_shards_are_named_from_the_folder_above_a_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        members = [(f"{n}.{kind}", b"%d" % n) for n in range(3) for kind in ("jpg", "cls")]
        write_tar(tmp_path / split / "0.tar", members)
    ids = "n01440764 tench, Tinca\nn01443537 goldfish\nn01484850 shark\n"
    (tmp_path / "LOC_synset_mapping.txt").write_text(ids)
    for split in ("train", "test"):
        index = open_index(f"{tmp_path}/{split}/*.tar")
        assert (index.classes, index.has_names) == (("n01440764", "n01443537", "n01484850"), True)
    (tmp_path / "LOC_synset_mapping.txt").unlink()
    assert open_index(f"{tmp_path}/train/*.tar").classes == ("0", "1", "2")
