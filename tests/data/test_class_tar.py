"""Tars whose layout says the class: folders in a tar, a tar of tars, a tar for each class."""

import gzip
import os
import random
import tarfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.data.tars import (
    TAR_FORMATS,
    Patch,
    Stored,
    read_rows,
    sealed,
    stored,
    write_files,
    write_tar,
)
from tests.errors import raises
from trainyard.data import formats
from trainyard.data.formats import class_tar
from trainyard.data.formats.left_out import BESIDE
from trainyard.data.formats.scan import Scan
from trainyard.data.formats.tar import is_image, some_names
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.data.storage.open import open_source
from trainyard.errors import DataError


def assert_refused(place: str | Path, code: str, /, **fields: object) -> None:
    with raises(code, **fields):
        build_index(str(place))


def images(*names: str) -> Stored:
    return [(name, f"the content of {name}".encode()) for name in names]


def inner_tar(folder: Path, *names: str) -> bytes:
    return write_tar(folder / "inner", images(*names)).read_bytes()


# --- a folder for each class ---


@pytest.mark.parametrize("tar_format", TAR_FORMATS)
@pytest.mark.parametrize("above", ["", "./", "data/", f"{'x' * 90}/{'y' * 40}/"])
def test_the_class_is_the_parent_folder(tmp_path: Path, tar_format: int, above: str) -> None:
    names = ["zebra/2.JPEG", "zebra/1.jpg", "ant/1.png", "Zebra/1.webp", "zebra/0.jpg"]
    other = ["ant/notes.txt", "README", "ant/._1.jpg"]
    content = images(*(above + name for name in names + other))
    path = write_tar(tmp_path / "0.tar", content, tar_format)
    assert formats.scan(find_place(str(path))).format == "tar"
    assert stored(path) == [
        (name.split("/")[0], f"the content of {above}{name}".encode()) for name in names
    ]
    assert open_index(str(path)).classes == ("Zebra", "ant", "zebra")


def test_a_large_tar_comes_in_parts(tmp_path: Path) -> None:
    names = [f"{('ant', 'bee')[number % 2]}/{number}.jpg" for number in range(10_001)]
    path = write_tar(tmp_path / "0.tar", images(*names))
    assert len(list(formats.scan(find_place(str(path))).rows)) == 2
    assert stored(path) == [
        (name.split("/")[0], f"the content of {name}".encode()) for name in names
    ]


IMAGENET_21K_P = [
    *("small_classes/n03/1.JPEG", "small_classes/n01/2.JPEG"),
    *("imagenet21k_train/n02/3.JPEG", "imagenet21k_train/n01/4.JPEG"),
    *("imagenet21k_val/n01/5.JPEG", "imagenet21k_train/n04/6.JPEG"),
    *("imagenet21k_val/n02/7.JPEG", "1.JPEG"),
]


def test_one_scan_gives_all_splits(tmp_path: Path, monkeypatch: Patch) -> None:
    junk = ("./n01/._1.jpg", "__MACOSX/n01/1.jpg", ".git/1.jpg")
    names = (f"imagenet21k_resized/{name}" for name in (*IMAGENET_21K_P, *junk))
    path = write_tar(tmp_path / "all.tar", images(*names))
    scans: list[str] = []
    real_scan = formats.scan

    def scan(place: ResolvedLocation) -> Scan:
        scans.append(place.location)
        return real_scan(place)

    monkeypatch.setattr(formats, "scan", scan)
    assert find_splits(str(path)) == {"train": f"{path}#train", "val": f"{path}#val"}
    train, val = open_index(f"{path}#train"), open_index(f"{path}#val")
    assert len(scans) == 1
    assert train.classes == val.classes == ("n01", "n02", "n04")  # no small classes
    for index, expected in ((train, ["n02/3", "n01/4", "n04/6"]), (val, ["n01/5", "n02/7"])):
        found = [f"{name}/{content[-6:-5].decode()}" for name, content in stored(index)]
        assert found == expected
    both = f"{path}#train or {path}#val"
    for end, ways in (("", both), ("#test", both), ("#vall", f"{path}#val")):
        assert_refused(f"{path}{end}", "data.several-splits", location=path, names=ways)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train/n01/1.jpg", "train"),
        ("Training/n01/1.jpg", "train"),
        ("trainyard/validation/n01/1.jpg", "val"),  # the innermost
        ("val/trainval/n01/1.jpg", "val"),
        ("a/train/b/n01/1.jpg", "train"),
        ("train/1.jpg", ""),
        ("trainval/n01/1.jpg", ""),
        ("n01/train.jpg", ""),
    ],
)
def test_which_folder_is_a_split(tmp_path: Path, name: str, split: str) -> None:
    path = write_tar(tmp_path / "0.tar", images(name))
    place = find_place(str(path))
    assert formats.splits_inside(place) == ((split,) if split else ())
    if split:
        assert [rows.split for rows in formats.scan(place).rows] == [split]


def test_a_split_that_comes_late_in_a_large_tar_is_found(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with open(path, "wb") as file:  # sparse: takes no room
        for number in range(1000):
            split = "small" if number < 300 else "train" if number < 980 else "val"
            info = tarfile.TarInfo(f"{split}/class{number % 7}/{number}.jpg")
            info.size = 300_000
            file.write(info.tobuf(tarfile.USTAR_FORMAT))
            file.seek(300_032, 1)
        file.write(bytes(1024))
    with closing(open_source(str(path))) as tar:
        assert len(list(some_names(tar))) < 300  # by far not all are read
    assert formats.splits_inside(find_place(str(path))) == ("train", "val")
    sizes = Counter[str]()
    for rows in formats.scan(find_place(str(path))).rows:
        sizes[rows.split] += len(rows.labels)
    assert sizes == {"train": 680, "val": 20}


def test_a_split_that_only_the_scan_finds_is_not_mixed_in(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    path = write_tar(tmp_path / "0.tar", images("a/1.jpg", "b/1.jpg", "val/a/1.jpg"))
    monkeypatch.setattr(class_tar, "some_names", lambda tar: iter(["a/1.jpg"]))
    assert_refused(path, "tar.partly-in-split", path=path, name="val/a/1.jpg", split="val")


@pytest.mark.parametrize(
    ("names", "code", "fields"),
    [
        (["a/1.jpg", "2.jpg"], "tar.class-in-two-layouts", {"name": "2.jpg", "other": "a/1.jpg"}),
        (["a/1.jpg", "b.tar"], "tar.class-in-two-layouts", {"name": "b.tar", "other": "a/1.jpg"}),
        (["a/1.jpg", "a/b/1.jpg"], "tar.class-in-class", {"outer": "a", "inner": "a/b"}),
        (
            ["a/b/1.jpg", "a/b/c/d/1.jpg"],
            "tar.class-in-class",
            {"outer": "a/b", "inner": "a/b/c/d"},
        ),
        (["train/1.jpg", "val/2.jpg"], "data.splits-as-classes", {"names": "train and val"}),
        (["a/train/1.jpg", "a/test/2.jpg"], "data.splits-as-classes", {"names": "test and train"}),
        (["a/1_mask.jpg", "a/1.jpg", "b/2.jpg"], "tar.masks", {"name": "a/1_mask.jpg"}),
        (["1.jpg"], "tar.no-labels", {"name": "1.jpg", "stem": "0"}),
        (["a.txt", "b/c.txt"], "data.all-left-out", {}),
    ],
)
def test_a_tar_that_does_not_say_the_class_is_an_error(
    tmp_path: Path, names: list[str], code: str, fields: dict[str, object]
) -> None:
    assert_refused(write_tar(tmp_path / "0.tar", images(*names)), code, **fields)


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz"])
def test_a_compressed_tar_is_an_error_that_says_what_to_do(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"imagenet21k_resized.{suffix}"
    path.write_bytes(gzip.compress(write_tar(tmp_path / "0", images("a/1.jpg")).read_bytes()))
    for location in (path, f"{path}#train"):
        assert_refused(location, "tar.compressed", path=path)


# --- tars inside a tar ---


def test_a_tar_of_tars_is_read_in_place(tmp_path: Path) -> None:
    inner = {
        "n02.tar": ["n02_1.JPEG", "n02_2.JPEG"],
        "deep/n01.tar": ["n01_7.JPEG", "n01_notes.txt", "._n01_7.JPEG"],
        "n03.tar": ["./n03/n03_1.JPEG", "n03/n03_2.JPEG", "./n03_3.JPEG"],
        "n00.tar": [],
        "cat.tar": ["1.jpg"],  # no number, so no part of something
    }
    content = [(name, inner_tar(tmp_path, *names)) for name, names in inner.items()]
    path = write_tar(tmp_path / "fall11_whole.tar", [("README", b"about"), *content])
    assert formats.scan(find_place(str(path))).format == "tar"
    assert formats.splits_inside(find_place(str(path))) == ()
    assert stored(path) == [
        (Path(tar).stem, f"the content of {name}".encode())
        for tar, names in inner.items()
        for name in names
        if is_image(name)
    ]


@pytest.mark.parametrize(
    ("inner", "names", "code", "fields"),
    [
        ("n01.tar", ["a.tar"], "tar.inner-not-class", {"inner": "n01.tar", "name": "a.tar"}),
        ("train.tar", ["0.cls", "0.jpg"], "tar.inner-not-class", {"name": "0.cls"}),
        ("train-000000.tar", ["0.jpg", "0.cls"], "tar.no-labels", {"stem": "train-000000"}),
        ("part1.tar", ["cat1.jpg"], "tar.no-labels", {"stem": "part1"}),
        ("n01.tar", ["n02/1.jpg"], "tar.inner-class-or-folder", {"name": "n02/1.jpg"}),
        ("...tar", ["1.jpg"], "data.all-left-out", {}),
        ("._n01.tar", ["n01_1.jpg"], "data.all-left-out", {}),
        ("n01.tar", ["../1.jpg"], "tar.member-outside", {"offset": 512}),
    ],
)
def test_a_tar_inside_that_is_no_class_is_an_error(
    tmp_path: Path, inner: str, names: list[str], code: str, fields: dict[str, object]
) -> None:
    path = write_tar(tmp_path / "0.tar", [(inner, inner_tar(tmp_path, *names))])
    assert_refused(path, code, **fields)


def test_a_tar_inside_that_is_cut_is_an_error(tmp_path: Path) -> None:
    inner = inner_tar(tmp_path, "n01_1.jpg")
    later = ("n02.tar", inner_tar(tmp_path, "n02_1.jpg"))
    path = write_tar(tmp_path / "0.tar", [("n01.tar", inner[:530]), later])
    assert_refused(path, "tar.truncated-member", path=path, offset=512)


# --- a tar for each class ---


def write_classes(folder: Path, tars: dict[str, list[str]]) -> None:
    for name, names in tars.items():
        write_tar(folder / name, images(*names))


def test_a_folder_of_a_tar_for_each_class(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    tars = {f"n0{n}.tar": [f"n0{n}_{i}.JPEG" for i in range(n)] for n in range(1, 5)}
    write_classes(folder, {**tars, "n00.tar": []})
    expected = [
        (Path(tar).stem, f"the content of {name}".encode())
        for tar, names in tars.items()
        for name in names
    ]
    assert stored(folder) == expected
    assert stored(f"{folder}/*.tar") == expected
    assert stored(f"{folder}/n0{{2..3}}.tar") == expected[1:6]
    assert stored(f"{folder}/n02.tar") == expected[1:3]


@pytest.mark.parametrize("folders", [False, True])
def test_names_without_a_number_are_classes(tmp_path: Path, folders: bool) -> None:
    folder = tmp_path / "data"
    above = ("cat/", "dog/") if folders else ("./", "")
    write_classes(folder, {"cat.tar": [f"{above[0]}1.jpg"], "dog.tar": [f"{above[1]}1.jpg"]})
    assert [name for name, _ in stored(folder)] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("tars", "code", "fields"),
    [
        ({"train-000000.tar": ["1.jpg"], "train-000001.tar": ["2.jpg"]}, "tar.no-labels", {}),
        ({"n01.tar": ["n01_1.jpg"], "n02.tar": ["n01_1.jpg"]}, "tar.no-labels", {"stem": "n02"}),
        ({"train.tar": ["1.jpg"], "val.tar": ["1.jpg"]}, "data.splits-as-classes", {}),
        ({"0.tar": ["0001.jpg"], "1.tar": ["1001.jpg"]}, "tar.no-labels", {"stem": "0"}),
        ({"cat.tar": ["1.jpg"]}, "tar.no-labels", {"stem": "cat"}),
        ({"cat.tar": ["1.jpg"], "dog.tar": ["dog/1.jpg"]}, "tar.class-in-two-layouts", {}),
    ],
)
def test_tars_that_may_be_no_classes_are_an_error(
    tmp_path: Path, tars: dict[str, list[str]], code: str, fields: dict[str, object]
) -> None:
    write_classes(tmp_path / "data", tars)
    assert_refused(tmp_path / "data", code, **fields)


def test_dots_are_no_class(tmp_path: Path) -> None:
    for name in (".tar", "..tar", "...tar"):
        assert_refused(write_tar(tmp_path / name, images("_1.jpg", ".._1.jpg")), "tar.no-labels")


def test_a_folder_of_class_folders_is_one_whatever_tar_lies_there(tmp_path: Path) -> None:
    write_files(tmp_path / "data", {"n01/n01_1.jpg": b"unpacked", "backup.tar.gz": b"?"})
    write_classes(tmp_path / "data", {"n01.tar": ["n01_1.jpg"]})
    assert read_rows(tmp_path / "data") == [(b"unpacked", 0)]


def test_noise_is_never_more_than_an_error(tmp_path: Path) -> None:
    folders = write_tar(tmp_path / "a", images("train/n01/1.jpg", "val/n01/2.jpg")).read_bytes()
    nested = [(f"n0{n}.tar", inner_tar(tmp_path, f"n0{n}_1.jpg")) for n in range(2)]
    whole = [folders, write_tar(tmp_path / "b", nested).read_bytes()]
    path, rng = tmp_path / "0.tar", random.Random(0)
    for _ in range(300):
        content = bytearray(rng.choice(whole))
        header = rng.randrange(len(content) // 512) * 512
        for place in (rng.randrange(12), rng.randrange(124, 136), rng.choice([156, 257, 345])):
            content[header + place] = rng.choice(b"\0 -./0179LSxg\x80\xff")
        content[header : header + 512] = sealed(bytes(content[header : header + 512]))
        path.write_bytes(content)
        try:
            rows = list(formats.scan(find_place(str(path))).rows)
        except DataError as error:
            assert str(path) in str(error)
        else:
            ends = [o + s for row in rows for o, s in zip(row.offsets, row.sizes, strict=True)]
            assert all(512 < end <= len(content) for end in ends)


@pytest.mark.parametrize("name", ["train-1.tar.gz", "train-1.TAR"])
def test_a_shard_that_would_be_left_out_is_an_error(name: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", images("3/a.png"))
    (tmp_path / "devkit.tar.gz").touch()
    formats.scan(find_place(str(tmp_path)))
    (tmp_path / name).touch()
    with raises("tar.passed-over", path=tmp_path / name, like="train-0.tar"):
        formats.scan(find_place(str(tmp_path)))


@pytest.mark.parametrize(
    ("first", "second"), [("siteA/cat/1.jpg", "siteB/cat/2.jpg"), ("cat/1.jpg", "more/cat/2.jpg")]
)
def test_two_folders_of_one_name_are_an_error(tmp_path: Path, first: str, second: str) -> None:
    """They became one class; as folders they are two, siteA and siteB."""
    path = write_tar(tmp_path / "a.tar", images(first, second))
    folders = {"folder": os.path.dirname(first), "other": os.path.dirname(second)}
    assert_refused(path, "tar.class-in-two-folders", path=path, **folders)
    for name, image in (("a", first), ("b", second)):
        write_tar(tmp_path / f"shards/{name}.tar", images(image))
    code = "tar.class-in-two-folders"
    assert_refused(tmp_path / "shards", code, path=tmp_path / "shards/b.tar", **folders)


def test_two_inner_tars_of_one_name_are_an_error(tmp_path: Path) -> None:
    inner = inner_tar(tmp_path, "cat_1.jpg")
    path = write_tar(tmp_path / "a.tar", [("a/cat.tar", inner), ("b/cat.tar", inner)])
    assert_refused(path, "tar.class-in-two-folders", folder="a/cat.tar", other="b/cat.tar")


def test_a_class_in_both_splits_or_below_the_name_of_each_tar_is_one(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", images("x/train/cat/1.jpg", "x/val/cat/2.jpg"))
    assert build_index(f"{path}#val").classes == ("cat",)
    for name in "ab":
        write_tar(tmp_path / f"shards/{name}.tar", images(f"{name}/cat/{name}.jpg"))
    assert len(build_index(str(tmp_path / "shards"))) == 2


@pytest.mark.parametrize("name", ["cat/1.jpg", "cat/notes.txt"])
def test_a_member_that_is_stored_twice_is_an_error(tmp_path: Path, name: str) -> None:
    """`tar -r` with a newer file: both were samples."""
    path = write_tar(tmp_path / "a.tar", images("cat/1.jpg", "cat/notes.txt", "cat/2.jpg", name))
    assert_refused(path, "tar.member-stored-twice", path=path, name=name)


def test_tars_beside_a_folder_without_an_image_are_read(tmp_path: Path) -> None:
    """The folder was taken for the only class, and no image was found."""
    for name in ("n01", "n02"):
        write_tar(tmp_path / f"{name}.tar", images(f"{name}_1.jpg"))
    write_files(tmp_path, ["notes/a.txt"])
    index = build_index(str(tmp_path))
    assert index.classes == ("n01", "n02")
    assert index.left_out.kinds == {BESIDE: (1, "notes")}
    write_files(tmp_path, ["cat/1.jpg"])
    index = build_index(str(tmp_path))
    assert index.classes == ("cat",)
    assert index.left_out.kinds["files ending in .tar"] == (2, "n01.tar")


def test_a_link_in_the_place_of_an_inner_tar_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("n01.tar", inner_tar(tmp_path, "n01_1.jpg"))])
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("n02.tar")
        info.type, info.linkname = tarfile.SYMTYPE, "n01.tar"
        tar.addfile(info)
    assert_refused(path, "tar.no-file", path=path, name="n02.tar", kind="a symbolic link")
