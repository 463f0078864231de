"""Random tables of every format: each row is a sample, is counted as left out, or is an error.

TRAINYARD_TREES sets the number of tables of each format.
"""

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.tars import write_files
from tests.data.test_hdf5 import split_array, write_plain
from tests.data.test_tfrecord import bytes_feature, example, int_feature, write_records
from trainyard.data import formats
from trainyard.data.storage.location import find_place
from trainyard.errors import DataError

TABLES = int(os.environ.get("TRAINYARD_TREES", "30"))
IMAGES = [f"{folder}{n}.jpg" for folder in ("", "a/", "a/b, c/", "é/") for n in range(5)]
WORDS = {
    "train": ["train", "Training", " TRAIN "],
    "val": ["val", "valid", "validation"],
    "test": ["test", "TEST"],
}
LABELS = ["cat", "dog", "0", "1.0", "Käse", "a b", 'say "x"']


class Table(NamedTuple):
    location: str
    rows: int
    is_wrong: bool


Rows = list[dict[str, Any]]  # with path, label or labels, maybe split


def spaced(random: Random, text: str) -> str:
    return random.choice(["", "", " ", "\u00a0"]) + text + random.choice(["", "", "  "])


def some_rows(random: Random) -> Rows:
    paths = random.sample(IMAGES[:-1], random.randint(1, len(IMAGES) - 1))
    has_split, has_lists = random.random() < 0.5, random.random() < 0.3
    rows: Rows = [{"path": spaced(random, random.choice(["", "./"]) + path)} for path in paths]
    for row in rows:
        count = random.randint(0, 3)
        labels = [spaced(random, label) for label in random.sample(LABELS, count)]
        row |= {"labels": labels} if has_lists else {"label": spaced(random, random.choice(LABELS))}
        if has_split:
            row["split"] = random.choice(random.choice([*WORDS.values()]))
    for row in random.sample(rows, random.randint(0, len(rows)) // 4):
        rows.insert(random.randint(0, len(rows)), dict(row))
    return rows


def no_image(row: dict[str, Any]) -> None:
    row["path"] = "missing.jpg"


def outside(row: dict[str, Any]) -> None:
    row["path"] = "../list.csv"


def no_path(row: dict[str, Any]) -> None:
    row["path"] = " "


def blank_label(row: dict[str, Any]) -> None:
    row |= {"labels": ["cat", " "]} if "labels" in row else {"label": " "}


def other_label(row: dict[str, Any]) -> None:
    row |= {"labels": ["fish"]} if "labels" in row else {"label": "fish"}


def typo(row: dict[str, Any]) -> None:
    row["split"] = "trian"


def spoilt(random: Random, rows: Rows) -> bool:
    """True if a wrong row was added: one that contradicts another, or is wrong alone."""
    if random.random() < 0.6:
        return False
    spoil = random.choice([no_image, outside, no_path, blank_label, other_label, typo])
    row = dict(random.choice(rows))
    if spoil is not other_label:
        row["path"] = IMAGES[-1]  # of no other row
    if spoil is typo and "split" not in row:
        return False
    spoil(row)
    rows.insert(random.randint(0, len(rows)), row)
    return True


def csv_table(random: Random, folder: Path) -> Table:
    rows = some_rows(random)
    is_wrong = spoilt(random, rows)
    write_files(folder, IMAGES)
    names = {
        "path": random.choice(["path", "File", " image path "]),
        "label": random.choice(["label", "Class", "category"]),
        "labels": "labels",
        "split": random.choice(["split", "Subset"]),
    }
    order = random.sample([*rows[0], "id", "width"], len(rows[0]) + 2)
    text, delimiter = io.StringIO(), random.choice(",;\t")
    lines = csv.writer(text, delimiter=delimiter, lineterminator=random.choice(["\n", "\r\n"]))
    lines.writerow([names.get(name, name) for name in order])
    for row in rows:
        if random.random() < 0.1:
            lines.writerow(random.choice([[], [""] * len(order)]))
        cells = {"id": "7", "width": "x,y;z"} | row
        if "labels" in row:
            cells["labels"] = "|".join(row["labels"])
        lines.writerow([cells[name] for name in order])
    path = folder / f"list.{random.choice(['csv', 'tsv'])}"
    path.write_bytes((random.choice(["", "\ufeff"]) + text.getvalue()).encode())
    return Table(str(path), len(rows), is_wrong)


KINDS: dict[str, tuple[Callable[[Random], Any], pa.DataType]] = {
    "numbers": (lambda random: random.randrange(5), pa.int16()),
    "texts": (lambda random: spaced(random, random.choice(LABELS)), pa.large_string()),
    "dictionary": (
        lambda random: random.choice(LABELS),
        pa.dictionary(pa.int8(), pa.string()),
    ),
    "lists": (lambda random: random.sample(range(5), random.randrange(3)), pa.list_(pa.int32())),
    "lists of texts": (lambda random: random.sample(LABELS, 2), pa.list_(pa.string())),
}
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def parquet_table(random: Random, folder: Path) -> Table:
    draw, kind = KINDS[random.choice([*KINDS])]
    name, count, is_wrong = random.choice(["label", "Label", "class"]), 0, False
    for number in range(random.randint(1, 3)):
        rows = random.randint(1, 30)
        images: list[Any] = [{"bytes": random.randbytes(random.randrange(99))} for _ in range(rows)]
        labels = [draw(random) for _ in range(rows)] or [[0]]
        labels[0] = [0] if kind == KINDS["lists"][1] else labels[0]
        columns: dict[str, Any] = {"id": range(rows), "width": [7] * rows}
        columns |= {name: pa.array(labels, kind), "image": pa.array(images, IMAGE)}
        wrong = random.choice([*[""] * 12, "null", "path", "float", "no label", "two", "splits"])
        at = random.randrange(rows)
        if wrong == "null":
            columns[name] = pa.array([*labels[:at], None, *labels[at + 1 :]], kind)
        elif wrong == "path":
            images[at] = {"bytes": None, "path": "a.jpg"}
            columns["image"] = pa.array(images, IMAGE)
        elif wrong == "float":
            columns[name] = pa.array([0.0] * rows)
        elif wrong == "no label":
            del columns[name]
        elif wrong == "two":
            columns |= {"category": [0] * rows, "target": [1] * rows}
            columns.pop(name)
        elif wrong == "splits":
            columns["split"] = ["train"] * at + ["val"] * (rows - at)
            wrong = wrong if at else ""
        is_wrong |= bool(wrong)
        order = random.sample([*columns], len(columns))
        pq.write_table(
            pa.table({column: columns[column] for column in order}),
            folder / f"{number}.parquet",
            row_group_size=random.randint(1, 20),
            compression=random.choice(["none", "snappy"]),
            use_dictionary=random.random() < 0.5,
        )
        count += rows
    return Table(str(folder), count, is_wrong)


def hdf5_table(random: Random, folder: Path) -> Table:
    rows = random.randint(4, 30)
    path = write_plain(folder / "a.h5", [b"%d" % n for n in range(rows)])
    cuts = sorted(random.sample(range(rows + 1), 4))
    wrong = random.choice(["", "", "", "label", "overlap", "typo", "floats"])
    with h5py.File(path, "r+") as file:
        targets: Any = [random.randrange(2) for _ in range(rows)]
        if wrong == "label":
            targets[random.randrange(rows)] = random.choice([-1, 2, 2**40])
        del file["targets"]
        file["targets"] = [float(label) for label in targets] if wrong == "floats" else targets
        file["class_names"] = ["a", "b"]
        table = {}
        names = random.sample(["train", "valid", "test", "extra"], 3)
        for name, start, stop in zip(names, cuts, cuts[1:], strict=False):
            table[name] = {"encoded_images": (start, stop)}
            if name != "extra" or wrong == "typo":
                table[name]["targets"] = (start, stop)
        if wrong == "overlap":
            table["val"] = dict.fromkeys(("encoded_images", "targets"), (0, rows))
        if random.random() < 0.8 or wrong in ("overlap", "typo"):
            file.attrs["split"] = split_array(table, nested=False)
    return Table(str(path), rows, bool(wrong) and (wrong != "typo" or "extra" in names))


def tfrecord_table(random: Random, folder: Path) -> Table:
    count, is_wrong = 0, False
    for number in range(random.randint(1, 3)):
        records = []
        for _ in range(random.randint(1, 9)):
            image = bytes_feature(b"image/encoded", random.randbytes(random.randrange(2000)))
            parts = [image, int_feature(b"image/class/label", random.randint(1, 5))]
            wrong = random.choice([*[""] * 90, "zero", "none", "two", "negative", "no image"])
            labels = {"zero": [0], "two": [1, 2], "none": [], "negative": [2**64 - 1]}
            if wrong in labels:
                parts[1] = int_feature(b"image/class/label", *labels[wrong])
            records.append(example(*parts[wrong == "no image" :]))
            is_wrong |= bool(wrong)
        path = write_records(folder / f"{number}.tfrecord", records)
        if random.random() < 0.1:
            path.write_bytes(path.read_bytes()[: -random.randint(1, 3)])
            is_wrong = True
        count += len(records)
    return Table(str(folder), count, is_wrong)


@pytest.mark.parametrize("make", [csv_table, parquet_table, hdf5_table, tfrecord_table])
def test_every_row_is_read_or_left_out_or_an_error(
    make: Callable[[Random, Path], Table], tmp_path: Path
) -> None:
    """A row whose split, label or image is not understood was dropped in silence."""
    read = 0
    for seed in range(TABLES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        table = make(Random(seed), folder)
        try:
            scan = formats.scan(find_place(table.location))
            samples = sum(len(rows.sizes) for rows in scan.rows)
        except DataError as error:
            assert table.is_wrong, f"{seed}: {error}"
            continue
        assert not table.is_wrong, f"{seed}: {table.location} is not refused"
        assert samples + scan.left_out.total == table.rows, f"{seed}: {scan.left_out}"
        read += 1
    assert TABLES / 4 <= read <= TABLES * 0.9
