"""Files that no reader opens: the error has the line that makes data of them."""

import os
import shutil
from pathlib import Path

import pytest

from tests.data.tars import write_files
from tests.errors import raises
from trainyard.data.index.build import open_index
from trainyard.data.index.learnable import check_learnable
from trainyard.data.index.merge import merged_splits


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("my set.zip", "unzip '{}/my set.zip' -d '{}/my set'"),
        ("SET.ZIP", "unzip {}/SET.ZIP -d {}/SET"),
        ("set.7z", "7z x {}/set.7z -o{}/set"),
        ("set.rar", "unrar x {}/set.rar {}/set/"),
        ("list.xlsx", "list.xlsx lists the images, save it as a .csv"),
        ("set.tar.gz", "mkdir {}/set && tar xf {}/set.tar.gz -C {}/set"),
        ("cifar-100-python.tar.gz", "data prepare cifar100`"),
        ("train-images-idx3-ubyte.gz", "data prepare mnist`"),
        ("emnist-letters-train-images-idx3-ubyte.gz", "docs/arrays.md"),
        *((f"set{end}", "docs/arrays.md") for end in (".npz", ".mat", ".pkl", ".arrow", ".mdb")),
    ],
)
def test_a_file_and_a_folder_that_holds_only_it(name: str, command: str, tmp_path: Path) -> None:
    place = write_files(tmp_path, [name])
    code = "tar.compressed" if name.endswith(".tar.gz") else ""
    for location, usual in ((f"{place}/{name}", "data.unknown-format"), (place, "data.no-images")):
        with raises(code or usual) as caught:
            open_index(location)
        assert command.replace("{}", place) in str(caught.value.fields["hint"])


def test_arrays_in_a_folder_without_images(tmp_path: Path) -> None:
    """LSUN."""
    place = write_files(tmp_path, ["bedroom_train_lmdb/data.mdb", "notes.md"])
    with raises("data.all-left-out") as caught:
        open_index(place)
    assert f"{place}/bedroom_train_lmdb/data.mdb" in str(caught.value.fields["hint"])


def test_a_table_beside_images_of_no_class_is_named(tmp_path: Path) -> None:
    place = write_files(tmp_path, ["images/1.jpg", "images/2.jpg", "train.csv"])
    with raises("data.one-class", name="images") as caught:
        check_learnable(open_index(place), place)
    assert f"{place}/train.csv" in str(caught.value.fields["hint"])
    write_files(tmp_path, ["flat/1.jpg", "flat/train.csv"])
    with raises("data.no-class-folders") as caught:
        open_index(f"{place}/flat")
    assert f"{place}/flat/train.csv" in str(caught.value.fields["hint"])
    shutil.rmtree(tmp_path / "flat")
    os.rename(tmp_path / "images", tmp_path / "train")
    with raises("data.splits-as-classes", names="train") as caught:
        open_index(place)
    assert f"{place}/train.csv" in str(caught.value.fields["hint"])
    os.rename(tmp_path / "train", tmp_path / "images")
    write_files(tmp_path, ["masks/3.jpg"])
    with raises("data.doubtful-classes") as caught:
        merged_splits([place], may_share=True)
    assert f"{place}/train.csv" in str(caught.value.fields["remedy"])


def test_archives_and_tables_of_training_data_come_first(tmp_path: Path) -> None:
    """A table of results to submit was named as the list of the images."""
    names = ["train.zip", "test.zip", "train.csv", "about.csv", "sample_submission.csv"]
    place = write_files(tmp_path, [*names, "test.csv"])
    for name in names:
        with raises("data.no-images") as caught:
            open_index(place)
        assert f"{place}/{name}" in str(caught.value.fields["hint"]).rpartition("; ")[2]
        os.remove(tmp_path / name)
    write_files(tmp_path, ["set.zip", "set/1.jpg", "set/2.jpg"])  # unpacked
    with raises("data.one-class") as caught:
        check_learnable(open_index(place), place)
    assert f"{place}/test.csv" in str(caught.value.fields["hint"])


@pytest.mark.parametrize("names", [["notes.txt"], ["._set.zip", "readme"]])
def test_other_files_have_no_remedy(names: list[str], tmp_path: Path) -> None:
    place = write_files(tmp_path, names)
    with raises("data.no-images") as caught:
        open_index(place)
    assert "unpack" not in str(caught.value)
    assert "arrays.md" not in str(caught.value)
