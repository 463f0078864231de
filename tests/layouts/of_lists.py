"""Public data sets whose classes are in a table, a list, a JSON file or the name of an image."""

import json

from tests.layouts.copies import Copy, Row, layout

TABLE = "a [list](data.md#lists-and-other-tables) (.csv)"


def flat(name: str, *words: str, others: str = "", told: str = "", folder: str = "train") -> None:
    """Adds the first words' table: its columns are `id`, with or without a suffix, and `label`."""
    path, label, suffix = name.split("|")[1:]

    def build(copy: Copy) -> None:
        rows = copy.images(folder + "/a{i:06x}" + suffix.strip("*"), "collie husky")
        copy.no_samples("test/b{i:06x}" + suffix.strip("*"))
        ids = [row.stem + (suffix if not suffix.endswith("*") else "") for row in rows]
        table = [(path, label), *((one, row.name) for one, row in zip(ids, rows, strict=True))]
        copy.table("labels.csv", table)

    layout(name.split("|")[0], *words, others=others, told=told or "labels.csv", note=TABLE)(build)


flat(
    "Kaggle dog-breed|id|breed|.jpg*",
    "--data DIR/labels.csv#label=breed",
    "--data DIR/labels.csv#path=id#label=breed",
    others="timm: one class, datasets: classes test, train, silent",
)
flat(
    "Kaggle cassava|image_id|label|.jpg",
    "--data DIR/labels.csv",
    "--data DIR/labels.csv#path=image_id",
    folder="train_images",
)
flat(
    "APTOS 2019|id_code|diagnosis|.png*",
    "--data DIR/labels.csv#label=diagnosis",
    "--data DIR/labels.csv#path=id_code#label=diagnosis",
    folder="train_images",
    others="timm, datasets, Ultralytics: classes test_images, train_images, silent",
)
flat(
    "SIIM-ISIC 2020|image_name|target|.jpg*",
    "--data DIR/labels.csv",
    "--data DIR/labels.csv#path=image_name",
)
flat("Histopathologic|id|label|.tif*", "--data DIR/labels.csv", "--data DIR/labels.csv#path=id")
flat("fastai labels.csv|name|label|.png", "--data DIR/labels.csv#path=name")


@layout(
    "Oxford-IIIT Pets",
    "--data DIR/annotations/list.txt",
    "--data DIR/images#train=annotations/trainval.txt#val=annotations/test.txt",
    told="parts of a data set",
    note=TABLE,
    others="torchvision right; ImageFolder, Ultralytics: classes annotations, images, silent",
)
def _pets(copy: Copy) -> None:
    rows = copy.images("images/{c}_{i}.jpg", "Abyssinian beagle")
    test = copy.images("images/{c}_{i}.jpg", "Abyssinian beagle", "test")
    copy.no_samples("annotations/trimaps/Abyssinian_{i}.png")
    copy.names |= {"1": "Abyssinian", "2": "beagle"}
    for name, some in {"list": rows + test, "trainval": rows, "test": test}.items():
        lines = [(row.stem, 1 + (row.name == "beagle"), 1, 1) for row in some]
        copy.table(f"annotations/{name}.txt", lines, " ")


@layout(
    "HAM10000",
    "--data DIR/HAM10000_metadata.csv#label=dx",
    "--data DIR/HAM10000_metadata.csv#path=image_id#label=dx",
    told="differ in digits alone",
    note=TABLE,
    others="ImageFolder, timm, datasets, Ultralytics: the parts are classes, silent",
)
def _ham(copy: Copy) -> None:
    rows = copy.images("HAM10000_images_part_1/ISIC_{i:07d}.jpg", "bkl nv")
    rows += copy.images("HAM10000_images_part_2/ISIC_{i:07d}.jpg", "bkl nv")
    head = ("lesion_id", "image_id", "dx", "dx_type", "age")
    lines = [("HAM_1", row.stem, row.name, "histo", 80) for row in rows]
    copy.table("HAM10000_metadata.csv", [head, *lines])


@layout(
    "NIH ChestX-ray14",
    '--data "DIR/Data_Entry_2017.csv#path=Image Index#label=Finding Labels#between=|"',
    told="differ in digits alone",
    note=TABLE,
    others="ImageFolder, Ultralytics: images_001 … are classes, silent; datasets: an error",
)
def _nih(copy: Copy) -> None:
    rows = [
        row
        for part in "12"
        for row in copy.images(f"images_00{part}/images/{{i:08d}}_000.png", "Hernia Mass|Nodule")
    ]
    for row in rows:
        copy.know(row.content, row.name.split("|"), "train")
    copy.table(
        "Data_Entry_2017.csv",
        [
            ("Image Index", "Finding Labels", "Patient Age"),
            *((row.stem + ".png", row.name, 58) for row in rows),
        ],
    )


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
    "noisy_imagenette.csv",
    "--data DIR/noisy_imagenette.csv#label=noisy_labels_0#split=is_valid",
    told="noisy_imagenette.csv",
)
def _noisy(copy: Copy) -> None:
    rows = copy.images("pictures/{c}/{i}.JPEG", "n01440764 n02102040")
    valid = copy.images("pictures/{c}/{i}.JPEG", "n01440764 n02102040", "val")
    head = ("path", "noisy_labels_0", "is_valid")
    lines = [(row.path, row.name, row in valid) for row in rows + valid]
    copy.table("noisy_imagenette.csv", [head, *lines])


@layout("WILDS iWildCam", "--data DIR/metadata.csv#label=y#root=DIR/train", told="metadata.csv")
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


@layout(
    "GTSRB of Kaggle",
    "--data.train DIR/Train.csv#label=ClassId --data.val DIR/Test.csv#label=ClassId",
    told="split",
    others="timm, datasets: Meta's drawings among training, silent",
)
def _gtsrb_kaggle(copy: Copy) -> None:
    for split, folder in (("train", "Train/{c}"), ("test", "Test")):
        rows = copy.images(folder + "/{i:05d}.png", "0 1", split)
        lines = [(8, 8, row.name, row.path) for row in rows]
        copy.table(f"{split.title()}.csv", [("Width", "Height", "ClassId", "Path"), *lines])
    copy.no_samples("Meta/{i}.png")


@layout(
    "imagefolder with metadata.csv",
    "--data.train DIR/train/metadata.csv --data.val DIR/test/metadata.csv",
    told="metadata.csv|list",
    others="datasets right",
)
def _metadata(copy: Copy) -> None:
    for split in ("train", "test"):
        rows = copy.images(split + "/{i:04d}.png", "cat dog", split)
        lines = [(f"{row.stem}.png", row.name) for row in rows]
        copy.table(f"{split}/metadata.csv", [("file_name", "label"), *lines])


@layout(
    "imagefolder with metadata.jsonl",
    "--data DIR/train/metadata.jsonl",
    told="list|jsonl",
    note=TABLE,
    others="datasets right",
)
def _jsonl(copy: Copy) -> None:
    rows = copy.images("train/{i:04d}.png")
    lines = [json.dumps({"file_name": f"{row.stem}.png", "label": row.name}) for row in rows]
    copy.text("train/metadata.jsonl", "\n".join(lines))


def imagenet(name: str, *words: str, others: str = "", lists: str = "") -> None:
    """Adds an ImageNet whose validation images lie in one folder."""

    def build(copy: Copy) -> None:
        synsets = "n01440764 n01443537"
        copy.images("train/{c}/{c}_{i}.JPEG", synsets)
        rows = copy.images("val/ILSVRC2012_val_{i:08d}.JPEG", synsets, "val")
        copy.names |= {"0": "n01440764", "1": "n01443537"}
        if lists == "LOC_val_solution.csv":
            lines = [(row.stem, f"{row.name} 1 2 3 4") for row in rows]
            copy.table(lists, [("ImageId", "PredictionString"), *lines])
        elif lists == "meta/val.txt":
            numbers = [(f"{row.stem}.JPEG", synsets.split().index(row.name)) for row in rows]
            copy.table(lists, numbers, " ")
        else:
            copy.text(lists, "\n".join(str(1 + synsets.split().index(row.name)) for row in rows))

    layout(name, *words, others=others, told="/val: holds 8 images", note=TABLE)(build)


imagenet(
    "ImageNet of Kaggle",
    "--data.train DIR/train "
    "--data.val DIR/LOC_val_solution.csv#path=ImageId#label=PredictionString#root=DIR/val",
    lists="LOC_val_solution.csv",
    others="torchvision needs the devkit; timm: val has one class, silent; Ultralytics: an error",
)
imagenet("mmpretrain's ImageNet", "--data DIR#val=meta/val.txt", lists="meta/val.txt")
imagenet(
    "ImageNet with the devkit's numbers",
    lists="ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
    others="torchvision has a reader",
)


@layout(
    "Tiny-ImageNet-200",
    "--data.train DIR/train --data.val DIR/val/val_annotations.txt",
    told="val",
    note=TABLE,
    others="timm, ImageFolder: one class, silent; Ultralytics: an error",
)
def _tiny(copy: Copy) -> None:
    copy.images("train/{c}/images/{c}_{i}.JPEG", "n01443537 n01629819")
    rows = copy.images("val/images/val_{i}.JPEG", "n01443537 n01629819", "val")
    lines = [(f"{row.stem}.JPEG", row.name, 0, 0, 8, 8) for row in rows]
    copy.table("val/val_annotations.txt", lines, "\t")
    copy.no_samples("test/images/test_{i}.JPEG")


@layout(
    "Dogs vs. Cats",
    told="no class",
    note="the class is in the name: a folder per class, or a list",
    others="timm: one class, silent",
)
def _cat_dog(copy: Copy) -> None:
    copy.images("train/{c}.{i}.jpg")
    copy.no_samples("test1/{i}.jpg")


@layout(
    "CelebA",
    "--data DIR/list_attr_celeba.csv#label=Bald,Smiling",
    told="list_attr_celeba",
    note=TABLE,
    others="torchvision has a reader",
)
def _celeba(copy: Copy) -> None:
    rows = copy.images("img_align_celeba/{i:06d}.jpg", "Bald Smiling")
    lines = [(f"{r.stem}.jpg", *((1, -1) if r.name == "Bald" else (-1, 1))) for r in rows]
    copy.table("list_attr_celeba.csv", [("image_id", "Bald", "Smiling"), *lines])


@layout(
    "FGVC-Aircraft",
    "--data.train DIR/data/images_variant_train.txt --data.val DIR/data/images_variant_val.txt",
    told="no folder|images",
    note=TABLE,
    others="torchvision right",
)
def _aircraft(copy: Copy) -> None:
    for split in ("train", "val"):
        rows = copy.images("data/images/{i:07d}.jpg", "707-320 A300", split)
        copy.table(f"data/images_variant_{split}.txt", [(r.stem, r.name) for r in rows], " ")


@layout("Open Images", "--data DIR/labels.csv#path=ImageID#label=LabelName", told="labels.csv")
def _open_images(copy: Copy) -> None:
    rows = copy.images("train_0/{i:016x}.jpg", "/m/01 /m/02")
    lines = [(row.stem, "verification", row.name, 1) for row in rows]
    copy.table("labels.csv", [("ImageID", "Source", "LabelName", "Confidence"), *lines])


@layout(
    "Sports-100, CSV",
    '--data "DIR/sports.csv#path=filepaths#split=data set"',
    told="sports.csv",
    note=TABLE,
)
def _sports(copy: Copy) -> None:
    lines: list[tuple[object, ...]] = [("class id", "filepaths", "labels", "data set")]
    for split, word in (("train", "train"), ("val", "valid")):
        rows = copy.images("pictures/{c}/{i:03d}.jpg", "archery tennis", split)
        lines += [(int(row.name == "tennis"), row.path, row.name, word) for row in rows]
    copy.table("sports.csv", lines)


@layout("Label Studio, CSV", "--data DIR/project.csv#label=choice", told="project.csv", note=TABLE)
def _label_studio(copy: Copy) -> None:
    rows = copy.images("upload/1/{i:08x}-x.jpg")
    lines = [(f"/data/{row.path}", n, row.name) for n, row in enumerate(rows)]
    copy.table("project.csv", [("image", "id", "choice"), *lines])


@layout("Vertex AI, CSV", "--data DIR/import.csv", told="import.csv", note=TABLE)
def _vertex(copy: Copy) -> None:
    rows = copy.images("photos/{i}.jpg")
    copy.table("import.csv", [(f"gs://bucket/{row.path}", row.name) for row in rows])


@layout("MXNet .lst", "--data DIR/train.lst", told="train.lst", note=TABLE)
def _mxnet(copy: Copy) -> None:
    rows = copy.images("pictures/{i:04d}.jpg", "0 1")
    lines = [(n, f"{row.name}.000000", row.path) for n, row in enumerate(rows)]
    copy.table("train.lst", lines, "\t")


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
