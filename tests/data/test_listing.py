"""Lists of image files."""

from pathlib import Path

import pytest

from tests.data.tars import write_files
from tests.errors import raises
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import merged_splits
from trainyard.data.index.splits import find_splits
from trainyard.data.index.table import Index
from trainyard.errors import DataError

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


def test_json_lines_are_no_list(folder: Path) -> None:
    path = write_csv(folder, '{"path": "2.jpg", "label": 3}\n', "photos.jsonl")
    with raises("data.unknown-format", location=path):
        open_index(path)


def test_without_splits_and_with_other_columns(folder: Path) -> None:
    location = write_csv(folder, "width,label,path\n7,1,é.png\n7,0,2.jpg\n")
    index = open_index(location)
    assert [row[0] for row in samples(index)] == [f"{folder}/é.png", f"{folder}/2.jpg"]
    assert (index.classes, index.label.tolist()) == (("0", "1"), [1, 0])
    with raises("data.missing-split", location=location, names="train and no val"):
        merged_splits([location])


def test_a_changed_list_or_image_is_indexed_anew(folder: Path) -> None:
    location = write_csv(folder, "path,label\na/1.jpg,dog\n")
    assert open_index(location).size.tolist() == [3]
    (folder / "a" / "new").write_bytes(b"longer")
    (folder / "a" / "new").rename(folder / "a" / "1.jpg")
    assert open_index(location).size.tolist() == [6]
    write_csv(folder, "path,label\na/1.jpg,dog\n2.jpg,cat\n")
    assert len(open_index(location)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, the header: has no column of the path"),
        ("2.jpg,a\n", "has no column of the path (path, file, … or img_path), but '2.jpg', 'a'"),
        ("path,kind\n", "line 1, the header: has no column of the label"),
        ("path,class,target\n", "the header: 'class' and 'target' can each be the label: name one"),
        ("path,label,label\n", "the header: 'label' and 'label' can each be the label"),
        (
            "file,img,label\n",
            "the header: 'file' and 'img' can each be the path: rename one to path",
        ),
        ("path,label\n2.jpg\n", "line 2: has 1 cells, and the header 2"),
        ("path,label\n2.jpg,a,b\n", "line 2: has 3 cells, and the header 2: put quotes"),
        ("path;label\n2.jpg;a;b\n", "put quotes around a text with ';' in it"),
        ("path,label\n  ,a\n", "line 2: its path is empty"),
        ("path,label\n2.jpg, \n", "line 2: its label is empty"),
        ("path,label\n2.jpg,\n", "line 2: its label is empty"),
        ("path,label,split\n2.jpg,a,\n", "line 2: its split is empty"),
        (
            "path,label,split\n2.jpg,a,trian\n",
            "line 2: its split is 'trian', none of train, val and",
        ),
        ("path,label,split\n2.jpg,a,trian\n", "did you mean 'train'?"),
        ("path,label,split\n2.jpg,a,train_val\n", "line 2: its split is 'train_val', none of"),
        ("path,label\n2.jpg,a\n./2.jpg,b\n", "line 3: 2.jpg: is 'b' here and 'a' in line 2: leave"),
        (
            "path,labels\n2.jpg,a|b\n2.jpg,a\n",
            "line 3: 2.jpg: is 'a' here and 'a|b' in line 2: leave",
        ),
        (
            "path,label,split\n2.jpg,a,val\n2.jpg,a,train\n",
            "'a' of train here and 'a' of val in line",
        ),
        ("path,label\n2.jpg,a\nno.jpg,a\n", "line 3: no.jpg: No such file"),
        ("path,label\na,x\n", "line 2: a: is not a file"),
        ("path,label\na\\1.jpg,x\n", "No such file or directory; write / for \\"),
        ("path,label\r2.jpg,x\r", "line 1: is not CSV (new-line character"),
        ("path,label\n../x.jpg,a\n", "line 2: '../x.jpg' lies outside of"),
        ("path,label\n/etc/hosts,a\n", "line 2: '/etc/hosts' lies outside of"),
        ("path,label\nhttp://h/x.jpg,a\n", "line 2: 'http://h/x.jpg' is a URL"),
        ('path,label\n"2.jpg,a\n', "line 2: is not CSV"),
    ],
)
def test_wrong_lines(folder: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        open_index(write_csv(folder, text))
    assert str(caught.value).startswith(f"{folder}/photos.csv, line ")
    for part in message.split(" … "):
        assert part in str(caught.value)


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


def test_text_that_is_not_utf8(folder: Path) -> None:
    (folder / "photos.csv").write_bytes("path,label\n2.jpg,é\n".encode("latin-1"))
    with raises("list.not-utf8", path=f"{folder}/photos.csv", line=2):
        open_index(str(folder / "photos.csv"))
