import re
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from tests.data.tars import read_rows, write_tar
from trainyard.data import formats
from trainyard.data.location import find_place
from trainyard.errors import DataError


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"the content of {name}".encode())


# --- folders ---


def assert_equal_to_image_folder(folder: Path) -> None:
    expected = ImageFolder(str(folder))
    scan = formats.scan(find_place(str(folder)))
    rows = list(scan.rows)

    assert scan.format == "folder"
    assert scan.classes == expected.classes
    assert [(str(folder / row.path), *row.labels) for row in rows] == expected.samples
    assert all(row.offsets == [0] for row in rows)
    assert [row.sizes for row in rows] == [[(folder / row.path).stat().st_size] for row in rows]


def test_a_folder_reads_like_image_folder(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        *("dog/10.jpg", "dog/9.jpg", "dog/a.JPG", "dog/B.JPEG", "dog/notes.txt", "dog/jpg"),
        *("dog/deep/er/1.png", "dog/deep/2.png", "dog/deep.png", "dog/deep-2/1.png"),
        *("cat/x.webp", "cat/x.bmp", "cat/x.ppm", "cat/x.pgm", "cat/x.tif", "cat/x.tiff"),
        *("Zebra/1.jpg", "n02/1.jpg", "n1/1.jpg"),
        *("épagneul/été.jpg", "épagneul/日本.jpg", "épagneul/😀.png", "épagneul/z.jpg"),
        *("readme.md", "loose.jpg"),
    )

    assert_equal_to_image_folder(tmp_path)


def test_a_folder_follows_links_like_image_folder(tmp_path: Path) -> None:
    write_files(tmp_path / "elsewhere", "1.jpg", "deep/2.jpg")
    write_files(tmp_path / "data", "cat/1.jpg")
    (tmp_path / "data/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/cat/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/cat/3.jpg").symlink_to(tmp_path / "elsewhere/1.jpg")

    assert_equal_to_image_folder(tmp_path / "data")


def test_a_folder_of_images_is_no_image(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg", "cat/album.jpg/2.jpg")

    assert_equal_to_image_folder(tmp_path)


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg", ".ipynb_checkpoints/2.jpg", ".git/3.jpg")

    assert formats.scan(find_place(str(tmp_path))).classes == ["cat"]
    assert read_rows(tmp_path) == [(b"the content of cat/1.jpg", 0)]


def test_a_broken_link_is_no_sample(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg")
    (tmp_path / "cat/2.jpg").symlink_to(tmp_path / "absent.jpg")

    assert read_rows(tmp_path) == [(b"the content of cat/1.jpg", 0)]


def test_an_empty_class_keeps_its_number(tmp_path: Path) -> None:
    write_files(tmp_path, "a/1.jpg", "c/3.jpg")
    (tmp_path / "b").mkdir()

    assert formats.scan(find_place(str(tmp_path))).classes == ["a", "b", "c"]
    assert [label for _, label in read_rows(tmp_path)] == [0, 2]


# --- what is recognised ---


def test_recognise(tmp_path: Path) -> None:
    write_files(tmp_path, "folder/cat/1.jpg")
    (tmp_path / "shards").mkdir()
    for number in range(4):
        write_tar(tmp_path / f"shards/{number}.tar", [])

    assert formats.recognise(find_place(f"{tmp_path}/folder")) == "folder"
    assert formats.recognise(find_place(f"{tmp_path}/shards")) == "webdataset"
    assert formats.recognise(find_place(f"{tmp_path}/shards/0.tar")) == "webdataset"
    assert formats.recognise(find_place(f"{tmp_path}/shards/*.tar")) == "webdataset"
    assert formats.recognise(find_place(f"{tmp_path}/shards/{{0..3}}.tar")) == "webdataset"


def test_what_is_not_recognised_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_files(tmp_path, "flat/1.jpg", "notes.txt")

    for name, word in [("flat", "no images"), ("notes.txt", "format"), ("absent", "no such file")]:
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/{name}: ") + f".*({word})"):
            formats.recognise(find_place(f"{tmp_path}/{name}"))
