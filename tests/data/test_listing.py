"""Lists of image files."""

import csv
import io
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.data.tars import write_files
from tests.errors import raises
from trainyard.data import formats
from trainyard.data.formats import list_rows
from trainyard.data.formats.left_out import COLUMNS
from trainyard.data.index.build import open_index
from trainyard.data.index.label_space import name_remarks
from trainyard.data.index.merge import merged_splits
from trainyard.data.index.splits import find_splits, split_remarks
from trainyard.data.index.stamps import is_stale
from trainyard.data.index.table import Index
from trainyard.data.storage.location import find_place

IMAGES = {"a/1.jpg": b"one", "a/b, c.jpg": b"two", "2.jpg": b"three", "é.png": b"four"}
ROWS = [("a/1.jpg", "dog", "train"), ("a/b, c.jpg", "ape", "training"), ("2.jpg", "dog", "valid")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_files(tmp_path / "data", IMAGES))


def samples(index: Index) -> list[tuple[str, int, str]]:
    places = (index.locate(n) for n in range(len(index)))
    return [
        (path, size, index.classes[label])
        for (path, _, size), label in zip(places, index.label.tolist(), strict=True)
    ]


def write_csv(folder: Path, text: str, name: str = "photos.csv") -> str:
    (folder / name).write_bytes(text.encode())
    return str(folder / name)


def test_csv_with_splits(folder: Path) -> None:
    """A BOM, quotes, Windows line ends, an absolute path; both splits have the same classes."""
    lines = [f'"{folder}/{path}",{label},{split}' for path, label, split in ROWS]
    text = "\ufeffpath,label,split\r\n" + "\r\n".join(lines) + "\r\n\r\n"
    location = write_csv(folder, text)
    splits = merged_splits([location])
    assert splits == {"train": f"{location}#train", "val": f"{location}#val"}
    train, val = (open_index(str(splits[name])) for name in ("train", "val"))
    assert samples(train) == [(f"{folder}/a/1.jpg", 3, "dog"), (f"{folder}/a/b, c.jpg", 3, "ape")]
    assert samples(val) == [(f"{folder}/2.jpg", 5, "dog")]
    assert (train.classes, train.has_names) == (("ape", "dog"), True) == (val.classes, True)


def test_a_cell_names_the_folder_of_a_study(tmp_path: Path) -> None:
    """All images below it are samples; an image of the name goes first, of two folders none."""
    names = ("train/1/a.png", "train/1/b/c.png", "train/2/a.png", "train/23/a.png", "test/3/a.png")
    folder = Path(write_files(tmp_path, {name: name.encode() for name in names}))
    location = write_csv(folder, "patient,label\n1,ill\n2,well\n", "train.csv")
    found = samples(open_index(location))
    wanted = [("1/a.png", "ill"), ("1/b/c.png", "ill"), ("2/a.png", "well")]
    assert found == [(f"{folder}/train/{name}", len(name) + 6, label) for name, label in wanted]
    location = write_csv(folder, "set-1.0/train/1/,0\nset-1.0/train/2/,1\n", "studies.csv")
    assert [label for _, _, label in samples(open_index(location))] == ["0", "0", "1"]
    write_files(folder, {"other/1/a.png": b"again"})
    assert len(open_index(location)) == 3
    location = write_csv(folder, "patient,label\n1,ill\n2,well\n", "all.csv")
    with raises("list.ambiguous-image", line=2, image="1"):
        open_index(location)
    (folder / "empty").mkdir()
    location = write_csv(folder, "path,label\nempty,x\n", "empty.csv")
    with raises("list.image-not-a-file", line=2, image="empty"):
        open_index(location)
    write_files(folder, {"other/2.png": b"an image"})
    location = write_csv(folder, "patient,label\n2,ill\n23,well\n", "some.csv")
    assert samples(open_index(location))[0][0] == f"{folder}/other/2.png"


NO_COLUMN, TWICE = "data.no-column", "data.several-columns"
CELLS, EMPTY, SPLIT = "list.wrong-cell-count", "list.empty-cell", "list.unknown-split"
CONTRADICTED, UNREADABLE = "list.image-contradicted", "list.unreadable-image"
OUTSIDE = "list.image-outside-folder"


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("", NO_COLUMN, {"kind": "path", "header": ", line 1, the header"}),
        ("3.jpg,a\n", NO_COLUMN, {"kind": "path", "names": "'3.jpg', 'a'"}),
        ("path,kind\n", NO_COLUMN, {"kind": "label", "header": ", line 1, the header"}),
        ("path,class,target\n", TWICE, {"kind": "label", "names": "'class' and 'target'"}),
        ("path,label,label\n", TWICE, {"kind": "label", "names": "'label' and 'label'"}),
        ("file,img,label\n", TWICE, {"kind": "path", "names": "'file' and 'img'"}),
        ("path,label\n2.jpg\n", CELLS, {"line": 2, "num_cells": 1, "num_columns": 2}),
        ("path,label\n2.jpg,a,b\n", CELLS, {"line": 2, "num_cells": 3, "delimiter": ","}),
        ("path;label\n2.jpg;a;b\n", CELLS, {"line": 2, "num_cells": 3, "delimiter": ";"}),
        ("path,label\n  ,a\n", EMPTY, {"line": 2, "name": "its path"}),
        ("path,label\n2.jpg, \n", "list.no-label", {"line": 2}),
        ("path,label\n2.jpg,\n", "list.no-label", {"line": 2}),
        ("path,label,split\n2.jpg,a,\n", EMPTY, {"line": 2, "name": "its split"}),
        ("path,labels\n2.jpg,a||b\n", EMPTY, {"line": 2, "name": "one of its labels"}),
        ("path,label,split\n2.jpg,a,trian\n", SPLIT, {"line": 2, "split": "trian"}),
        ("path,label,split\n2.jpg,a,trian\n", SPLIT, {"hint": "; did you mean 'train'?"}),
        ("path,label,split\n2.jpg,a,train_val\n", SPLIT, {"line": 2, "split": "train_val"}),
        (
            "path,label\n2.jpg,a\n./2.jpg,b\n",
            CONTRADICTED,
            {"line": 3, "image": "2.jpg", "value": "'b'", "other": "'a'", "other_line": 2},
        ),
        (
            "path,labels\n2.jpg,a|b\n2.jpg,a\n",
            CONTRADICTED,
            {"line": 3, "image": "2.jpg", "value": "'a'", "other": "'a|b'", "other_line": 2},
        ),
        (
            "path,label,split\n2.jpg,a,val\n2.jpg,a,train\n",
            CONTRADICTED,
            {"value": "'a' of train", "other": "'a' of val"},
        ),
        ("path,label\n2.jpg,a\nno.jpg,a\n", UNREADABLE, {"line": 3, "image": "no.jpg"}),
        ("path,label\r2.jpg,x\r", "list.not-csv", {"line": 1}),
        ("path,label\n../x.jpg,a\n", OUTSIDE, {"line": 2, "image": "../x.jpg"}),
        ("path,label\n/etc/hosts,a\n", OUTSIDE, {"line": 2, "image": "/etc/hosts"}),
        ("path,label\nhttp://h/x.jpg,a\n", "list.image-is-url", {"image": "http://h/x.jpg"}),
        ('path,label\n"2.jpg,a\n', "list.not-csv", {"line": 2}),
    ],
)
def test_wrong_lines(folder: Path, text: str, code: str, fields: dict[str, object]) -> None:
    location = write_csv(folder, text)
    with raises(code, path=f"{folder}/photos.csv", **fields):
        open_index(location)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("photos.csv", " Image Path ; category;Subset\n 2.jpg ; dog ;Training\n;;\n\n"),
        ("photos.tsv", "\ufefffilename\tCLASS\tpartition\n2.jpg\tdog\ttrain\n"),
        ("photos.CSV", "label,path,class,split\ndog,2.jpg,7,train\n"),
        ("photos.csv", 'file,label,split\n"2.jpg","dog\u00a0",TRAIN\n2.jpg,dog,train\n'),
        ("photos.csv#label=species", "path,label,species,split\n2.jpg,7,dog,train\n"),
    ],
)
def test_other_dialects_and_names_of_columns(folder: Path, name: str, text: str) -> None:
    """A label with spaces around it became a class of its own; tabs and semicolons were no CSV."""
    write_csv(folder, text, name.partition("#")[0])
    location = merged_splits([f"{folder}/{name}"], may_share=True)["train"]
    index = open_index(str(location))
    assert samples(index) == [(f"{folder}/2.jpg", 5, "dog")]
    assert index.classes == ("dog",)


@pytest.mark.parametrize(
    ("column", "train", "other", "split"),
    [
        ("is_valid", "False", "True", "val"),
        ("is_test", "0", "1", "test"),
        ("train", "1", "0", "test"),
        ("Usage", "Training", "PublicTest", "test"),
        ("phase", "train2017", "val2017", "val"),
    ],
)
def test_a_split_by_another_name_is_named_and_taken_by_its_option(
    folder: Path, column: str, train: str, other: str, split: str
) -> None:
    """The rows to test on were trained on, and `data verify` had no word about them."""
    lines = [f"path,label,{column},id", f"2.jpg,dog,{train},7", f"a/1.jpg,ape,{other},7"]
    location = write_csv(folder, "\n".join([*lines, f"é.png,dog,{train},7"]))
    for name in (location, f"{location}#label=label"):
        with raises("list.unread-split", path=location, column=column, location=name):
            open_index(name)
    places = find_splits(f"{location}#split={column}")
    assert places == {
        "train": f"{location}#split={column}#train",
        "val": f"{location}#split={column}#{split}",
    }
    assert [len(open_index(place)) for place in places.values()] == [2, 1]
    assert split_remarks(f"{location}#split={column}") == []
    index = open_index(f"{location}#split=none")
    assert len(index) == 3
    assert index.left_out.kinds == {COLUMNS: (2, f"{column!r}, 'id'")}


def test_a_column_of_words_for_splits_is_taken(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "path,label,Data set\n2.jpg,a,train\na/1.jpg,b,valid\né.png,b,test\n"
    location = write_csv(folder, text)
    train, val = find_splits(location).values()
    assert (images_of(train), images_of(val)) == ([("2.jpg", "a")], [("a/1.jpg", "b")])
    assert "'Data set'" in capfd.readouterr().err
    assert len(open_index(f"{location}#split=none")) == 3
    monkeypatch.setattr(list_rows, "HEAD", 3)  # rows after it say something else
    location = write_csv(folder, f"{text}2.jpg,a,other\n")
    with raises("list.unknown-split", line=5, split="other"):
        open_index(f"{location}#train")


def test_splits_by_number_are_asked_for(folder: Path) -> None:
    """CelebA's; of three folds, two would be held out."""
    location = write_csv(folder, "path,label,partition\n2.jpg,a,0\na/1.jpg,b,1\né.png,b,2\n")
    with raises("list.unknown-split", line=2, split="0") as caught:
        open_index(location)
    assert f"{location}#split=partition" in str(caught.value)
    for split, image in (("train", "2.jpg"), ("val", "a/1.jpg"), ("test", "é.png")):
        assert images_of(f"{location}#split=partition#{split}")[0][0] == image


@pytest.mark.parametrize(
    "text",
    [
        "path,label,is_valid\n2.jpg,a,True\na/1.jpg,b,True\n",
        "path,label,source\n2.jpg,a,train\na/1.jpg,b,web\n",
        "path,label,split,set\n2.jpg,a,train,val\na/1.jpg,b,train,train\n",
        "path,label,fold\n2.jpg,a,0\na/1.jpg,b,1\n",
    ],
    ids=["one value", "other values", "beside a split", "folds"],
)
def test_columns_that_are_not_read_are_told(folder: Path, text: str) -> None:
    location = write_csv(folder, text)
    index = open_index(next(iter(find_splits(location).values()), location))
    column = text.split("\n")[0].split(",")[-1]
    assert (len(index), index.left_out.kinds) == (2, {COLUMNS: (1, repr(column))})


@pytest.mark.parametrize("cells", ["val id_val", "PublicTest PrivateTest"])
def test_two_kinds_of_rows_are_not_one_split(folder: Path, cells: str) -> None:
    """WILDS: the rows of val and of id_val were one split; two folders of such names are none."""
    one, other = cells.split()
    text = f"path,label,split\n2.jpg,a,train\na/1.jpg,b,{one}\né.png,b,{other}\n"
    with raises("list.split-of-two-kinds", line=4, value=other, other=one):
        open_index(write_csv(folder, text))


def test_rows_that_are_no_samples_are_counted(folder: Path) -> None:
    """Rows of a test set beside train and val were dropped in silence."""
    lines = ["2.jpg,a,train", "2.jpg,a,training", "a/1.jpg,b,test", "é.png,b,validation"]
    location = write_csv(folder, "\n".join(["path,label,split", *lines, *lines[:1]]))
    assert list(find_splits(location)) == ["train", "val"]
    twice = {"rows of an image that has a row already": (2, f"{location}, line 3")}
    unused = {"rows of split test": (1, f"{location}#test")}
    for split, kinds in (("train", twice | unused), ("val", twice | unused), ("test", twice)):
        index = open_index(f"{location}#{split}")
        assert (len(index), index.left_out.kinds) == (1, kinds)
    write_csv(folder, "\n".join(["path,label,split", *lines[:3], *lines[:1]]))
    assert find_splits(location)["val"] == f"{location}#test"
    assert open_index(f"{location}#train").left_out.kinds == twice


def test_images_lie_in_the_folder_of_the_list_or_in_a_named_one(folder: Path) -> None:
    """A link to /etc/passwd in somebody's list was packed; absolute paths had no way in."""
    lists, link = folder / "lists", folder / "lists" / "link.jpg"
    lists.mkdir()
    link.symlink_to(folder / "2.jpg")
    (lists / "img").symlink_to(folder / "a")

    (folder / "link").symlink_to(lists)
    for path in ("link.jpg", "img/1.jpg", f"{folder}/2.jpg"):
        location = write_csv(lists, f"path,label\n{path},dog\n")
        is_link = not path.startswith("/")
        code = "list.link-leaves-folder" if is_link else "list.image-outside-folder"
        with raises(code, path=location, line=2, image=path, folder=lists):
            open_index(location)
    write_csv(lists, f"path,label\n2.jpg,dog\n{folder}/a/1.jpg,ape\n")
    for root in (folder, "..", "/"):
        if root == "/":
            write_csv(lists, f"path,label\n{folder}/2.jpg,dog\n{link},ape\n")
        index = open_index(f"{location}#root={root}")
        contents = [Path(index.locate(n)[0]).read_bytes() for n in range(2)]
        assert open_index(f"{folder}/link/photos.csv#root={root}").size.tolist() == [
            *map(len, contents)
        ]
        assert contents == ([b"three", b"three"] if root == "/" else [b"three", b"one"])
    (folder / "2.jpg").unlink()
    with raises("list.unreadable-image", path=location):  # a saved index is stale
        open_index(f"{location}#root=/")


def test_an_option_is_for_formats_that_have_it(folder: Path) -> None:
    with raises("data.unknown-option", location=folder, name="#label=", format="folder"):
        open_index(f"{folder}#label=dog")
    location = write_csv(folder, "path,label\n2.jpg,a\n")
    with raises("data.unknown-option", location=location, name="#labels=", format="list"):
        open_index(f"{location}#labels=label")
    with raises("data.unknown-column", path=location, column="lable"):
        open_index(f"{location}#label=lable")
    with raises("data.option-twice", location=location, options="#label=label#label=path"):
        open_index(f"{location}#label=label#label=path")


@pytest.mark.parametrize(
    "labels", [("cat", "NA"), ("nan", "True"), ("1e5", "N/A"), ("001", "1"), ("01", "1.0")]
)
def test_labels_are_texts(folder: Path, labels: tuple[str, str]) -> None:
    """cellxgene#1111: NA became a missing value; molgenis-service-armadillo#1027: 001 became 1."""
    location = write_csv(folder, "path,label\na/1.jpg,{}\n2.jpg,{}\n".format(*labels))
    index = open_index(location)
    assert [label for *_, label in samples(index)] == [*labels]
    assert set(index.classes) == {*labels}


def test_text_that_is_not_utf8(folder: Path) -> None:
    (folder / "photos.csv").write_bytes("path,label\n2.jpg,é\n".encode("latin-1"))
    with raises("list.not-utf8", path=f"{folder}/photos.csv", line=2):
        open_index(str(folder / "photos.csv"))


# --- random lists ---

TABLES = int(os.environ.get("TRAINYARD_TREES", "30"))
MANY = [f"{folder}{n}.jpg" for folder in ("", "a/", "a/b, c/", "é/") for n in range(5)]
WORDS = {
    "train": ["train", "Training", " TRAIN "],
    "val": ["val", "valid", "validation"],
    "test": ["test", "TEST"],
}
LABELS = ["cat", "dog", "0", "1.0", "Käse", "a b", 'say "x"']
Rows = list[dict[str, Any]]  # with path, label or labels, maybe split


def spaced(random: Random, text: str) -> str:
    return random.choice(["", "", " ", "\u00a0"]) + text + random.choice(["", "", "  "])


def some_rows(random: Random) -> Rows:
    paths = random.sample(MANY[:-1], random.randint(1, len(MANY) - 1))
    has_split, has_lists = random.random() < 0.5, random.random() < 0.3
    rows: Rows = [{"path": spaced(random, random.choice(["", "./"]) + path)} for path in paths]
    for row in rows:
        count = random.randint(0, 3)
        labels = [spaced(random, label) for label in random.sample(LABELS, count)]
        row |= {"labels": labels} if has_lists else {"label": spaced(random, random.choice(LABELS))}
        if has_split:
            row["split"] = random.choice(random.choice([*WORDS.values()]))
    for row in random.sample(rows, random.randint(0, len(rows)) // 4):
        rows.insert(random.randint(0, len(rows)), dict(row))
    return rows


def random_list(random: Random, folder: Path) -> tuple[str, int]:
    """Its location, and how many rows it has."""
    rows = some_rows(random)
    write_files(folder, MANY)
    names = {
        "path": random.choice(["path", "File", " image path "]),
        "label": random.choice(["label", "Class", "category"]),
        "labels": "labels",
        "split": random.choice(["split", "Subset"]),
    }
    order = random.sample([*rows[0], "id", "width"], len(rows[0]) + 2)
    text, delimiter = io.StringIO(), random.choice(",;\t")
    lines = csv.writer(text, delimiter=delimiter, lineterminator=random.choice(["\n", "\r\n"]))
    lines.writerow([names.get(name, name) for name in order])
    for row in rows:
        if random.random() < 0.1:
            lines.writerow(random.choice([[], [""] * len(order)]))
        cells = {"id": "7", "width": "x,y;z"} | row
        if "labels" in row:
            cells["labels"] = "|".join(row["labels"])
        lines.writerow([cells[name] for name in order])
    path = folder / f"list.{random.choice(['csv', 'tsv'])}"
    path.write_bytes((random.choice(["", "\ufeff"]) + text.getvalue()).encode())
    return str(path), len(rows)


def test_every_row_is_read_or_left_out(tmp_path: Path) -> None:
    """A row whose split, label or image was not understood was dropped in silence."""
    for seed in range(TABLES):
        (tmp_path / str(seed)).mkdir()
        location, count = random_list(Random(seed), tmp_path / str(seed))
        scan = formats.scan(find_place(location))
        read = sum(len(rows.sizes) for rows in scan.rows)
        assert read + scan.left_out.total == count, f"{seed}: {scan.left_out}"


# --- cells that are no paths ---

TREE = ["part_1/a.jpg", "part_2/b.jpg", "part_2/c/d.png", "train/e.jpg", "x/f.jpg", "y/f.jpg"]


def images_of(location: str) -> list[tuple[str, str]]:
    """The image, relative to the list, and the class of each sample."""
    folder = os.path.dirname(location.partition("#")[0])
    found = samples(open_index(location))
    return [(os.path.relpath(path, folder), label) for path, _, label in found]


@pytest.mark.parametrize(
    ("cell", "image"),
    [
        ("a", "part_1/a.jpg"),
        ("a.jpg", "part_1/a.jpg"),
        ("/data/upload/1/a.jpg", "part_1/a.jpg"),
        ("train_images/b.jpg", "part_2/b.jpg"),
        ("gs://bucket/some/c/d.png", "part_2/c/d.png"),
        ("https://host/c/d.png", "part_2/c/d.png"),
        (r"C:\data\part_2\b.jpg", "part_2/b.jpg"),
        ("./c//d", "part_2/c/d.png"),
        ("z/y/f", "y/f.jpg"),
        ("/y/f.jpg", "y/f.jpg"),
    ],
)
def test_a_cell_stands_for_the_image_that_ends_in_it(
    tmp_path: Path, cell: str, image: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, TREE)
    location = write_csv(tmp_path, f"path,label\n{cell},y\n")
    assert images_of(location) == [(image, "y")]
    assert f"{cell!r} stands for {image}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("cell", "code", "fields"),
    [
        ("f", "list.ambiguous-image", {"line": 2, "names": "x/f.jpg, y/f.jpg"}),
        ("z/f.jpg", "list.ambiguous-image", {"image": "z/f.jpg"}),
        ("a.png", UNREADABLE, {"line": 2, "image": "a.png"}),
        ("test/e.jpg", UNREADABLE, {"line": 2}),
        ("../part_1/a.jpg", OUTSIDE, {"line": 2}),
        ("s3://bucket/g.jpg", "list.image-is-url", {"line": 2}),
    ],
)
def test_a_cell_that_names_no_image_or_several(
    tmp_path: Path, cell: str, code: str, fields: dict[str, object]
) -> None:
    """An image of train would stand for one of the test folder that was not fetched."""
    write_files(tmp_path, TREE)
    location = write_csv(tmp_path, f"path,label\n{cell},y\n")
    with raises(code, path=location, **fields) as caught:
        open_index(location)
    if cell == "a.png":
        assert "part_1/a.jpg" in str(caught.value)


def test_a_path_is_no_end_of_another(tmp_path: Path) -> None:
    write_files(tmp_path, ["f.jpg", "x/f.jpg", "x/x/f.jpg", "g.jpg"])
    location = write_csv(tmp_path, "path,label\nf.jpg,a\nx/f.jpg,b\ng,c\n")
    assert images_of(location) == [("f.jpg", "a"), ("x/f.jpg", "b"), ("g.jpg", "c")]


def test_two_cells_are_not_one_image(tmp_path: Path) -> None:
    """Images of two folders, one of which is missing, would be one image."""
    write_files(tmp_path, TREE)
    location = write_csv(tmp_path, "path,label\nq/a.jpg,y\nr/a.jpg,y\n")
    with raises("list.cells-of-one-image", line=3, cell="r/a.jpg", other="q/a.jpg"):
        open_index(location)


def test_a_folder_that_is_missing_is_no_other(tmp_path: Path) -> None:
    """Of cat/ and dog/ with the same numbers, cat/ was not fetched: dogs would be cats."""
    write_files(tmp_path, ["dog/1.jpg", "dog/2.jpg"])
    location = write_csv(tmp_path, "path,label\ncat/1.jpg,cat\ndog/2.jpg,dog\n")
    with raises("list.cells-of-two-folders", line=2, cell="cat/1.jpg", other="dog/2.jpg"):
        open_index(location)
    location = write_csv(tmp_path, "path,label\nupload/1/1.jpg,cat\nupload/2/2.jpg,dog\n")
    assert images_of(location) == [("dog/1.jpg", "cat"), ("dog/2.jpg", "dog")]


def test_links_out_of_the_folder_stay_closed_to_cells(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "lists"
    root.mkdir()
    (root / "link").symlink_to(folder)
    (root / "up").symlink_to(tmp_path)
    with raises("list.link-leaves-folder", line=2):
        open_index(write_csv(root, "path,label\na/1,dog\n"))


@pytest.mark.parametrize("option", ["", "#path=Image Index"])
def test_the_column_of_the_images_is_named_or_known_by_its_cells(
    tmp_path: Path, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, ["part_1/7.jpg", "part_2/8.jpg", "0.jpg"])
    location = write_csv(tmp_path, "No,Image Index,label\n1,7,0\n2,8.jpg,0\n")
    assert images_of(location + option) == [("part_1/7.jpg", "0"), ("part_2/8.jpg", "0")]
    assert ("'Image Index'" in capfd.readouterr().err) is (not option)


def test_several_columns_of_images_are_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, TREE)
    location = write_csv(tmp_path, "one,other,label\na,b,0\n")
    with raises("data.several-columns", kind="path", names="'one' and 'other'"):
        open_index(location)
    assert images_of(f"{location}#path=other") == [("part_2/b.jpg", "0")]
    with raises("data.unknown-column", column="third"):
        open_index(f"{location}#path=third")


def test_a_list_that_names_most_images_by_their_paths(tmp_path: Path) -> None:
    """The cells after the first hundred are looked up one by one only where one is no path."""
    names = [f"{n:03d}.jpg" for n in range(300)]
    write_files(tmp_path, [*names, "x/last.jpg"])
    lines = [f"{name},a" for name in names]
    location = write_csv(tmp_path, "\n".join(["path,label", *lines[:128], "last,b", *lines[128:]]))
    assert images_of(location)[128] == ("x/last.jpg", "b")
    location = write_csv(tmp_path, "\n".join(["path,label", *lines, "last,b"]))
    with raises(UNREADABLE, line=302) as caught:
        open_index(location)
    assert "x/last.jpg" in str(caught.value)


# --- labels ---


def label_lists(location: str) -> list[list[str]]:
    index = open_index(location)
    assert index.lists is not None
    return [[index.classes[n] for n in index.lists.of(row)] for row in index.label.tolist()]


ONE_HOT = "path,cat, dog ,sick\n2.jpg,1,0,\na/1.jpg,-1,True,0\né.png,0.0,no,1.0\n"


def test_a_column_for_each_class(folder: Path) -> None:
    location = write_csv(folder, ONE_HOT) + "#label=cat,dog,sick"
    index = open_index(location)
    assert [label for *_, label in samples(index)] == ["cat", "dog", "sick"]
    assert (index.classes, index.lists) == (("cat", "dog", "sick"), None)
    write_csv(folder, ONE_HOT + '"a/b, c.jpg",1,1,0\n')
    assert label_lists(location) == [["cat"], ["dog"], ["sick"], ["cat", "dog"]]
    write_csv(folder, ONE_HOT + '"a/b, c.jpg",1,2,0\n')
    with raises("list.not-a-flag", line=5, value="2", column=" dog "):
        open_index(location)
    with raises("data.unknown-column", column="cow"):
        open_index(location + ",cow")
    with raises("list.between-of-columns"):
        open_index(f"{location}#between=;")


def test_rows_without_a_label(folder: Path) -> None:
    location = write_csv(folder, ONE_HOT + '"a/b, c.jpg",0,0,0\n') + "#label=cat,dog,sick"
    with raises("list.no-label", line=5, location=location):
        open_index(location)
    own = open_index(f"{location}#unlabelled=healthy")
    assert [label for *_, label in samples(own)] == ["cat", "dog", "sick", "healthy"]
    without = open_index(f"{location}#unlabelled=none")
    assert (len(without), without.left_out.kinds["rows without a label"][0]) == (3, 1)
    path = write_csv(folder, "path,label\n2.jpg,\na/1.jpg,ape\n")
    assert len(open_index(f"{path}#unlabelled=none")) == 1
    path = write_csv(folder, "path,labels\n2.jpg,\na/1.jpg,ape|bee\n")
    assert label_lists(f"{path}#unlabelled=none") == [["ape", "bee"]]
    assert label_lists(path) == [[], ["ape", "bee"]]


@pytest.mark.parametrize(("between", "joint"), [(" ", "  "), (";", " ; "), ("|", "|")])
def test_labels_in_a_cell_are_taken_apart(folder: Path, between: str, joint: str) -> None:
    location = write_csv(folder, f"path,tags,label\n2.jpg,b{joint}a,x\na/1.jpg,a,x\né.png,b,x\n")
    assert label_lists(f"{location}#label=tags#between={between}") == [["a", "b"], ["a"], ["b"]]
    remarks = name_remarks(open_index(f"{location}#label=tags").classes)
    assert any(f"#between={between!r}" in remark for remark in remarks)


# --- without a header; splits by lists ---


@pytest.mark.parametrize(
    ("name", "text", "labels"),
    [
        ("train.txt", "a/1.jpg dog\n2.jpg  cat\n", "dog cat"),
        ("train.txt", "a/1.jpg Boeing 707\n2.jpg cat\n", "Boeing 707,cat"),
        ("train.txt", "dog a/1.jpg\ncat 2.jpg\nde é.png\n", "dog cat de"),
        ("val.csv", "a/1.jpg,0\n2.jpg,1\n", "0 1"),
        ("val.csv", 'gs://bucket/a/1.jpg;"0"\r\n2.jpg;1\r\n', "0 1"),
        ("all.lst", "7\t1.000000\ta/1.jpg\n3\t0\t2.jpg\n", "1 0"),
        ("all.tsv", "1\ta\n2\tb\n", "a b"),
    ],
)
def test_a_list_without_a_header(
    tmp_path: Path, name: str, text: str, labels: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, IMAGES)
    location = write_csv(tmp_path, text, name)
    expected = ["a/1.jpg", "2.jpg", "é.png"]
    words = labels.split("," if "," in labels else None)
    assert images_of(location) == list(zip(expected, words, strict=False))
    assert "has no header" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["cat/1\ndog/2\n", "1 cat/1.jpg\n2 dog/2.jpg\n"])
def test_names_alone_have_the_classes_of_their_folders(tmp_path: Path, text: str) -> None:
    """CUB-200's images.txt numbers the images; Food-101 has names without a suffix."""
    write_files(tmp_path, ["set/images/cat/1.jpg", "set/images/dog/2.jpg"])
    location = write_csv(tmp_path, text, "images.txt")
    for place in (location, f"{location}#root=set/images"):
        assert images_of(place) == [
            ("set/images/cat/1.jpg", "cat"),
            ("set/images/dog/2.jpg", "dog"),
        ]


def test_columns_without_names_have_numbers(tmp_path: Path) -> None:
    write_files(tmp_path, ["1.jpg", "2.jpg"])
    location = write_csv(tmp_path, "1.jpg,cat,train,x\n2.jpg,dog,val,y\n")
    with raises("data.several-columns", kind="label", names="'2' and '4'"):
        open_index(location)
    splits = find_splits(f"{location}#label=2#split=3")
    assert [images_of(place) for place in splits.values()] == [
        [("1.jpg", "cat")],
        [("2.jpg", "dog")],
    ]
    assert find_splits(f"{location}#label=2") == {
        split: f"{location}#label=2#{split}" for split in ("train", "val")
    }
    with raises("list.wrong-cell-count", line=2, num_cells=1, first="first line"):
        open_index(write_csv(tmp_path, "1.jpg,cat\n2.jpg\n"))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_encodings_of_spreadsheets(folder: Path, encoding: str) -> None:
    text = "path\tlabel\r\né.png\tÄpfel\r\n"
    content = text.encode(encoding)
    (folder / "a.txt").write_bytes((b"\xfe\xff" if encoding == "utf-16-be" else b"") + content)
    assert images_of(f"{folder}/a.txt") == [("é.png", "Äpfel")]
    if encoding == "utf-16":
        (folder / "a.txt").write_bytes(content[:-1])
        with raises("file.unreadable", path=f"{folder}/a.txt"):
            open_index(f"{folder}/a.txt")


FOOD = [f"food/images/{name}/{n}.jpg" for name in ("apple pie", "baklava") for n in range(4)]


def test_the_splits_of_a_folder_by_lists(tmp_path: Path) -> None:
    """The official test images were trained on."""
    write_files(tmp_path, FOOD)
    (tmp_path / "food/meta").mkdir()
    for split, numbers in {"train": (0, 1, 2), "test": (3,)}.items():
        lines = [f"{name}/{n}\n" for name in ("apple pie", "baklava") for n in numbers]
        write_csv(tmp_path, "".join(lines), f"food/meta/{split}.txt")
    images = f"{tmp_path}/food/images"
    (remark,) = split_remarks(images)
    assert all(f"food/meta/{split}.txt" in remark for split in ("train", "test"))
    for place in (images, f"{tmp_path}/food"):
        location = f"{place}#train=meta/train.txt#val=meta/test.txt"
        splits = find_splits(location)
        assert splits == {"train": f"{location}#train", "val": f"{location}#val"}
        assert split_remarks(location) == []
        train, val = (open_index(place) for place in splits.values())
        assert (train.classes, len(train), len(val)) == (("apple pie", "baklava"), 6, 2)
        assert {os.path.basename(val.locate(n)[0]) for n in range(2)} == {"3.jpg"}
    write_csv(tmp_path, "apple pie/3,x\n", "food/meta/dev.csv")
    with raises("list.labels-in-some", path=f"{tmp_path}/food/meta/dev.csv"):
        open_index(f"{images}#train=meta/train.txt#val=meta/dev.csv#train")
    with raises("list.no-list-of-split", name="meta/dev.txt", split="val"):
        open_index(f"{images}#train=meta/train.txt#val=meta/dev.txt#train")
    both = f"{images}#train=meta/train.txt#val={tmp_path}/food/meta/train.txt#train"
    with raises("list.image-contradicted", value="'apple pie' of val"):
        open_index(both)


def test_the_splits_of_a_list_by_lists(folder: Path) -> None:
    location = write_csv(folder, "id,kind\n2,a\n1,b\né,a\n") + "#label=kind#path=id"
    write_csv(folder, "filename\n2.jpg\n", "one.csv")
    write_csv(folder, "a/1\n", "other.txt")
    index = open_index(f"{location}#train=one.csv#test=other.txt#test")
    assert [label for *_, label in samples(index)] == ["b"]
    assert index.left_out.kinds["images in no list of a split"] == (
        1,
        f"{folder}/photos.csv, line 4",
    )
    with raises("list.image-of-two-splits", line=2, split="train"):
        open_index(f"{location}#train=one.csv#val=one.csv#val")


def test_the_splits_of_a_list_by_a_list_of_splits(folder: Path) -> None:
    """CUB-200 and CelebA: by an id beside the image, or by its cell."""
    location = write_csv(folder, "x1 a/1.jpg cat\nx2 2.jpg dog\nx3 é.png cat\n", "images.txt")
    write_csv(folder, "x1 1\nx2 0\nx3 1\n", "train_test_split.txt")
    write_csv(folder, "image_id,partition\na/1.jpg,0\n2.jpg,2\né.png,1\n", "part.csv")
    words = "4\nimage_name evaluation_status\nx1 train\nx2 val\nx4 test\n"
    write_csv(folder, words, "list_eval_partition.txt")
    expected = {
        "train_test_split.txt": {"train": 2, "test": 1},
        "part.csv": {"train": 1, "val": 1, "test": 1},
        "list_eval_partition.txt": {"train": 1, "val": 1, "test": 0},
    }
    for name, counts in expected.items():
        place = f"{location}#label=3#split={name}"
        assert set(find_splits(place)) == {"train", "val"}
        for split in filter(counts.get, counts):
            assert len(open_index(f"{place}#{split}")) == counts[split]
    index = open_index(f"{location}#label=3#split=list_eval_partition.txt#train")
    assert index.left_out.kinds["images in no list of a split"] == (1, f"{location}, line 3")
    (remark,) = [text for text in split_remarks(location) if "not used" in text]
    assert "LIST#split=" in remark and "train_test_split.txt" in remark
    write_csv(folder, "x1 0\nx2 1\nx3 0\n", "train_test_split.txt")
    assert len(open_index(f"{location}#label=3#split=train_test_split.txt#train")) == 1


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("x1 1\nx2 maybe\n", "list.split-of-row", {"line": 2, "value": "maybe"}),
        ("x1 1\nx1 0\n", "list.split-of-row", {"line": 2, "image": "x1"}),
        ("x1 1 2\n", "list.no-splits", {}),
        ("", "list.no-splits", {}),
        ("x8 1\nx9 0\n", "list.splits-of-others", {"image": "a/1.jpg"}),
    ],
)
def test_wrong_lists_of_splits(
    folder: Path, text: str, code: str, fields: dict[str, object]
) -> None:
    location = write_csv(folder, "x1 a/1.jpg cat\nx2 2.jpg dog\n", "images.txt")
    path = write_csv(folder, text, "train_test_split.txt")
    with raises(code, path=path, **fields):
        open_index(f"{location}#label=3#split=train_test_split.txt#train")
    with raises("list.no-list-of-split", name="nosuch.txt"):
        open_index(f"{location}#label=3#split=nosuch.txt#train")


@pytest.mark.parametrize("name", ["list_eval_partition.txt", "train_test_split.txt", "split.lst"])
def test_splits_are_no_labels(folder: Path, name: str) -> None:
    """CelebA: 0, 1 and 2 were three classes."""
    location = write_csv(folder, "a/1.jpg 0\n2.jpg 1\né.png 2\n", name)
    with raises("list.splits-for-labels", path=location, values="0 and 1 and 2", column="2"):
        open_index(location)
    assert open_index(f"{location}#label=2").classes == ("0", "1", "2")


def test_a_list_of_training_images_may_have_few_numbers(folder: Path) -> None:
    location = write_csv(folder, "a/1.jpg 0\n2.jpg 1\n", "train_split.txt")
    assert open_index(location).classes == ("0", "1")


def test_a_count_of_rows_and_a_header_without_its_first_name(folder: Path) -> None:
    """CelebA and DeepFashion: the count was the header."""
    text = "3\nBald Smiling\na/1.jpg -1  1\n2.jpg  1 -1\né.png  1 -1\n"
    index = open_index(write_csv(folder, text, "list_attr.txt") + "#label=Bald,Smiling")
    assert (index.classes, len(index)) == (("Bald", "Smiling"), 3)
    location = write_csv(folder, "2\nimage_name  category\na/1.jpg  7\n2.jpg 8\n", "list.txt")
    assert open_index(location).classes == ("7", "8")
    with raises("data.unknown-column", header=", line 2, the header"):
        open_index(f"{location}#label=3")


def test_a_cell_of_a_list_of_one_split_is_an_image_of_it(tmp_path: Path) -> None:
    """CIFAR-10 of Kaggle: train/1.png and test/1.png."""
    write_files(tmp_path, ["train/1.png", "train/2.png", "test/1.png", "test/2.png"])
    text = "id,label\n1,cat\n2,dog\n"
    expected = [("train/1.png", "cat"), ("train/2.png", "dog")]
    assert images_of(write_csv(tmp_path, text, "trainLabels.csv")) == expected
    with raises("list.ambiguous-image", names="test/1.png, train/1.png"):
        open_index(write_csv(tmp_path, text, "labels.csv"))


@pytest.mark.parametrize(
    ("names", "classes"), [("cow ant cow", ("ant", "cow")), ("cow ant elk", ("0", "7"))]
)
def test_a_column_of_names_beside_numbers(
    folder: Path, names: str, classes: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    rows = zip(("2.jpg", "a/1.jpg", "é.png"), (7, 0, 7), names.split(), strict=True)
    lines = [f"{path},{number},{name}" for path, number, name in rows]
    location = write_csv(folder, "\n".join(["path,label,class_name", *lines]))
    index = open_index(location)
    assert (index.classes, index.left_out.kinds) == (classes, {})
    assert [label for *_, label in samples(index)][1] == classes[0]
    assert "'class_name'" in capfd.readouterr().err


# --- JSON ---

COCO: dict[str, Any] = {
    "info": {},
    "images": [
        {"id": 4, "file_name": "1.jpg", "width": 3},
        {"id": 9, "file_name": "b, c.jpg"},
        {"id": 5, "file_name": "é.png"},
    ],
    "annotations": [
        {"id": 1, "image_id": 9, "category_id": 2, "bbox": [1, 2, 3, 4]},
        {"id": 2, "image_id": 4, "category_id": 7},
        {"id": 3, "image_id": 9, "category_id": 2},
        {"id": 4, "image_id": 5, "category_id": 2},
    ],
    "categories": [{"id": 7, "name": "cat"}, {"id": 2, "name": "dog"}],
}
STUDIO = [
    {"image": "/data/upload/1/1.jpg", "choice": "cat"},
    {"id": 3, "image": "b, c", "choice": "dog"},
    {"image": "2.jpg", "choice": None},
]
HUB = [
    {"file_name": "a/1.jpg", "label": "cat"},
    {"file_name": "a/b, c.jpg", "label": "dog", "boxes": [1]},
]
SAGEMAKER = [
    {"source-ref": "s3://bucket/a/1.jpg", "x-metadata": {"class-name": "cat"}},
    {"source-ref": "s3://bucket/b, c.jpg", "x": 1, "x-metadata": {"class-name": "dog"}},
]


@pytest.mark.parametrize(
    ("name", "trees", "option"),
    [
        ("coco.json", [COCO], ""),
        ("min.json", [STUDIO], "#label=choice#unlabelled=none"),
        ("metadata.jsonl", HUB, ""),
        ("out.manifest", SAGEMAKER, "#label=x-metadata.class-name"),
    ],
    ids=["COCO", "Label Studio", "the Hub", "SageMaker"],
)
def test_lists_in_json(folder: Path, name: str, trees: list[object], option: str) -> None:
    location = write_csv(folder, "\n\n".join(map(json.dumps, trees)), name)
    assert images_of(location + option)[:2] == [("a/1.jpg", "cat"), ("a/b, c.jpg", "dog")]


def test_lists_of_labels_in_json(folder: Path) -> None:
    more = COCO["annotations"] + [{"image_id": 4, "category_id": 2}]
    location = write_csv(folder, json.dumps(COCO | {"annotations": more}), "coco.json")
    assert label_lists(location) == [["cat", "dog"], ["dog"], ["dog"]]
    rows = [{"path": "2.jpg", "label": ["a|b", "c"]}, {"path": "a/1.jpg", "label": []}]
    location = write_csv(folder, "\n".join(map(json.dumps, rows)), "a.jsonl")
    assert label_lists(location) == [["a|b", "c"], []]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.jsonl", '{"path": "2.jpg", "label": 3}\n[1]\n', 2),
        ("a.jsonl", '{"path": "2.jpg", "label": 3}\n{"path"\n', 2),
        ("a.json", '{"path": "2.jpg", "label": 3}', 1),
        ("a.json", "[1, 2]", 1),
        ("a.json", "[" * 100_000, 1),
        ("a.json", json.dumps(COCO | {"annotations": [{"image_id": 8, "category_id": 2}]}), 1),
        ("a.json", json.dumps(COCO | {"categories": [{"id": 2, "name": "x"}] * 2}), 1),
        ("a.json", json.dumps(COCO | {"images": [1]}), 1),
    ],
)
def test_json_of_another_kind(folder: Path, name: str, text: str, line: int) -> None:
    location = write_csv(folder, text, name)
    with raises("list.not-json", path=location, line=line):
        open_index(location)


def test_images_without_an_annotation_are_told(folder: Path) -> None:
    tree = COCO | {"annotations": COCO["annotations"][:2]}
    location = write_csv(folder, json.dumps(tree), "coco.json")
    with raises("list.no-label", line=3):
        open_index(location)
    assert len(open_index(f"{location}#unlabelled=none")) == 2


# --- lists that no rule reads ---


def test_a_list_that_names_no_images_tells_the_nearest_column(tmp_path: Path) -> None:
    write_files(tmp_path, ["images/a.jpg"])
    location = write_csv(tmp_path, "sex,id,breed\nf,a,x\nf,b,y\n")
    with raises("list.no-images-named", column="id", cell="a", example="images/a.jpg"):
        open_index(f"{location}#label=breed")
    with raises(UNREADABLE, line=3, image="b"):
        open_index(f"{location}#label=breed#path=id")
    (tmp_path / "images/a.jpg").unlink()
    with raises("list.no-images-named", column="id", example="no image"):
        open_index(f"{location}#label=breed")


@pytest.mark.parametrize(
    ("header", "likely"), [("path,id,kind,sex", "kind"), ("path,id,cat, dog", "cat,dog")]
)
def test_a_list_without_a_label_has_an_example_of_its_own(
    folder: Path, header: str, likely: str
) -> None:
    rows = ["2.jpg,7,1,0", "a/1.jpg,8,0,1", "é.png,9,1,0"]
    if likely == "kind":
        rows = ["2.jpg,7,x,f", "a/1.jpg,8,y,f", "é.png,9,x,f"]
    location = write_csv(folder, "\n".join([header, *rows]))
    with raises("data.no-column", kind="label") as caught:
        open_index(location)
    assert f"{location}#label={likely}" in str(caught.value)
    assert len(open_index(f"{location}#label={likely}").classes) == 2


def test_images_without_class_folders_are_named_by_a_list_beside_them(tmp_path: Path) -> None:
    write_files(tmp_path, ["train/1.jpg", "labels.csv"])
    with raises("data.no-class-folders") as caught:
        open_index(f"{tmp_path}/train")
    assert f"{tmp_path}/labels.csv" in str(caught.value)


def test_a_link_back_opens_no_folder_outside(tmp_path: Path) -> None:
    """Its target is inside, and the file beside it is not."""
    write_files(tmp_path, ["root/1.jpg", "outside/2.jpg"])
    (tmp_path / "root/out").symlink_to(tmp_path / "outside")
    (tmp_path / "outside/back.jpg").symlink_to(tmp_path / "root/1.jpg")
    location = write_csv(tmp_path / "root", "path,label\nout/back.jpg,x\nout/2.jpg,y\n")
    with raises("list.link-leaves-folder", line=3, target=tmp_path / "outside/2.jpg"):
        open_index(location)


@pytest.mark.parametrize("name", ["photos.csv", ""])
def test_an_index_has_the_times_of_the_images(folder: Path, name: str) -> None:
    """A scan notes the times that a start looks at, also for an image behind a link."""
    (folder / "a/3.jpg").symlink_to("../2.jpg")
    write_csv(folder, "path,label\na/1.jpg,dog\na/3.jpg,ape\n")
    index = open_index(os.path.join(folder, name))
    assert not is_stale(index)
    os.utime(folder / "2.jpg", (5, 5))
    assert is_stale(index)
