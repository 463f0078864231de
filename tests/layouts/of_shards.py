"""Public data sets in shards, archives and arrays."""

import gzip
import json
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.io import savemat

from tests.data.parquet_files import table_of, write_arrow
from tests.data.tars import write_files, write_tar
from tests.data.tfrecords import bytes_feature, example, int_feature, write_records
from tests.layouts.copies import Copy, Row, layout

SIX = "[a few lines](arrays.md)"


# --- shards ---


def hub(name: str, files: str, column: str, *labels: str, others: str, words: str = "") -> None:
    """Adds a repository of Parquet: files as PATH=split, with integers as labels of names."""

    def build(copy: Copy) -> None:
        for one in files.split():
            path, _, split = one.partition("=")
            rows = copy.made("x/{i}.png", "cat dog", split)
            images = pa.array([{"bytes": r.content, "path": None} for r in rows])
            numbers = [-1 if not split else ("cat", "dog").index(r.name) for r in rows]
            about: dict[str, Any] = {column: {"_type": "Image"}}
            about |= {n: {"_type": "ClassLabel", "names": ["cat", "dog"]} for n in labels}
            columns = {column: images, **{n: pa.array(numbers) for n in labels[:1]}}
            columns |= {n: pa.array([0] * len(rows)) for n in labels[1:]}
            text = json.dumps({"info": {"features": about}})
            (copy.root / path).parent.mkdir(parents=True, exist_ok=True)
            table = pa.table(columns).replace_schema_metadata({"huggingface": text})
            pq.write_table(table, copy.root / path, use_dictionary=False)

    layout(name, *([words] if words else []), others=others, told="label=")(build)


RIGHT = "datasets right"
hub(
    "CIFAR-10 on the Hub",
    "plain_text/train-00000-of-00001.parquet=train plain_text/test-00000-of-00001.parquet=test",
    *("img", "label"),
    others=RIGHT,
)
hub(
    "ImageNet-1k on the Hub",
    "data/train-0-of-1.parquet=train data/validation-0-of-1.parquet=val data/test-0-of-1.parquet=",
    *("image", "label"),
    others=RIGHT,
)
hub(
    "Beans on the Hub",
    "data/train-0-of-1.parquet=train data/validation-0-of-1.parquet=val "
    "data/test-0-of-1.parquet=test",
    *("image", "labels"),
    others=RIGHT,
)
hub(
    "Oxford Pets on the Hub",
    "data/train-0-of-1.parquet=train data/test-0-of-1.parquet=test",
    *("image", "label", "label_cat_dog"),
    others=RIGHT,
)
hub(
    "CIFAR-100 on the Hub",
    "cifar100/train-0-of-1.parquet=train cifar100/test-0-of-1.parquet=test",
    *("img", "fine_label", "coarse_label"),
    others="datasets: both columns",
    words="--data DIR#label=fine_label",
)


def shard(copy: Copy, path: str, rows: Sequence[Row], label: str = "cls") -> None:
    """A shard of WebDataset: numbers as labels, with a JSON beside or a text."""
    members = []
    for number, row in enumerate(rows):
        said = b"%d" % ("cat", "dog").index(row.name)
        if label == "json":
            said = json.dumps({"label": int(said), "class_name": row.name}).encode()
        members += [(f"{number:03d}.jpg", row.content), (f"{number:03d}.{label}", said)]
    write_tar(copy.root / path, members)


def web(name: str, files: str, label: str, *beside: str) -> None:
    """Adds shards of WebDataset: files as PATH=split; labels are numbers of cat and dog."""

    def build(copy: Copy) -> None:
        copy.names |= {"0": "cat", "1": "dog"}
        for one in files.split():
            path, _, split = one.partition("=")
            shard(copy, path, copy.made("x/{i}.jpg", "cat dog", split), label)
        for path in beside:
            copy.text(path, "cat\ndog\n")

    layout(name)(build)


web(
    "timm/imagenet-12k-wds",
    "imagenet12k-train-0000.tar=train imagenet12k-validation-0000.tar=val",
    *("json", "_info.json.txt"),
)
web("timm/imagenet-22k-wds", "imagenet22k-train-0000.tar=train", "json")
web("CLIP-benchmark's sets", "train/0.tar=train test/0.tar=test", "cls", "classnames.txt")


def tfds(name: str, train: str, val: str) -> None:
    """Adds TFRecords of TFDS."""

    def build(copy: Copy) -> None:
        copy.names |= {"0": "cat", "1": "dog"}
        for path, split in ((train, "train"), (val, "val")) if val else ((train, "train"),):
            rows = copy.made("x/{i}.jpg", "cat dog", split)
            write_records(
                copy.root / path,
                [
                    example(
                        bytes_feature(b"image", row.content),
                        int_feature(b"label", ("cat", "dog").index(row.name)),
                    )
                    for row in rows
                ],
            )
        copy.text("label.labels.txt", "cat\ndog\n")

    layout(name)(build)


tfds(
    "imagenet2012 of TFDS",
    "imagenet2012-train.tfrecord-00000-of-00001",
    "imagenet2012-validation.tfrecord-00000-of-00001",
)
tfds("cats_vs_dogs of TFDS", "cats_vs_dogs-train.tfrecord-00000-of-00001", "")


@layout("Petals, Cassava: .tfrec of Kaggle", "--data DIR/tfrecords-jpeg-224x224")
def _tfrec(copy: Copy) -> None:
    for split in ("train", "val"):
        records = [
            example(bytes_feature(b"image", row.content), int_feature(b"class", int(row.name)))
            for row in copy.made("x/{i}.jpg", "0 1", split)
        ]
        write_records(copy.root / f"tfrecords-jpeg-224x224/{split}/00-224x224-8.tfrec", records)


@layout("ImageNet, fall 2011", "--data DIR/fall11.tar")
def _fall(copy: Copy) -> None:
    members = []
    for name in ("n01440764", "n01443537"):
        rows = [(row.path, row.content) for row in copy.made("{c}_{i}.JPEG", name)]
        tar = write_tar(copy.root.with_suffix(".tar"), rows)
        members.append((f"{name}.tar", tar.read_bytes()))
    write_tar(copy.root / "fall11.tar", members)


@layout("a set of save_to_disk", others=RIGHT)
def _save_to_disk(copy: Copy) -> None:
    for split in ("train", "test"):
        rows = copy.made("x/{i}.png", "cat dog", split)
        numbers: list[int | None] = [("cat", "dog").index(row.name) for row in rows]
        table = table_of([row.content for row in rows], ["cat", "dog"], labels=numbers)
        write_arrow(copy.root / split / "data-00000-of-00001.arrow", table)
        copy.text(f"{split}/state.json", "{}")


# --- archives ---


@layout(
    "a .zip of Kaggle, Roboflow, CVAT, Teachable Machine",
    "--data DIR/set.zip",
    told=r"unzip .*set\.zip",
    note="`unzip set.zip -d set`",
    others="Ultralytics right; datasets: reads some",
)
def _zip(copy: Copy) -> None:
    rows = copy.made("set/{c}/{i}.jpg")
    with zipfile.ZipFile(copy.root / "set.zip", "w") as file:
        for row in rows:
            file.writestr(row.path, row.content)


@layout(
    "a .tar.gz of a folder",
    "--data DIR/set.tgz",
    told=r"tar xf .*set\.tgz",
    note="`tar xf set.tgz`",
)
def _tgz(copy: Copy) -> None:
    copy.archive("set.tgz", copy.made("set/{c}/{i}.jpg"), gzip.compress)


# --- arrays ---


def arrays(name: str, path: str, others: str = "") -> None:
    """Adds a file of arrays, and nothing else."""

    def build(copy: Copy) -> None:
        pixels, labels = copy.pixels(6), np.arange(6) % 2
        named = {"x": pixels, "y": labels, "X": pixels, "train_images": pixels}
        file = copy.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        match file.suffix:
            case ".npz":
                np.savez(file, train_images=pixels, train_labels=labels[:, None])
            case ".mat":
                savemat(file, named)
            case ".h5":
                with h5py.File(file, "w") as hdf5:
                    hdf5["x"] = pixels
            case ".pkl":
                file.write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}))
            case ".csv":
                rows = [(n, *p.reshape(-1)) for n, p in zip(labels, pixels[..., 0], strict=True)]
                copy.table(path, [("label", *(f"pixel{n}" for n in range(64))), *rows])
            case _:
                file.write_bytes(b"\0" * 64)

    layout(name, others=others, told=r"arrays\.md", note=SIX)(build)


READER = "torchvision has a reader"
arrays("MedMNIST", "pathmnist.npz")
arrays("SVHN", "train_32x32.mat", READER)
arrays("PatchCamelyon", "camelyonpatch_level_2_split_train_x.h5", "torchvision right")
arrays("LSUN", "bedroom_train_lmdb/data.mdb", "torchvision right")
arrays("arrays in a pickle", "train.pkl")
arrays("digit-recognizer, FER2013", "train.csv", "torchvision has a reader of FER2013")
arrays("STL-10", "stl10_binary/train_X.bin", READER)


@layout(
    "Flowers-102", told=r"write_images|arrays\.md|no folder of a class", note=SIX, others=READER
)
def _flowers(copy: Copy) -> None:
    copy.no_samples("jpg/image_{i:05d}.jpg")
    savemat(copy.root / "imagelabels.mat", {"labels": np.arange(4)})


def idx(array: "np.ndarray[Any, np.dtype[np.uint8]]") -> bytes:
    """A file of MNIST."""
    header = bytes((0, 0, 8, array.ndim))
    return header + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@layout(
    "MNIST, KMNIST",
    "trainyard data prepare mnist DIR OUT",
    told="prepare mnist",
    others="torchvision right",
)
def _mnist(copy: Copy) -> None:
    for prefix, split in (("train", "train"), ("t10k", "test")):
        pixels, labels = copy.pixels(6, (28, 28)), np.arange(6, dtype=np.uint8) % 2
        for one, label in zip(pixels, labels, strict=True):
            copy.know(one.tobytes(), [str(label)], split)
        files = {"images-idx3": idx(pixels), "labels-idx1": idx(labels)}
        for name, content in files.items():
            (copy.root / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(content))


def cifar(name: str, folder: str, batches: str, pickled: bool, names: tuple[str, str]) -> None:
    """Adds a CIFAR in an unpacked folder: batches as FILE=split; the file and the key of names."""

    def build(copy: Copy) -> None:
        fine = names[1].startswith("fine")
        for one in batches.split():
            path, _, split = one.partition("=")
            pixels, labels = copy.pixels(6, (3, 32, 32)), [n % 2 for n in range(6)]
            for image, label in zip(pixels, labels, strict=True):
                copy.know(image.transpose(1, 2, 0).tobytes(), [("cat", "dog")[label]], split)
            rows = pixels.reshape(6, -1)
            content = np.hstack([np.array(labels, np.uint8)[:, None], rows]).tobytes()
            if pickled:
                key = b"fine_labels" if fine else b"labels"
                content = pickle.dumps({b"data": rows, key: labels}, 2)
            write_files(copy.root, {f"{folder}/{path}": content})
        meta = pickle.dumps({names[1].encode(): [b"cat", b"dog"]}, 2) if pickled else b"cat\ndog\n"
        write_files(copy.root, {f"{folder}/{names[0]}": meta})

    release = "cifar100" if "100" in name else "cifar10"
    words = f"trainyard data prepare {release} DIR OUT"
    layout(name, words, told="prepare cifar", others="torchvision right")(build)


TEN = "data_batch_1=train data_batch_2=train data_batch_3=train data_batch_4=train "
TEN += "data_batch_5=train test_batch=test"
BINARY = TEN.replace("=", ".bin=")
META = ("batches.meta", "label_names")
cifar("CIFAR-10, python", "cifar-10-batches-py", TEN, True, META)
HUNDRED = ("meta", "fine_label_names")
cifar("CIFAR-100, python", "cifar-100-python", "train=train test=test", True, HUNDRED)
cifar("CIFAR-10, binary", "cifar-10-batches-bin", BINARY, False, ("batches.meta.txt", ""))


@layout("grey scans of .npy", "--data DIR", others="ImageFolder: an error")
def _npy(copy: Copy) -> None:
    from io import BytesIO

    for name in ("a", "b"):
        for number, pixels in enumerate(copy.pixels(3)):
            file = BytesIO()
            np.save(file, pixels)
            copy.know(file.getvalue(), [name], "train")
            write_files(copy.root, {f"{name}/{number}.npy": file.getvalue()})
