"""Folders that are no classes are doubted, and folders that are classes are not."""

from pathlib import Path

import pytest

from tests.command_line import Capture, run
from tests.data.tars import write_files, write_tar
from tests.data.test_overlap import opened
from tests.data.test_verify import silent
from tests.errors import check, raises, refused
from trainyard.data.index.build import open_index
from trainyard.data.index.layout import doubt_about
from trainyard.data.index.learnable import class_remarks
from trainyard.data.index.merge import merged_splits
from trainyard.datasets.verify.checks import Check
from trainyard.datasets.verify.verify import verify


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
