"""Lists of image files: CSV and JSON lines."""

import json
from pathlib import Path

import pytest

from tests.data.tars import write_files
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import merged_splits
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


def test_csv_and_json_lines_with_splits(folder: Path) -> None:
    """A BOM, quotes, Windows line ends, an absolute path; both splits have the same classes."""
    lines = [f'"{folder}/{path}",{label},{split}' for path, label, split in ROWS]
    lists = [write_csv(folder, "\ufeffpath,label,split\r\n" + "\r\n".join(lines) + "\r\n\r\n")]
    objects = (json.dumps(dict(zip(("path", "label", "split"), r, strict=True))) for r in ROWS)
    lists.append(write_csv(folder, "\n".join(objects) + "\n", "photos.jsonl"))
    for location in lists:
        splits = merged_splits([location])
        assert splits == {"train": f"{location}#train", "val": f"{location}#val"}
        train, val = (open_index(str(splits[name])) for name in ("train", "val"))
        assert samples(train) == [
            (f"{folder}/a/1.jpg", 3, "dog"),
            (f"{folder}/a/b, c.jpg", 3, "ape"),
        ]
        assert samples(val) == [(f"{folder}/2.jpg", 5, "dog")]
        assert (train.classes, train.has_names) == (("ape", "dog"), True) == (val.classes, True)


def test_without_splits_and_with_other_columns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    location = write_csv(folder, "width,label,path\n7,1,é.png\n7,0,2.jpg\n")
    index = open_index(location)
    assert [row[0] for row in samples(index)] == [f"{folder}/é.png", f"{folder}/2.jpg"]
    assert (index.classes, index.label.tolist()) == (("0", "1"), [1, 0])
    assert capsys.readouterr().err.count("left out: columns (width)") == 1
    with pytest.raises(DataError, match=r"photos\.csv: has no train and no val data"):
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
        ("", "line 1: has no column 'path'"),
        ("path,class\n", "line 1: has no column 'label'"),
        ("path,label\n2.jpg\n", "line 2: has 1 cells, and the header 2"),
        ("path,label\n2.jpg,a,b\n", "line 2: has 3 cells, and the header 2: put quotes"),
        ("path,label\n2.jpg,\n", "line 2: its label is empty"),
        ("path,label,split\n2.jpg,a,\n", "line 2: its split is empty"),
        ("path,label\n2.jpg,a\nno.jpg,a\n", "line 3: no.jpg: No such file"),
        ("path,label\na,x\n", "line 2: a: is not a file"),
        ("path,label\n../x.jpg,a\n", "line 2: '../x.jpg' does not lie in the folder of the list"),
        ("path,label\n/etc/hosts,a\n", "line 2: '/etc/hosts' does not lie in the folder"),
        ("path,label\nhttp://h/x.jpg,a\n", "line 2: 'http://h/x.jpg' does not lie in"),
        ('path,label\n"2.jpg,a\n', "line 2: is not CSV"),
    ],
)
def test_wrong_lines(folder: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        open_index(write_csv(folder, text))
    assert str(caught.value).startswith(f"{folder}/photos.csv, {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not a JSON object"),
        ('{"path": "2.jpg"}', "is not a JSON object"),
        ('{"path": "2.jpg", "label": 1.5}', "its label is not a text: 1.5"),
        (
            '{"path": "2.jpg", "label": "a", "split": "val"}',
            "some lines have a split and some none",
        ),
    ],
)
def test_wrong_json(folder: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=f"photos.jsonl, line 2: {message}"):
        open_index(
            write_csv(folder, '{"path": "2.jpg", "label": 3}\n' + line + "\n", "photos.jsonl")
        )


def test_text_that_is_not_utf8(folder: Path) -> None:
    (folder / "photos.csv").write_bytes("path,label\n2.jpg,é\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"photos\.csv, line 2: is not UTF-8"):
        open_index(str(folder / "photos.csv"))
