"""Layouts of public data sets, small: the right splits and classes, or an error with a way out."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.command_line import Capture, run
from tests.data.looks import opened, silent
from tests.data.tars import write_files, write_tar
from tests.errors import check, raises, refused
from trainyard.data.formats.split_names import splits_named
from trainyard.data.index import splits
from trainyard.data.index.build import open_index
from trainyard.data.index.layout import doubt_about, location_remarks
from trainyard.data.index.learnable import check_learnable, class_remarks
from trainyard.data.index.merge import merged_splits, validation_splits
from trainyard.data.index.splits import all_splits, find_splits, split_remarks, train_and_val
from trainyard.datasets.verify.checks import Check
from trainyard.datasets.verify.verify import verify


def files(folders: str, classes: str = "cat dog", images: Sequence[str] = ("1.jpg",)) -> list[str]:
    """The images of classes in each of some folders."""
    return [f"{f}/{c}/{n}" for f in folders.split() for c in classes.split() for n in images]


class Layout(NamedTuple):
    files: list[str]
    train: str
    val: str | None
    classes: str = "cat dog"
    remark: str = "^$"


TRAIN_VAL = {
    "Imagewoof, from fastai": Layout(
        [*files("imagewoof2-160/train imagewoof2-160/val"), "imagewoof2-160/noisy_imagewoof.csv"],
        *("imagewoof2-160/train", "imagewoof2-160/val"),
        remark="its splits lie in .*/imagewoof2-160$",
    ),
    "Intel scenes, from Kaggle": Layout(
        [*files("seg_train/seg_train seg_test/seg_test"), "seg_pred/seg_pred/1.jpg"],
        *("seg_train/seg_train", "seg_test/seg_test"),
        remark="/seg_pred: left out beside .*seg_train and .*seg_test$",
    ),
    "cats and dogs, from Kaggle": Layout(
        files("dataset/training_set dataset/test_set"),
        *("dataset/training_set", "dataset/test_set"),
        remark="/dataset$",
    ),
    "images beside lists of their labels": Layout(
        [*files("images/train images/val"), "train.csv", "val.csv"],
        *("images/train", "images/val"),
        remark="/train.csv, .*/val.csv: left out beside .*/images/train",
    ),
    "chest X-rays, from Kaggle": Layout(
        files("train val test chest_xray/train chest_xray/val __MACOSX/train"),
        *("train", "val"),
        remark="/chest_xray, .*/test: left out beside",
    ),
    "an export of Roboflow": Layout(
        [*files("train valid test"), "README.dataset.txt"],
        *("train", "valid"),
        remark="/test: left out beside .*/train and .*/valid$",
    ),
    "ImageNet by its archives": Layout(
        files("ILSVRC2012_img_train ILSVRC2012_img_val"),
        *("ILSVRC2012_img_train", "ILSVRC2012_img_val"),
    ),
    "Places365": Layout(
        files("train_256_places365standard val_256 test_256"),
        *("train_256_places365standard", "val_256"),
        remark="/test_256: left out",
    ),
    "folders of COCO": Layout(files("train2017 val2017"), "train2017", "val2017"),
    "dev": Layout(files("train_data dev_data"), "train_data", "dev_data"),
    "test images without classes": Layout(
        [*files("train val"), "test/1.jpg"], "train", "val", remark="/test: left out"
    ),
    "a class called train": Layout(files(".", "bus car train"), ".", None, "bus car train"),
    "a class of stations": Layout(
        files(".", "bus train_station bullet_train crash_test"),
        *(".", None, "bullet_train bus crash_test train_station"),
    ),
    "tars of both halves": Layout(
        ["x-train-0.tar", "x-train-1.tar", "x-test-0.tar", "latest.tar"],
        *("x-train-*.tar", "x-test-*.tar"),
        classes="",
        remark="/latest.tar: left out beside",
    ),
    "CUB-200": Layout(
        files("images", "001.Black_footed_Albatross 002.Laysan_Albatross"),
        *("images", None, "001.Black_footed_Albatross 002.Laysan_Albatross"),
    ),
    "ImageNet-V2": Layout(files(".", "0 1 10 2"), ".", None, "0 1 10 2"),
}


@pytest.mark.parametrize("layout", TRAIN_VAL.values(), ids=TRAIN_VAL.keys())
def test_splits_and_classes_of_a_public_layout(layout: Layout, tmp_path: Path) -> None:
    location = write_files(tmp_path / "set", layout.files)
    if layout.val is None:  # data without a split
        train = str(tmp_path / "set" / layout.train)
        assert find_splits(location) == {}
        assert train_and_val(train, may_share=True) == {"train": train, "val": None}
        index = open_index(train)
        check_learnable(index, train)
        assert index.classes == tuple(layout.classes.split())
        return
    found = find_splits(location)
    if layout.classes:
        assert {name: str(Path(place).relative_to(location)) for name, place in found.items()} == {
            "train": layout.train,
            "val": layout.val,
        }
        assert all(
            open_index(place).classes == tuple(layout.classes.split()) for place in found.values()
        )
    assert re.search(layout.remark, "\n".join(split_remarks(location)))


@pytest.mark.parametrize(
    ("names", "code", "fields"),
    [
        (
            [*files("."), *files("train", "diesel steam")],
            *("data.split-or-class", {"folder": "train", "other": "cat"}),
        ),
        (
            files("download", "bus car train/steam train/diesel"),
            *("data.split-or-class", {"folder": "train", "other": "bus"}),
        ),
        (files("train training_set val"), "data.several-of-split", {"split": "train"}),
        (files("train val validation"), "data.several-of-split", {"split": "val"}),
        (files("train test Testing"), "data.several-of-split", {"split": "test"}),
        ([*files("train val"), "train-0.tar"], "data.several-of-split", {"split": "train"}),
        (["train-0.tar", "train-0.h5", "val-0.tar"], "data.several-of-split", {"split": "train"}),
        (files("val"), "data.missing-split", {"names": "train"}),
        (files("images", "pizza soup"), "data.missing-split", {"names": "train and no val"}),
        (["train/cat.0.jpg", "test/1.jpg"], "data.splits-as-classes", {"names": "test and train"}),
    ],
)
def test_splits_that_cannot_be_told_are_an_error(
    names: list[str], code: str, fields: dict[str, object], tmp_path: Path
) -> None:
    with raises(code, **fields):
        train_and_val(write_files(tmp_path / "set", names))


def test_a_split_that_holds_images_without_classes_is_told(tmp_path: Path) -> None:
    """ImageNet of Kaggle: val was "left out", and a tenth of train validated."""
    images = [f"val/{n}.JPEG" for n in range(8)]
    place = write_files(tmp_path / "CLS-LOC", [*files("train"), *images])
    assert train_and_val(place, may_share=True) == {"train": f"{place}/train", "val": None}
    assert any(f"{place}/val: holds 8 images" in text for text in split_remarks(place))
    with raises("data.missing-split", names="val") as caught:
        train_and_val(place)
    assert f"{place}/val: holds 8 images" in str(caught.value.fields["hint"])


@pytest.mark.parametrize("inside", [".", "data", "plain_text", "plain_text/data"])
def test_shards_of_a_split_that_are_left_out_are_told(inside: str, tmp_path: Path) -> None:
    """One folder down they were not, as in repositories of the Hub."""
    names = [f"{inside}/{split}-0-of-1.parquet" for split in ("train", "validation", "test")]
    place = write_files(tmp_path / "set", names)
    assert find_splits(place)["val"] == str(Path(place) / inside / "*val*.parquet")
    (told,) = [text for text in split_remarks(place) if "left out" in text]
    assert told.startswith(str(Path(place) / inside / "test-0-of-1.parquet"))
    entered = [text for text in split_remarks(f"{place}#label=x") if "its splits lie in" in text]
    assert len(entered) == (inside != ".")


ENTERED = {
    "Caltech-101": ("101_ObjectCategories", ["Annotations/cat/1.mat", "show.m"]),
    "PetImages": ("PetImages", ["readme[1].txt"]),
    "a folder twice": ("archive/photos", ["archive/notes.txt"]),
    "masks in hidden folders": ("images", ["masks/.thumbs/1.jpg"]),
}


@pytest.mark.parametrize("name", ENTERED)
def test_the_folder_that_holds_all_images_is_entered(name: str, tmp_path: Path) -> None:
    """It was the only class, and an error."""
    folder, others = ENTERED[name]
    place = write_files(tmp_path / "set", [*files(folder), *others])
    inside = f"{place}/{folder}"
    assert train_and_val(place, may_share=True) == {"train": inside, "val": None}
    assert all_splits(place) == {"data": inside}
    assert validation_splits([place]) == [inside]
    assert merged_splits([place, place], may_share=True)["train"] == [inside, inside]
    assert f"{place}: all its images lie in {inside}" in split_remarks(place)
    assert all_splits(f"{place}#classes=path") == {"data": f"{inside}#classes=path"}


def test_archives_beside_what_was_unpacked_do_not_hide_it(tmp_path: Path) -> None:
    """Stanford Dogs."""
    place = write_files(tmp_path / "set", [*files("Images"), "lists/train_list.mat"])
    write_tar(tmp_path / "set/images.tar", [("Images/cat/1.jpg", b"x")])
    assert all_splits(place) == {"data": f"{place}/Images"}
    assert any(f"{place}/lists/train_list.mat" in text for text in split_remarks(place))
    write_tar(tmp_path / "set/images.tar", [("1.jpg", b"x"), ("1.cls", b"0")])  # WebDataset
    assert all_splits(place) == {"data": place}


@pytest.mark.parametrize(
    "names",
    [
        [*files("images"), "masks/1.png"],
        [*files("images"), "cover.jpg"],
        [*files("images"), "0.tar"],
        ["images/1.jpg", "images/cat/1.jpg"],
        ["images/1.jpg"],
        ["cat/1.jpg", "dog/.keep"],
    ],
)
def test_a_folder_that_may_be_a_class_is_not_entered(names: list[str], tmp_path: Path) -> None:
    place = write_files(tmp_path / "set", names)
    assert all_splits(place) == {"data": place}
    assert split_remarks(place) == []


def test_a_tree_too_large_to_look_through_counts_as_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.data.index.splits._LOOKED_INTO", 1)
    place = write_files(tmp_path / "set", [*files("images"), "a/b/c/d/1.txt"])
    assert all_splits(place) == {"data": place}


@pytest.mark.parametrize(
    "names",
    [
        ["meta/test.txt", "meta/train.txt"],
        ["a/test1.txt", "a/train1.txt", "a/val1.txt"],
        ["test.mat"],
    ],
)
@pytest.mark.parametrize("location", ["", "/images"])
def test_lists_of_splits_beside_the_images_are_told(
    names: list[str], location: str, tmp_path: Path
) -> None:
    """Food-101, CUB-200: the authors' test images were trained on without a word."""
    place = write_files(tmp_path / "set", [*files("images"), "meta/labels.txt", *names])
    (told,) = [text for text in split_remarks(place + location) if "not used" in text]
    assert [f"{place}/{name}" in told for name in names] == [True, True, False][: len(names)]
    assert (" and 1 more" in told) == (len(names) == 3)
    write_files(tmp_path / "set", ["masks/1.png"])  # now it is one folder of two
    assert split_remarks(f"{place}/images") == []


def test_a_table_beside_the_only_folder_of_images_is_told(tmp_path: Path) -> None:
    rows = b"path,label\nimages/cat/first.jpg,cat\nimages/dog/first.jpg,cat\n"
    names = dict.fromkeys(files("images", images=["first.jpg"]), b"x")
    place = write_files(tmp_path / "set", {**names, "labels.csv": rows})
    for location in (place, f"{place}/images"):
        assert any(f"{place}/labels.csv lists" in text for text in location_remarks(location))


def test_a_level_too_high_is_found(tmp_path: Path) -> None:
    names = [*files("download/archive/train download/archive/val"), "download/cover.jpg"]
    place = write_files(tmp_path, names)
    with raises("data.missing-split", location=place) as caught:
        train_and_val(place)
    assert f"{place}/download/archive" in str(caught.value.fields["hint"])


@pytest.mark.parametrize(
    ("names", "code", "fields"),
    [
        (["train/1.jpg", "test/1.jpg"], "data.splits-as-classes", {"names": "test and train"}),
        (
            [*files("."), "train_images/1.jpg", "test_images/1.jpg"],
            *("data.splits-as-classes", {"names": "test_images and train_images"}),
        ),
        (
            [*files("seg_train seg_test"), "seg_pred/1.jpg"],
            *("data.splits-as-classes", {"names": "seg_test and seg_train"}),
        ),
        (
            files("train_256 val_large"),
            "data.splits-as-classes",
            {"names": "train_256 and val_large"},
        ),
        (
            files("bottle screw", "train/good test/good test/broken"),  # MVTec
            *("data.class-holds-splits", {"names": "test and train"}),
        ),
        ([*files("data/train data/val"), "x/1.jpg"], "data.class-holds-splits", {}),
    ],
)
def test_splits_are_never_classes(
    names: list[str], code: str, fields: dict[str, object], tmp_path: Path
) -> None:
    with raises(code, **fields):
        open_index(write_files(tmp_path / "set", names))


def test_a_lone_split_beside_classes_in_a_tar_is_an_error(tmp_path: Path) -> None:
    """Bus and car were left out: they lie in no split."""
    names = ["bus/1.jpg", "car/1.jpg", "train/steam/1.jpg", "train/diesel/1.jpg"]
    path = write_tar(tmp_path / "0.tar", [(name, b"x") for name in names])
    with raises("tar.split-or-class", location=path, split="train", folder="train"):
        find_splits(str(path))


def test_test_data_of_a_tar_and_of_a_list_are_for_validation(tmp_path: Path) -> None:
    names = files("train test")
    tar = write_tar(tmp_path / "0.tar", [(name, b"x") for name in names])
    rows = "".join(f"{name},{name.split('/')[1]},{name.split('/')[0]}ing\n" for name in names)
    write_files(
        tmp_path, {**dict.fromkeys(names, b"x"), "a.csv": b"path,label,split\n" + rows.encode()}
    )
    for place in (str(tar), f"{tmp_path}/a.csv"):
        assert find_splits(place) == {"train": f"{place}#train", "val": f"{place}#test"}
        assert len(open_index(find_splits(place)["val"])) == 2


def test_a_nested_split_is_entered_when_it_is_evaluated(tmp_path: Path) -> None:
    place = write_files(tmp_path / "seg_test", files("seg_test"))
    assert validation_splits([place]) == [f"{place}/seg_test"]


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("seg_train", "train"),
        ("Testing", "test"),
        ("TrainingSet", "train"),
        ("trainImages2", "train"),
        ("evaluation-0.tar", "test"),
        ("train-and-val", "train val"),
        *((name, "") for name in ("strain", "trainer", "trains", "latest", "interval", "device")),
    ],
)
def test_words_that_name_splits(name: str, splits: str) -> None:
    assert splits_named(name) == {*splits.split()}


def test_words_of_splits_in_names_of_images_are_only_words(tmp_path: Path) -> None:
    """datasets#5021: with "photo of a train.jpg" among them, all other images were passed over."""
    names = ("photo of a cat.jpg", "photo of a train.jpg", "photo of test tubes.jpg", "val.jpg")
    place = write_files(tmp_path, files(".", "cat thing", names))
    assert find_splits(place) == {}
    assert (len(open_index(place)), open_index(place).classes) == (8, ("cat", "thing"))


# --- data that cannot be learnt from ---


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (files("archive", "hard/cat hard/dog"), {"name": "archive"}),
        (files("images"), {"name": "images"}),
        (["cat/1.jpg"], {"name": "cat"}),
    ],
)
def test_training_data_of_one_class(
    names: list[str], fields: dict[str, object], tmp_path: Path
) -> None:
    location = write_files(tmp_path / "set", names)
    with raises("data.one-class", **fields):
        check_learnable(open_index(location), location)


def test_classes_without_images_are_remarked(tmp_path: Path) -> None:
    train = open_index(write_files(tmp_path / "train", files(".", "cat dog eel")))
    val = open_index(write_files(tmp_path / "val", files(".", "dog")))
    assert class_remarks(train, train) == []
    assert class_remarks(train, val, [1]) == ["2 classes have no validation images: 'cat', 'eel'"]


def test_classes_that_hold_the_same_folders_are_remarked(tmp_path: Path) -> None:
    """PlantVillage: colour, grey and segmented images of the same leaves."""
    plants = open_index(
        write_files(tmp_path / "p", files("color grayscale segmented", "rust scab"))
    )
    assert class_remarks(plants, None) == [
        f"{tmp_path}/p: its classes 'color', 'grayscale', 'segmented' hold the same folders, "
        "'rust', 'scab': if these are the classes, name the folder above them as the location; "
        "#classes=path makes a class of each path, #classes=name of each name"
    ]
    tiny = open_index(write_files(tmp_path / "t", files("n01 n02", "images")))
    assert class_remarks(tiny, None) == []


def test_classes_of_other_depths_are_remarked(tmp_path: Path) -> None:
    """Colorectal histology: the folder of all tiles, and one of other images, were two classes."""
    deep = open_index(write_files(tmp_path / "d", ["tiles/a/1.tif", "tiles/b/2.tif", "big/3.tif"]))
    (remark,) = class_remarks(deep, None)
    assert all(name in remark for name in ("'tiles'", "'a', 'b'", "'big'"))
    caltech = open_index(write_files(tmp_path / "c", ["dog/1.jpg", "dog/greg/2.jpg", "bag/3.jpg"]))
    assert class_remarks(caltech, None) == []


def test_a_label_that_every_image_has_is_remarked(tmp_path: Path) -> None:
    rows = b"path,labels\n1.jpg,day|cat\n2.jpg,day\n"
    write_files(tmp_path, {"1.jpg": b"", "2.jpg": b"", "a.csv": rows})
    assert class_remarks(open_index(f"{tmp_path}/a.csv"), None) == [
        "all training images have the label 'day'"
    ]


def test_tiny_imagenet_has_no_classes_in_val(tmp_path: Path) -> None:
    names = ["train/n01/images/1.JPEG", "train/n02/images/1.JPEG", "val/images/val_0.JPEG"]
    place = write_files(tmp_path / "tiny-imagenet-200", names)
    check(
        refused("train", "debug", "--data", place, "--run", tmp_path / "run"),
        "data.unknown-classes",
        location=f"{place}/val",
    )


def test_training_data_of_one_class_are_refused_by_train_and_by_verify(tmp_path: Path) -> None:
    place = write_files(tmp_path / "set", files(".", "cat", ["1.jpg", "2.jpg", "3.jpg"]))
    words = ("--data", place, "--data.val_share", "0.5", "--run", tmp_path / "run")
    check(refused("train", "debug", *words), "data.one-class", location=f"{place} (its train part)")


@pytest.mark.parametrize("key", ["data.train", "data.val"])
def test_a_location_beside_data_is_an_error(key: str, tmp_path: Path) -> None:
    """It was passed over: the run was validated on other images than asked for."""
    place = write_files(tmp_path / "set", files("train val"))
    words = ("--data", place, f"--{key}", place, "--run", tmp_path / "run")
    check(refused("train", "debug", *words), "recipe.key-beside-data", key=key)
    assert not (tmp_path / "run").exists()


def test_a_share_beside_validation_data_is_an_error(tmp_path: Path) -> None:
    place = write_files(tmp_path / "set", files("train val"))
    for name, part in (("share", "0.5"), ("fold", "1/2")):
        key = f"data.val_{name}"
        words = ("--data", place, f"--{key}", part, "--run", tmp_path / "run")
        fields = {"key": key, "value": part, "val": f"{place}/val"}
        check(refused("train", "debug", *words), "recipe.val-share-beside-val-data", **fields)
        for command in ("verify", "show"):
            error = refused("data", command, place, f"--val-{name}", part)
            check(error, "data.needless-division", location=place)


# --- folders that are no classes are doubted, and folders that are classes are not ---


def place_of(tmp_path: Path, folders: str, *others: str) -> str:
    """A location with two images in each folder."""
    images = [
        f"{folder}/{name}.jpg" for folder in folders.split(",") for name in ("1st_x", "2nd_x")
    ]
    return write_files(tmp_path / "set", [*images, *others])


NO_CLASSES = {
    "Oxford Pets": "images,annotations/trimaps",
    "HAM10000": "HAM10000_images_part_1,HAM10000_images_part_2",
    "NIH ChestX-ray14": "images_001/images,images_002/images",
    "patients": "patient00001/study1,patient00002/study1",
    "SUN397": "a/abbey,b/bar",
    "iNaturalist 2019": "test2019,train_val2019/Fungi/1",
    "Places365": "data_256/a/airfield,val_256,test_256",
    "test images beside the classes": "cat,dog,test",
    "MIMIC-CXR": "p10/p1001/s1,p11/p1101/s1",
    "names of hashes": "0a/b1,3f/c2,22/d1",
    "Pascal VOC": "JPEGImages,SegmentationClass,SegmentationObject",
    "batches": "batch 1,batch 2",
}
HARDLY = {
    "iNaturalist 2018": "Aves/001,Fungi/002",
    "frames of films": "walk/clip1,run/clip2",
    "cases": "case_001,case_002",
    "a train, or training data": "bus,car,train",
    "valid": "valid,invalid",
}
CLASSES = {
    "numbers": "0,1,10",
    "class1": "class1,class2",
    "Type_1": "Type_1,Type_2,Type_3",
    "ten classes of drivers": "c0,c1,c9",
    "WordNet ids": "n01443537,n01629819",
    "Tiny ImageNet's are not refused": "n01443537,n01629819/images",
    "a tree of classes": "entity,entity/animal,plant/tree",
    "Caltech-256": "056.dog,056.dog/greg,057.cat",
    "letters": "A,B,C",
    "squares of a chess board": "a1,b2",
    "other trains": "bullet_train,crash_test",
    "masks": "with_mask,without_mask",
    "photographs and others": "photo,sketch",
}


@pytest.mark.parametrize("name", NO_CLASSES)
def test_folders_that_are_hardly_classes_are_refused(name: str, tmp_path: Path) -> None:
    """Masks, parts of an archive and patients were trained on, with 100% top-1."""
    place = place_of(tmp_path, NO_CLASSES[name])
    with raises("data.doubtful-classes", location=place, hint="--data.val_share 0.1"):
        merged_splits([place], may_share=True)
    (found,) = layout_of(place)
    assert (found.result, found.found[0].code) == ("problem", "data.doubtful-classes")


def layout_of(place: str) -> list[Check]:
    checks = verify(place, deep=False, workers=1, counters=silent)
    return [found for found in checks if found.name == "layout"]


@pytest.mark.parametrize("name", HARDLY)
def test_folders_that_may_be_classes_are_told(name: str, tmp_path: Path) -> None:
    place = place_of(tmp_path, HARDLY[name])
    assert merged_splits([place], may_share=True) == {"train": place, "val": None}
    assert [found.result for found in layout_of(place)] == ["note"]


@pytest.mark.parametrize("name", CLASSES)
def test_folders_that_are_classes_are_taken_without_a_word(name: str, tmp_path: Path) -> None:
    assert doubt_about(place_of(tmp_path, CLASSES[name])) is None


def test_folders_that_are_paths_of_classes_are_not_doubted_but_splits_are(tmp_path: Path) -> None:
    place = place_of(tmp_path, "a/abbey,b/bar")
    assert f"{place}#classes=path" in str(doubt_about(place))
    assert doubt_about(f"{place}#classes=path") is None
    write_files(tmp_path / "set", ["test2019/1.jpg"])
    with raises("data.doubtful-classes", location=f"{place}#classes=path"):
        merged_splits([f"{place}#classes=path"], may_share=True)


@pytest.mark.parametrize("name", ["labels.csv", "lists/labels.txt", "meta.json"])
def test_a_table_of_images_that_lie_deeper_is_named(name: str, tmp_path: Path) -> None:
    place = place_of(tmp_path, "xx/y,zz/w")
    doubt = doubt_about(place)
    assert doubt is not None
    assert not doubt.is_strong
    table = Path(write_files(tmp_path / "set", {name: b"image label\nxx/y/1st_x 3\n"})) / name
    doubt = doubt_about(place)
    assert doubt is not None
    is_beside = "/" not in name
    assert (doubt.is_strong, str(table) in doubt.reasons) == (is_beside, is_beside)


def test_the_train_folder_of_splits_is_looked_at_too(tmp_path: Path) -> None:
    """CheXpert: train and valid hold patients, and a table beside them the labels."""
    place = place_of(tmp_path, "train/patient1/study,train/patient2/study,valid/patient3/study")
    with raises(
        "data.doubtful-classes", location=f"{place}/train", hint=f"--data.val {place}/valid"
    ):
        merged_splits([place])


def test_a_location_that_is_named_as_training_data_is_taken(
    tmp_path: Path, capsys: Capture
) -> None:
    place = place_of(tmp_path, "images_1,images_2")
    words = ("--data", place, "--data.val_share", "0.5", "--run", tmp_path / "run")
    check(refused("train", "debug", *words), "data.doubtful-classes")
    assert opened(place, None, val_share=0.5).val.classes == ("images_1", "images_2")
    assert run("data", "show", place) == 0
    assert "images_1" in capsys.readouterr().err


def test_classes_of_a_tar_that_are_named_like_parts_are_told(tmp_path: Path) -> None:
    """Its class is the folder that holds the image: the masks of Oxford Pets too."""
    names = ["pets/images/1.jpg", "pets/images/2.jpg", "pets/trimaps/1.png"]
    place = write_tar(tmp_path / "pets.tar", [(name, b"x") for name in names])
    assert any("'trimaps'" in text for text in class_remarks(open_index(str(place)), None))


def test_class_folders_are_not_looked_into_for_lists_of_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start on 1,000 classes looked into each of them."""
    write_files(tmp_path, ["other/0/1.jpg", *(f"photos/{n}/1.jpg" for n in range(30))])
    write_files(tmp_path, ["photos/meta/train.txt"])
    looked, has_image = list[str](), splits._has_image

    def noted(folder: str) -> bool:
        looked.append(folder)
        return has_image(folder)

    monkeypatch.setattr(splits, "_has_image", noted)
    assert any("meta/train.txt" in remark for remark in split_remarks(f"{tmp_path}/photos"))
    assert len(looked) < 10
