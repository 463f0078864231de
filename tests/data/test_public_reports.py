"""Troubles that people reported of other trainers, tried on this one: the right data, or an error.

Each test names its reports. Images say the class that they are of, so a sample under another class
is found wherever the labels come from.
"""

import csv
import io
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.command_line import Capture, run
from tests.data.tars import write_files, write_tar
from tests.images import encode
from trainyard.data._native import own_decoder
from trainyard.data.config import DataConfig
from trainyard.data.decode.crops import Crops
from trainyard.data.decode.decode import decode_batch
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import merged_splits
from trainyard.data.open_datasets import open_datasets
from trainyard.data.stream.shards import Stream
from trainyard.errors import DataError
from trainyard.world import World

Samples = list[tuple[str, str]]  # the class that an image says, and the one that it counts for


def image(class_name: str, number: int = 0) -> bytes:
    """A picture with its class in a comment, and other bytes for every number."""
    pixels = np.full((8, 8, 3), number % 256, np.uint8)
    return encode(Image.fromarray(pixels), comment=f"<{class_name}>")


def write_classes(
    folder: Path, classes: Iterable[str], count: int = 3, first: int = 0, suffix: str = ".jpg"
) -> None:
    """A folder per class; images of other `first` numbers are other images."""
    for class_name in classes:
        for number in range(first, first + count):
            write_files(folder / class_name, {f"{number}{suffix}": image(class_name, number)})


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def opened(**keys: Any) -> dict[str, Samples]:
    """The samples of both splits, under the classes that a run trains and scores them as."""
    data = open_datasets(DataConfig(**keys), World(), lambda *_: None)
    assert not isinstance(data.train, Stream)
    result: dict[str, Samples] = {}
    for split, index in (("train", data.train), ("val", data.val)):
        rows = []
        for sample in range(len(index)):
            path, offset, size = index.locate(sample)
            content = Path(path).read_bytes()[offset : offset + size]
            said = content.partition(b"<")[2].partition(b">")[0].decode()
            rows.append((said, data.train.classes[index.label[sample]]))
        result[split] = rows
    return result


def opened_whole(location: Path) -> dict[str, Samples]:
    """The samples of the splits that `--data` finds."""
    return opened(**merged_splits([str(location)]))


def right_or_refused(samples: dict[str, Samples]) -> None:
    assert all(said == counted for rows in samples.values() for said, counted in rows)


# --- the classes of validation data ---


def test_a_class_without_validation_images_shifts_no_label(tmp_path: Path) -> None:
    """ultralytics#13936: four rotations, validation without 180: 90 was scored as 180."""
    rotations = ("0", "90", "180", "270")
    write_classes(tmp_path / "train", rotations)
    write_classes(tmp_path / "val", ("0", "90", "270"), first=10)
    try:
        samples = opened_whole(tmp_path)
    except DataError as error:
        assert "180" in str(error)
    else:
        right_or_refused(samples)


@pytest.mark.parametrize(
    ("train", "val"), [("abc", "bc"), ("abc", "bcd"), ("abc", "cab"), ("bcd", "abc")]
)
def test_other_classes_in_validation_are_never_scored_by_their_place(
    tmp_path: Path, train: str, val: str
) -> None:
    """ultralytics pull 26192; VGGFace2-pytorch#7: as many classes, or fewer, but others."""
    write_classes(tmp_path / "train", train)
    write_classes(tmp_path / "val", val, first=10)
    try:
        right_or_refused(opened_whole(tmp_path))
    except DataError as error:
        missing = set(train) ^ set(val)
        assert any(f"'{name}'" in str(error) for name in missing)


def test_an_empty_class_folder_shifts_no_label(tmp_path: Path) -> None:
    """pytorch-image-models#957: validation with empty class folders had an accuracy of chance."""
    write_classes(tmp_path / "train", "abcd")
    write_classes(tmp_path / "val", "abd", first=10)
    (tmp_path / "val" / "c").mkdir()
    samples = opened_whole(tmp_path)
    right_or_refused(samples)
    assert len(samples["val"]) == 9


def test_a_class_without_validation_images_is_printed(tmp_path: Path, capsys: Capture) -> None:
    """pytorch-image-models#211: a class of five had no validation image, and nothing said so."""
    write_classes(tmp_path / "train", ("cat", "dog", "owl"))
    write_classes(tmp_path / "val", ("cat", "dog"), first=10)
    (tmp_path / "val" / "owl").mkdir()
    run("data", "verify", tmp_path)
    assert "owl" in "".join(capsys.readouterr())


def test_numbers_in_a_list_are_the_folders_of_that_name(tmp_path: Path) -> None:
    """DIGITS#665, pytorch/vision#714, pytorch#22566: folders 0 to 11 sort as 0, 1, 10, 11, 2."""
    names = [str(number) for number in range(12)]
    write_classes(tmp_path / "train", names)
    write_classes(tmp_path / "others", names, first=10)
    rows = [(f"others/{name}/{number}.jpg", name) for name in names for number in range(10, 13)]
    listed = write_csv(tmp_path / "val.csv", [("path", "label"), *rows])
    right_or_refused(opened(train=str(tmp_path / "train"), val=str(listed)))


def test_numbers_in_shards_are_the_folders_of_that_name(tmp_path: Path) -> None:
    """ImageNetV2#10: folder 100 had label 2; here the other side are shards with numbers."""
    names = [str(number) for number in range(12)]
    write_classes(tmp_path / "train", names)
    members = []
    for key, name in enumerate(names):
        members += [(f"{key:03d}.jpg", image(name, 10)), (f"{key:03d}.cls", name.encode())]
    shard = write_tar(tmp_path / "val.tar", members)
    try:
        right_or_refused(opened(train=str(tmp_path / "train"), val=str(shard)))
    except DataError as error:
        assert "val.tar" in str(error)


# --- names of classes ---


def test_one_name_in_two_unicode_forms_is_one_class(tmp_path: Path) -> None:
    """renpy pull 2327, PFERD pull 141: macOS writes é as two characters, archives as one."""
    one, two = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    for split, name, first in (("train", one, 0), ("val", two, 10)):
        for number in range(3):
            write_files(tmp_path / split / name, {f"{number}.jpg": image("x", first + number)})
            write_files(tmp_path / split / "bar", {f"{number}.jpg": image("y", first + number)})
    samples = opened_whole(tmp_path)
    assert {counted for _, counted in samples["train"]} == {"bar", one}
    assert {counted for _, counted in samples["val"]} == {"bar", one}


def test_a_label_with_a_space_behind_it_is_no_class_of_its_own(tmp_path: Path) -> None:
    """frictionless-py#1172, asreview#467: "english " and "english" were two categories."""
    write_classes(tmp_path, ("cat", "dog"))
    rows = [
        ("cat/0.jpg", "cat "),
        ("cat/1.jpg", "cat"),
        ("dog/0.jpg", " dog"),
        ("dog/1.jpg", "dog"),
    ]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    try:
        assert open_index(str(listed)).classes == ("cat", "dog")
    except DataError as error:
        assert "all.csv" in str(error)


@pytest.mark.parametrize("name", ["NA", "nan", "None", "null", "N/A", "True", "1e5", "NULL"])
def test_words_that_mean_nothing_to_a_table_are_classes(tmp_path: Path, name: str) -> None:
    """cellxgene#1111, pydatalab pull 398: the label NA became a missing value, its rows went."""
    write_classes(tmp_path, ("cat", name.replace("/", "_")))
    rows = [("cat/0.jpg", "cat"), (f"{name.replace('/', '_')}/0.jpg", name)]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    index = open_index(str(listed))
    assert (len(index), set(index.classes)) == (2, {"cat", name})


def test_zeros_before_a_number_make_another_class(tmp_path: Path) -> None:
    """molgenis-service-armadillo#1027: 001 was read as the number 1."""
    write_classes(tmp_path, ("a", "b"))
    rows = [("a/0.jpg", "001"), ("a/1.jpg", "1"), ("b/0.jpg", "01"), ("b/1.jpg", "1.0")]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    assert open_index(str(listed)).classes == ("001", "01", "1", "1.0")


# --- splits ---


def test_words_of_splits_in_names_of_images_are_only_words(tmp_path: Path) -> None:
    """datasets#5021: with "photo of a train.jpg" among them, all other images were passed over."""
    names = ("photo of a cat", "photo of a train", "photo of test tubes", "val")
    for class_name in ("cat", "thing"):
        write_files(
            tmp_path / class_name, {f"{n}.jpg": image(class_name, i) for i, n in enumerate(names)}
        )
    index = open_index(str(tmp_path))
    assert (len(index), index.classes) == (8, ("cat", "thing"))


@pytest.mark.parametrize("layout", [("train.png", "pika.png"), ("train/0.jpg", "test/1.jpg")])
def test_images_without_classes_are_refused(
    tmp_path: Path, capsys: Capture, layout: tuple[str, ...]
) -> None:
    """datasets#7201, datasets#7880: one image was read; the classes were called train and test."""
    write_files(tmp_path / "data", {name: image(name, n) for n, name in enumerate(layout)})
    assert run("data", "show", tmp_path / "data") == 2
    assert "data" in capsys.readouterr().err


def test_flat_validation_images_are_refused(tmp_path: Path) -> None:
    """pytorchnet#5: ImageNet's 50,000 validation images lay in one folder, beside train."""
    write_classes(tmp_path / "train", ("n01440764", "n01443537"))
    images = {f"ILSVRC2012_val_{n:08d}.JPEG": image("?", n) for n in range(4)}
    write_files(tmp_path / "val", images)
    with pytest.raises(DataError, match="val"):
        opened_whole(tmp_path)


# --- files ---


def test_folders_of_notebooks_are_no_classes(tmp_path: Path) -> None:
    """mmpretrain#507: .ipynb_checkpoints was class 0, and the last class out of bounds."""
    write_classes(tmp_path, ("a", "b"))
    write_files(tmp_path / ".ipynb_checkpoints", {"x.jpg": image("?")})
    write_files(tmp_path / "a" / ".ipynb_checkpoints", {"0-checkpoint.jpg": image("?")})
    index = open_index(str(tmp_path))
    assert (index.classes, len(index)) == (("a", "b"), 6)
    assert index.left_out.total == 2


@pytest.mark.parametrize("suffix", [".JPG", ".JPEG", ".Jpg", ".jfif", ".jpe"])
def test_endings_of_cameras_are_read(tmp_path: Path, suffix: str) -> None:
    """anomalib#3058, kohya_ss#217, vision#552, clean-fid#37: only lower-case endings were found."""
    write_classes(tmp_path, ("a", "b"), suffix=suffix)
    write_classes(tmp_path, ("a",), first=5)
    assert len(open_index(str(tmp_path))) == 9


def test_a_missing_file_of_a_list_is_named(tmp_path: Path) -> None:
    """keras-preprocessing#92 and pull 177: rows whose file is missing were ignored."""
    write_classes(tmp_path, ("a", "b"))
    rows = [("a/0.jpg", "a"), ("b/0.jpg", "b"), ("b/gone.jpg", "b")]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    with pytest.raises(DataError, match=r"line 4.*gone\.jpg"):
        open_index(str(listed))


def test_paths_of_windows_in_a_list(tmp_path: Path) -> None:
    r"""supervision pull 2581, CNTK#1321: `testImages\WIN_1.jpg` is no file on Linux."""
    write_classes(tmp_path, ("a", "b"))
    rows = [(r"a\0.jpg", "a"), (r"b\0.jpg", "b")]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    try:
        assert len(open_index(str(listed))) == 2
    except DataError as error:
        assert str(error).endswith("write / for \\")


def test_rows_of_one_image_with_two_labels_are_refused(tmp_path: Path) -> None:
    """dive#970 and others: two lines gave one image two classes, and both were trained on."""
    write_classes(tmp_path, ("a", "b"))
    rows = [("a/0.jpg", "a"), ("b/0.jpg", "b"), ("a/0.jpg", "b")]
    listed = write_csv(tmp_path / "all.csv", [("path", "label"), *rows])
    with pytest.raises(DataError, match=r"a/0\.jpg"):
        open_index(str(listed))


def test_a_list_that_changed_is_read_again(tmp_path: Path) -> None:
    """yolov5#306, ultralytics pull 26207: labels that were mended stayed the old ones."""
    write_classes(tmp_path, ("a", "b"))
    listed = write_csv(tmp_path / "l.csv", [("path", "label"), ("a/0.jpg", "b"), ("b/0.jpg", "a")])
    assert open_index(str(listed)).label.tolist() == [1, 0]
    before = os.stat(listed)
    write_csv(listed, [("path", "label"), ("a/0.jpg", "a"), ("b/0.jpg", "b")])
    assert os.stat(listed).st_size == before.st_size
    assert open_index(str(listed)).label.tolist() == [0, 1]


def test_an_image_saved_again_in_its_place_is_read(tmp_path: Path) -> None:
    """fiftyone#119: files of the same names with other content were shown as the old ones."""
    write_classes(tmp_path, ("a", "b"))
    open_index(str(tmp_path))
    path = tmp_path / "a" / "0.jpg"
    path.write_bytes(encode(Image.new("RGB", (64, 64)), comment="<a>"))
    index = open_index(str(tmp_path))
    assert index.size[0] == path.stat().st_size


# --- tars ---


def test_a_name_twice_in_a_tar_is_no_second_image(tmp_path: Path) -> None:
    """webdataset#157, #286: a later member of the same name replaces the former, says tar."""
    members = [("cat/1.jpg", image("cat")), ("dog/1.jpg", image("dog"))]
    tar = write_tar(tmp_path / "all.tar", [*members, ("cat/1.jpg", image("cat", 9))])
    try:
        index = open_index(str(tar))
    except DataError as error:
        assert "cat/1.jpg" in str(error)
    else:
        assert (len(index), index.left_out.total) == (2, 1)


def test_parts_of_a_sample_that_are_apart_are_refused(tmp_path: Path) -> None:
    """webdataset#407, ray pull 65044: unsorted members gave samples without a label."""
    images = [(f"{n}.jpg", image("x", n)) for n in range(3)]
    labels = [(f"{n}.cls", b"%d" % n) for n in range(3)]
    shard = write_tar(tmp_path / "0.tar", [*images, *labels])
    with pytest.raises(DataError, match="sample '0'"):
        open_index(str(shard))


def test_a_dot_in_a_folder_of_a_shard_ends_no_key(tmp_path: Path) -> None:
    """refiner pull 124: all of train.v1/0001.jpg, train.v1/0002.jpg became one sample."""
    members = []
    for n in range(3):
        members += [(f"train.v1/{n}.jpg", image("x", n)), (f"train.v1/{n}.cls", b"%d" % n)]
    assert len(open_index(str(write_tar(tmp_path / "0.tar", members)))) == 3


def test_what_lies_behind_the_end_of_a_tar_is_not_lost(tmp_path: Path) -> None:
    """webdataset#157: shards that were joined by cat end at the first archive's end mark."""
    one, two = io.BytesIO(), io.BytesIO()
    for file, first in ((one, 0), (two, 2)):
        members = []
        for n in range(first, first + 2):
            members += [(f"{n}.jpg", image("x", n)), (f"{n}.cls", b"%d" % (n % 2))]
        file.write(write_tar(tmp_path / "part" / f"{first}.tar", members).read_bytes())
    (tmp_path / "all.tar").write_bytes(one.getvalue() + two.getvalue())
    try:
        index = open_index(str(tmp_path / "all.tar"))
    except DataError as error:
        assert "all.tar" in str(error)
    else:
        assert len(index) == 4 or index.left_out.total


# --- pixels ---


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I;16B")])
def test_sixteen_bits_are_scaled_not_clipped(kind: str, mode: str) -> None:
    """Pillow#3011, pytorch#20524, vision#2218: grey images of 16 bits were all white."""
    ramp = np.linspace(0, 65535, 64).astype(">u2" if mode == "I;16B" else "<u2").reshape(8, 8)
    content = encode(Image.frombytes(mode, (8, 8), ramp.tobytes()), kind)
    pixels = np.zeros((1, 8, 8, 3), np.uint8)

    def whole(_: object) -> Crops:
        return Crops(np.array([[0, 0, 8, 8]], float), np.zeros(1, bool))

    decode_batch([content], whole, pixels, "bilinear", decoder=own_decoder())
    np.testing.assert_allclose(pixels[0, :, :, 0], ramp / 257, atol=2)


def test_two_labels_of_one_sample_are_refused(tmp_path: Path) -> None:
    """webdataset#286: a sample with a second label of its key was an error without a name."""
    members = [("0.jpg", image("x")), ("0.cls", b"0"), ("0.cls", b"1")]
    with pytest.raises(DataError, match="sample '0'"):
        open_index(str(write_tar(tmp_path / "0.tar", members)))
