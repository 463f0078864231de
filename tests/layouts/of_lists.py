"""Public data sets whose classes are in a table, a list, a JSON file or the name of an image."""

import json
from itertools import count
from pathlib import Path

from tests.layouts.copies import Copy, Row, layout

TABLE = "a [list](data.md#lists-and-other-tables) (.csv)"


def lists(row: str) -> None:
    """Adds a row of lists.txt. A table has a line for each image of a class, or of one SPLIT."""
    cells = [cell.strip() for cell in row.split(" ;")]
    name, images, classes, tables, words, told, others = [*cells, *[""] * 7][:7]

    def build(copy: Copy) -> None:
        rows: dict[str, list[Row]] = {}
        for one in images.split():
            pattern, _, split = one.partition("=")
            found = copy.images(pattern, classes if split else "none", split)
            rows.setdefault(split, []).extend(found)
        rows.pop("", None)
        for found in rows.values():
            for row in found if "#between=|" in words else ():
                copy.know(row.content, row.name.split("|"), "train")
        for table in filter(None, tables.split(" + ")):
            path, header, line = table.split(": ", 2)
            path, _, split = path.partition("@")
            some = [(one, row) for one in ([split] if split else rows) for row in rows[one]]
            lines = [line.format(**_fields(row, classes, one)) for one, row in some]
            copy.text(path, "\n".join([*filter(None, [header.strip()]), *lines]))
            for first, key in enumerate(("{k}", "{k1}")):
                if key in line:
                    copy.names |= dict(zip(map(str, count(first)), classes.split(), strict=False))
        copy.names |= {f"{name}.000000": name for name in classes.split()}  # in MXNet's lists

    layout(name, *filter(None, words.split(" or ")), others=others, told=told, note=TABLE)(build)


def _fields(row: Row, classes: str, split: str) -> dict[str, object]:
    """What a line of a table may hold of an image."""
    number = classes.split().index(row.name)
    path = Path(row.path)
    names = {"path": row.path, "file": path.name, "stem": path.stem, "c": row.name}
    names |= {"folder": path.parent.as_posix(), "above": path.parent.name}
    word = {"val": "valid"}.get(split, split)
    return {**names, "k": number, "k1": number + 1, "word": word, "valid": split == "val"}


for line in Path(__file__).with_name("lists.txt").read_text().splitlines()[1:]:
    lists(line)


@layout(
    "CheXpert",
    "--data.train DIR/train.csv#label=Edema,Fracture --data.val DIR/valid.csv#label=Edema,Fracture",
    told="differ in digits alone",
    note=TABLE,
    others="ImageFolder: patients are classes, silent; Ultralytics: an error",
)
def _chexpert(copy: Copy) -> None:
    for split, folder in (("train", "train"), ("val", "valid")):
        rows = copy.images(f"{folder}/patient{{i:05d}}/study1/view1.jpg", "Edema Fracture", split)
        lines = [("Path", "Sex", "Edema", "Fracture")]
        for row in rows:
            edema = row.name == "Edema"
            cells = ("1.0", "") if edema else ("0.0", "1.0")
            lines.append((f"CheXpert-v1.0-small/{row.path}", "F", *cells))
        copy.table(f"{folder}.csv", lines)


@layout(
    "WILDS iWildCam",
    "--data DIR/metadata.csv#label=y#root=DIR/train",
    told="metadata.csv",
    note=TABLE + ", without `id_val` or `val`",
)
def _wilds(copy: Copy) -> None:
    lines: list[tuple[object, ...]] = [("split", "filename", "y")]
    splits = {"train": "train", "val": "val", "id_val": "", "test": "test", "id_test": ""}
    for split, truth in splits.items():
        rows = copy.images("train/{i:08x}.jpg", "0 1", truth, 2)
        lines += [(split, row.path.removeprefix("train/"), row.name) for row in rows]
    copy.table("metadata.csv", lines)


def several(name: str, head: str, words: str, between: str = "") -> None:
    """Adds a table of several labels: one-hot columns, or texts between spaces."""

    def build(copy: Copy) -> None:
        rows = copy.images("images/T{i}.jpg", "healthy rust scab+rust")
        lines: list[list[object]] = [[*head.split()]]
        for row in rows:
            labels = row.name.split("+")
            copy.know(row.content, labels, "train")
            hot = [int(one in labels) for one in head.split()[1:]]
            lines.append([f"T{row.stem[1:]}.jpg", *([between.join(labels)] if between else hot)])
        copy.table("train.csv", lines)

    layout(name, *words.split(";"), told="train.csv", note=TABLE)(build)


several(
    "Plant Pathology 2021",
    "image labels",
    '--data "DIR/train.csv#root=DIR/images#between= ";--data "DIR/train.csv#between= "',
    between=" ",
)
several(
    "Plant Pathology 2020",
    "image_id healthy rust scab",
    "--data DIR/train.csv#label=healthy,rust,scab;"
    "--data DIR/train.csv#path=image_id#label=healthy,rust,scab",
)
several(
    "Roboflow, CSV of several classes",
    "filename healthy rust scab",
    "--data DIR/train.csv#label=healthy,rust,scab",
)


def celeba(*words: str) -> None:
    """Adds CelebA as its authors publish it (.txt), or Kaggle (.csv)."""
    end = words[0].partition("#")[0][-3:]

    def build(copy: Copy) -> None:
        rows = [copy.images("img/{i:06d}.jpg", "Bald Smiling", s) for s in ("train", "val", "test")]
        parts = [(f"{row.stem}.jpg", n) for n, some in enumerate(rows) for row in some]
        lines = [
            (f"{r.stem}.jpg", *((1, -1) if r.name == "Bald" else (-1, 1)))
            for some in rows
            for r in some
        ]
        if end == "csv":
            copy.table("list_attr_celeba.csv", [("image_id", "Bald", "Smiling"), *lines])
            copy.table("list_eval_partition.csv", [("image_id", "partition"), *parts])
        else:
            head = f"{len(lines)}\nBald Smiling\n"
            text = "".join("{} {:2} {:2}\n".format(*line) for line in lines)
            copy.text("list_attr_celeba.txt", head + text)
            copy.table("list_eval_partition.txt", parts, " ")

    name = "CelebA" if end == "txt" else "CelebA, of Kaggle"
    layout(name, *words, told="list_", note=TABLE, others="torchvision has a reader")(build)


for _end in ("csv", "txt"):
    celeba(
        f"--data DIR/list_attr_celeba.{_end}#label=Bald,Smiling#split=list_eval_partition.{_end}",
        f"--data DIR/list_eval_partition.{_end}",
    )


def twins(name: str, table: str, header: str) -> None:
    """Adds a table of training images, whose test images have the same names."""

    def build(copy: Copy) -> None:
        rows = copy.images("train/Image_{i}.png")
        copy.shadow(rows, "train/", "test/")
        cells = [(row.stem if header.startswith("id") else f"{row.stem}.png") for row in rows]
        lines = [header.split(","), *((cell, r.name) for cell, r in zip(cells, rows, strict=True))]
        copy.table(table, lines)

    layout(name, f"--data DIR/{table}", told=table, note=TABLE)(build)


twins("CIFAR-10, of Kaggle", "trainLabels.csv", "id,label")
twins("Butterflies, of Kaggle", "Training_set.csv", "filename,label")


@layout(
    "iMet", '--data "DIR/train.csv#label=attribute_ids#between= "', told="train.csv", note=TABLE
)
def _imet(copy: Copy) -> None:
    rows = copy.images("train/{i:06x}.png", "147 616")
    for row in rows:
        copy.know(row.content, [row.name, "813"], "train")
    cells = [(row.stem, f"{row.name} 813") for row in rows]
    copy.table("train.csv", [("id", "attribute_ids"), *cells])


def _coco(copy: Copy, rows: list[Row], path: str) -> None:
    names = sorted({row.name for row in rows})
    images = [{"id": n, "file_name": row.path.removeprefix("train/")} for n, row in enumerate(rows)]
    labels = [
        {"id": n, "image_id": n, "category_id": names.index(row.name)} for n, row in enumerate(rows)
    ]
    kinds = [{"id": n, "name": name} for n, name in enumerate(names)]
    copy.text(path, json.dumps({"images": images, "annotations": labels, "categories": kinds}))


@layout("Herbarium 2020", "--data.train DIR/train/metadata.json", told="metadata.json", note=TABLE)
def _herbarium(copy: Copy) -> None:
    rows = copy.images("train/images/{i:03d}/00/{i}.jpg", "Aspleniaceae Poaceae")
    _coco(copy, rows, "train/metadata.json")
    copy.no_samples("test/images/{i:03d}/00/{i}.jpg")


@layout("iWildCam 2020", "--data DIR/train_annotations.json", told="annotations.json", note=TABLE)
def _iwildcam(copy: Copy) -> None:
    rows = copy.images("train/{i:08x}-21bc.jpg", "empty tayassu_pecari")
    _coco(copy, rows, "train_annotations.json")
    copy.no_samples("test/{i:08x}-21bd.jpg")
    copy.text("test_information.json", json.dumps({"images": [], "categories": []}))
