"""Saved indices that are damaged, or made by somebody else to lead out of their data."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.command_line import Capture, run
from tests.data.tars import write_files, write_shard
from tests.errors import check, refused
from trainyard.data.decode.seek_tables import open_seek, seek_path
from trainyard.data.index.build import build_index, open_index, saved_index
from trainyard.data.index.outside import linked_outside
from trainyard.data.index.table import load_index

Header = dict[str, Any]
Columns = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Header, Columns], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ("cat/1.jpg", "cat/2.jpg", "dog/deep/3.jpg", "eel/a..b.jpg")
    write_files(tmp_path / "data", {name: b"\xff\xd8\xff" + name.encode() for name in names})
    return tmp_path / "data"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shard(tmp_path / "tars" / "a.tar", [(b"\xff\xd8\xff", label) for label in (0, 1, 2)])
    return tmp_path / "tars"


def forge(path: Path, change: Change) -> None:
    """Changes the header and the columns of a saved index, and makes its checksum right."""
    with safe_open(path, "np") as file:
        header = json.loads(file.metadata()["index"])
        columns = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
    change(header, columns)
    path.unlink()  # a new file: the old one may be mapped
    save_file(columns, path, {"index": json.dumps(header)})
    content = path.read_bytes()[:-4]
    path.write_bytes(content + struct.pack("<I", crc32c(content)))


def put(name: str, row: int, value: int) -> Change:
    def change(_: Header, columns: Columns) -> None:
        columns[name][row] = value

    return change


def cut(name: str, count: int = 1) -> Change:
    return lambda _, columns: columns.update({name: columns[name][:-count]})


def setting(**values: Any) -> Change:
    return lambda header, _: header.update(values)


def name_files(*names: str) -> Change:
    def change(_: Header, columns: Columns) -> None:
        columns["file_name_text"] = np.frombuffer("".join(names).encode(), "u1")
        columns["file_name_ends"] = np.cumsum([len(name) for name in names])

    return change


# --- damage ---


def test_each_flipped_bit_is_noticed(folder: Path, capsys: Capture) -> None:
    """Labels, offsets and names were trained on as they were; a damaged header was a traceback."""
    index = open_index(str(folder))
    path, content = index.path, index.path.read_bytes()
    for bit in range(0, 8 * len(content), 7):  # 7: all bits of a byte, in turn
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.unlink()
        path.write_bytes(damaged)
        assert load_index(path) is None, bit
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(range(0, 8 * len(content), 7))
    assert all(line.startswith(f"trainyard: {path}: ") for line in said)
    assert {line.partition("(")[2] for line in said} == {
        "of another release, or no index at all): passed over",
        "its checksum is wrong): passed over",
    }


MALFORMED: dict[str, Change] = {
    "no classes": lambda header, _: header.pop("classes"),
    "classes are a text": setting(classes="abc"),
    "classes are numbers": setting(classes=[1, 2, 3]),
    "a class twice": setting(classes=["a", "a", "b"]),
    "too few classes": setting(classes=["a", "b"]),
    "another column": lambda _, columns: columns.update(shape=columns["file"]),
    "a number as root": setting(root=3),
    "a null character in the root": setting(root="/a\0b"),
    "a lone surrogate in the format": setting(format="\ud800"),
    "a stamp that is a number": setting(stamps={".": 3}),
    "stamps that are a list": setting(stamps=["."]),
    "left out: a number": setting(left_out=3),
    "left out: infinitely many": setting(left_out={"hidden": (float("inf"), "a")}),
    "parts: too many": setting(parts=[5, 7]),
    "parts: negative": setting(parts=[-1, 5]),
    "parts: texts": setting(parts=["a"]),
    "a column less": lambda _, columns: columns.pop("size"),
    "no rows": lambda _, columns: columns.update(
        {name: columns[name][:0] for name in ("file", "offset", "size", "label")}
    ),
    "a short column": cut("size"),
    "short labels": cut("label"),
    "half a number": lambda _, columns: columns.update(size=columns["size"].view("u1")[:-3]),
    "a negative file": put("file", 0, -1),
    "a file beyond the names": put("file", 3, 4),
    "a negative offset": put("offset", 1, -1),
    "an offset without an end": put("offset", 1, 2**63 - 1),
    "a negative size": put("size", 1, -(2**63)),
    "a negative label": put("label", 2, -1),
    "a label beyond the classes": put("label", 2, 3),
    "names that end before they begin": put("file_name_ends", 1, 0),
    "names beyond the text": put("file_name_ends", 3, 1 << 40),
    "a text beyond the names": cut("file_name_text"),
    "half a Snappy column": lambda _, c: c.update(
        snappy_start=c["file"], snappy_length=c["file"][1:]
    ),
    "a negative length": lambda _, c: c.update(
        snappy_start=c["file"], snappy_length=-1 - c["file"]
    ),
    "lists beyond their values": lambda _, c: c.update(
        list_ends=np.array([1, 2, 9]), list_values=np.zeros(3, "<i4")
    ),
    "a class beyond the others in a list": lambda _, c: c.update(
        list_ends=np.array([1, 2, 3]), list_values=np.array([0, 1, 3], "<i4")
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_index_is_made_anew(what: str, folder: Path, capsys: Capture) -> None:
    """Each was a traceback, or numbers outside of the arrays that they index."""
    index = open_index(str(folder))
    content = index.path.read_bytes()
    forge(index.path, MALFORMED[what])
    assert load_index(index.path) is None
    assert saved_index(str(folder)) is None
    assert open_index(str(folder)).path.read_bytes() == content
    assert capsys.readouterr().err.count(": passed over\n") == 3


# --- files outside of the data ---


OUTSIDE: dict[str, Change] = {
    "a name with ..": name_files("cat/1.jpg", "../secret", "dog/deep/3.jpg", "eel/a..b.jpg"),
    ".. inside a name": name_files("cat/1.jpg", "cat/../../secret", "cat/2.jpg", "cat/3.jpg"),
    "an absolute name": name_files("cat/1.jpg", "/etc/passwd", "cat/2.jpg", "cat/3.jpg"),
    "a URL": name_files("cat/1.jpg", "http://a.org/x", "cat/2.jpg", "cat/3.jpg"),
    "a root elsewhere": setting(root="/etc"),
    "a root that is a command": setting(root="pipe:cat /etc"),
    "a root on a server": setting(root="http://127.0.0.1:1/x"),
    "absolute names": setting(root=None),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_an_index_that_leads_out_of_its_data_is_made_anew(
    what: str, folder: Path, capsys: Capture
) -> None:
    """An index that came with a data set made `data pack` write /etc/passwd into shards."""
    index = build_index(str(folder), beside=True)
    content = index.path.read_bytes()
    forge(index.path, OUTSIDE[what])
    again = open_index(str(folder))
    assert again.path.read_bytes() == content
    assert capsys.readouterr().err == (
        f"trainyard: {index.path}: an index that is damaged (it names files outside of the data): "
        "passed over\n"
    )


def test_an_index_without_the_stamps_of_its_files_is_stale(folder: Path, shards: Path) -> None:
    """Without a stamp, or one of its images, it was up to date, whatever became of the data."""
    places: list[tuple[Path, Any]] = [(folder, {}), (shards, {}), (folder, {"./*": []})]
    for place, stamps in places:
        index = open_index(str(place))
        label = index.label.tolist()

        def shift(header: Header, columns: Columns, stamps: Any = stamps) -> None:
            header["stamps"] = stamps
            columns["label"] = columns["label"][::-1]

        forge(index.path, shift)
        assert open_index(str(place)).label.tolist() == label


def test_a_list_names_images_in_the_folder_of_its_option(tmp_path: Path) -> None:
    """The user's `root` may lie elsewhere; an index may name no other folder."""
    write_files(tmp_path, {"images/a.jpg": b"a", "images/b.jpg": b"b", "other/c.jpg": b"c"})
    write_files(tmp_path, {"lists/all.csv": b"path,label\na.jpg,x\nb.jpg,y\n"})
    place = f"{tmp_path}/lists/all.csv#root=../images"
    index = build_index(place, beside=True)
    assert [*index.file_names] == ["../images/a.jpg", "../images/b.jpg"]
    before = index.path.stat().st_ino
    assert open_index(place).path.stat().st_ino == before  # not made anew
    forge(index.path, name_files("../images/a.jpg", "../other/c.jpg"))
    assert [*open_index(place).file_names] == ["../images/a.jpg", "../images/b.jpg"]


# --- a pipe, and links ---


def test_a_pipe_in_the_place_of_an_index_or_a_seek_table_is_none(folder: Path) -> None:
    """It was waited for until somebody writes into it."""
    os.mkfifo(folder / ".trainyard-index")
    index = open_index(str(folder))
    assert index.path.is_file()
    os.mkfifo(seek_path(index))
    assert open_seek(index) is None


def test_pack_reports_links_out_of_the_data(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    images = {"storage/x.jpg": b"\xff\xd8\xffx", "storage/dogs/y.jpg": b"\xff\xd8\xffy"}
    write_files(tmp_path, images)
    (folder / "cat" / "near.jpg").symlink_to("1.jpg")
    assert linked_outside(open_index(str(folder))) == []
    (folder / "cat" / "far.jpg").symlink_to(tmp_path / "storage" / "x.jpg")
    (folder / "dog" / "more").symlink_to(tmp_path / "storage" / "dogs")
    words = ("--format", "webdataset", "--split", "train")
    assert run("data", "pack", folder, tmp_path / "out", *words) == 0
    assert capsys.readouterr().err == (
        "trainyard: train: 2 of its files are outside of the data, behind links: "
        f"cat/far.jpg is {tmp_path}/storage/x.jpg\n"
    )


def test_pack_refuses_a_link_to_a_file_that_is_no_image(folder: Path, tmp_path: Path) -> None:
    """A data set of somebody else could bring a link to a private key into shards to share."""
    write_files(tmp_path, {"secret": b"root:x:0:0"})
    (folder / "cat" / "link.jpg").symlink_to(tmp_path / "secret")
    words = ("--format", "webdataset", "--split", "train")
    error = refused("data", "pack", folder, tmp_path / "out", *words)
    check(error, "pack.link-leaves-data", path=folder / "cat/link.jpg", target=tmp_path / "secret")
    assert not [*(tmp_path / "out").glob("*.tar")]
