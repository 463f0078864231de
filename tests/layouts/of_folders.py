"""Public data sets of folders: those whose class is a folder, and some whose is not."""

import shutil
from functools import partial
from pathlib import Path

from tests.layouts.copies import Copy, layout

SILENT = "ImageFolder, Ultralytics: the same folders as classes, silent"


def folders(row: str) -> None:
    """Adds a row of folders.txt; =SPLIT follows a pattern of images, = alone one of no samples."""
    cells = [cell.strip() for cell in row.split("|")]
    name, images, classes, files, others, words, told = [*cells, *[""] * 7][:7]

    def build(copy: Copy) -> None:
        for one in images.split():
            pattern, _, split = one.partition("=")
            copy.images(pattern, classes if split else "none", split)
        for path in files.split():
            copy.text(path, "x")

    layout(name, *filter(None, [words]), others=others, told=told)(build)


for line in Path(__file__).with_name("folders.txt").read_text().splitlines()[1:]:
    folders(line)


def split_lost(name: str, folder: str, lists: str, others: str, *words: str) -> None:
    """A layout of one folder, and lists of the official splits beside it: PATH=train:stem, …"""

    def build(copy: Copy) -> None:
        classes = "001.Albatross 002.Wren" if "CUB" in name else "apple_pie baklava"
        rows = {s: copy.images(folder + "/{c}/{i:04d}.jpg", classes, s) for s in ("train", "test")}
        for one in lists.split():
            path, _, split = one.partition("=")
            names = [f"{row.name}/{row.stem}" for row in rows.get(split, [])]
            copy.text(path, "\n".join(names or ["x"]))

    layout(name, *words, f"--data DIR/{folder}", others=others, told=lists.partition("/")[0])(build)


split_lost(
    "Food-101",
    "images",
    "meta/train.txt=train meta/test.txt=test",
    "torchvision right",
    "--data DIR/images#train=meta/train.txt#val=meta/test.txt",
)
split_lost(
    "DTD",
    "images",
    "labels/train1.txt=train labels/test1.txt=test labels/labels_joint_anno.txt",
    "torchvision right",
    "--data DIR/images#train=labels/train1.txt#val=labels/test1.txt",
)
split_lost("Stanford Dogs", "Images", "lists/train_list.mat lists/test_list.mat", "")


def cub(copy: Copy, number: str) -> None:
    """CUB-200-2011 and NABirds: lists of `number value`, and numbers by a format."""
    rows = copy.images("images/{c}/{c}_{i:04d}.jpg", "001.Albatross 002.Wren")
    rows += copy.images("images/{c}/{c}_{i:04d}.jpg", "001.Albatross 002.Wren", "test")
    numbered = [(number.format(n), row) for n, row in enumerate(rows, 1)]
    copy.table("images.txt", [(n, row.path.removeprefix("images/")) for n, row in numbered], " ")
    copy.table("image_class_labels.txt", [(n, int(row.name[:3])) for n, row in numbered], " ")
    copy.table("train_test_split.txt", [(n, int(row in rows[:8])) for n, row in numbered], " ")
    copy.table("classes.txt", [(1, "001.Albatross"), (2, "002.Wren")], " ")


for _name, _number in (("CUB-200-2011", "{}"), ("NABirds", "{:08x}-aaaa-4bbb")):
    layout(_name, "--data DIR/images.txt#split=train_test_split.txt", told="train_test_split.txt")(
        partial(cub, number=_number)
    )


@layout("Malaria cell images", "--data DIR/cell_images/cell_images", told="cell_images/cell_images")
def _malaria(copy: Copy) -> None:
    copy.images("cell_images/{c}/C{i}.png", "Parasitized Uninfected")
    shutil.copytree(copy.root / "cell_images", copy.root / "cell_images/cell_images")
    copy.text("cell_images/Uninfected/Thumbs.db", "x")


@layout("Breast ultrasound (BUSI)", told="masks beside")
def _busi(copy: Copy) -> None:
    rows = copy.images("Dataset_BUSI_with_GT/{c}/{c} ({i}).png", "benign malignant")
    copy.shadow(rows, ").png", ")_mask.png")
    copy.shadow(rows[:2], ").png", ")_mask_1.png")


@layout(
    "GTSRB, official",
    "--data DIR/Final_Training/Images",
    told="no-class-folders|GT-final_test|Final_Training",
    note="`--data DIR/Final_Training/Images`; a list of `GT-final_test.csv` for the test images",
    others="torchvision reads another archive",
)
def _gtsrb(copy: Copy) -> None:
    for name in ("00000", "00001"):
        rows = copy.images(f"Final_Training/Images/{name}/{{i:05d}}_00000.ppm", name)
        table = [("Filename", "Width", "ClassId"), *((f"{row.stem}.ppm", 8, 0) for row in rows)]
        copy.table(f"Final_Training/Images/{name}/GT-{name}.csv", table, ";")
    copy.no_samples("Final_Test/Images/{i:05d}.ppm")


@layout(
    "SUN397",
    "--data DIR#classes=path",
    told="classes=path",
    others=f"torchvision right; {SILENT}; timm: leaves of the same name are one class",
)
def _sun(copy: Copy) -> None:
    for path in ("a/abbey", "a/apartment/indoor", "b/bar", "b/building/indoor"):
        copy.images(f"SUN397/{path}/sun_{{i:04d}}.jpg", path)
    copy.text("SUN397/ClassName.txt", "/a/abbey")


@layout(
    "iNaturalist 2017, 2018",
    "--data DIR#classes=path",
    told="classes=path",
    others="timm right; ImageFolder: Aves, Fungi …, silent",
)
def _inat(copy: Copy) -> None:
    for path in ("Aves/1", "Aves/2", "Fungi/7"):
        copy.images(f"{path}/{{i:08x}}.jpg", path)


@layout(
    "iNaturalist 2019",
    "--data.train DIR/train_val2019#classes=path",
    told="classes=path|data.train",
    others=f"timm: test2019 is a class, silent; {SILENT}",
)
def _inat_2019(copy: Copy) -> None:
    for path in ("Amphibians/153", "Birds/202", "Birds/203"):
        copy.images(f"train_val2019/{path}/{{i:08x}}.jpg", path)
    copy.no_samples("test2019/{i:08x}.jpg")


@layout(
    "Places365 (data_256, val_256, test_256)",
    "--data.train DIR/data_256#classes=path",
    told="classes=path|data.train",
    note="`--data.train DIR/data_256#classes=path`",
    others=f"torchvision has a reader; {SILENT}; timm, datasets: test_256 is a class, silent",
)
def _places(copy: Copy) -> None:
    for path in ("a/airfield", "a/apartment_building/outdoor", "b/bar"):
        copy.images(f"data_256/{path}/{{i:08d}}.jpg", path)
    copy.no_samples("val_256/Places365_val_{i:08d}.jpg")
    copy.no_samples("test_256/Places365_test_{i:08d}.jpg")
