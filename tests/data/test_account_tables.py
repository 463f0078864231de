"""Random tables of every format: each row is a sample, or is counted as left out.

TRAINYARD_TREES sets the number of tables of each format. Rows that are errors stand in the test of
their format.
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

from tests.data.hdf5_files import split_array, write_plain
from tests.data.tars import write_files
from tests.data.tfrecords import bytes_feature, example, int_feature, write_records
from trainyard.data import formats
from trainyard.data.storage.location import find_place

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


def csv_table(random: Random, folder: Path) -> Table:
    rows = some_rows(random)
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
    return Table(str(path), len(rows))


KINDS: dict[str, tuple[Callable[[Random], Any], pa.DataType]] = {
    "numbers": (lambda random: random.randrange(5), pa.int16()),
    "texts": (lambda random: spaced(random, random.choice(LABELS)), pa.large_string()),
    "dictionary": (lambda random: random.choice(LABELS), pa.dictionary(pa.int8(), pa.string())),
    "lists": (lambda random: random.sample(range(5), random.randrange(3)), pa.list_(pa.int32())),
    "lists of texts": (lambda random: random.sample(LABELS, 2), pa.list_(pa.string())),
}
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def parquet_table(random: Random, folder: Path) -> Table:
    draw, kind = KINDS[random.choice([*KINDS])]
    name, count = random.choice(["label", "Label", "class"]), 0
    for number in range(random.randint(1, 3)):
        rows = random.randint(1, 30)
        images: list[Any] = [{"bytes": random.randbytes(random.randrange(99))} for _ in range(rows)]
        labels = [draw(random) for _ in range(rows)] or [[0]]
        labels[0] = [0] if kind == KINDS["lists"][1] else labels[0]
        columns: dict[str, Any] = {"id": range(rows), "width": [7] * rows}
        columns |= {name: pa.array(labels, kind), "image": pa.array(images, IMAGE)}
        order = random.sample([*columns], len(columns))
        pq.write_table(
            pa.table({column: columns[column] for column in order}),
            folder / f"{number}.parquet",
            row_group_size=random.randint(1, 20),
            compression=random.choice(["none", "snappy"]),
            use_dictionary=random.random() < 0.5,
        )
        count += rows
    return Table(str(folder), count)


def hdf5_table(random: Random, folder: Path) -> Table:
    rows = random.randint(4, 30)
    path = write_plain(folder / "a.h5", [b"%d" % n for n in range(rows)])
    cuts = sorted(random.sample(range(rows + 1), 4))
    with h5py.File(path, "r+") as file:
        del file["targets"]
        file["targets"] = [random.randrange(2) for _ in range(rows)]
        file["class_names"] = ["a", "b"]
        table = {}
        names = random.sample(["train", "valid", "test", "extra"], 3)
        for name, start, stop in zip(names, cuts, cuts[1:], strict=False):
            table[name] = {"encoded_images": (start, stop)}
            if name != "extra":
                table[name]["targets"] = (start, stop)
        if random.random() < 0.8:
            file.attrs["split"] = split_array(table, nested=False)
    return Table(str(path), rows)


def tfrecord_table(random: Random, folder: Path) -> Table:
    count = 0
    for number in range(random.randint(1, 3)):
        records = []
        for _ in range(random.randint(1, 9)):
            image = bytes_feature(b"image/encoded", random.randbytes(random.randrange(2000)))
            label = int_feature(b"image/class/label", random.randint(1, 5))
            records.append(example(*random.sample([image, label], 2)))
        write_records(folder / f"{number}.tfrecord", records)
        count += len(records)
    return Table(str(folder), count)


@pytest.mark.parametrize("make", [csv_table, parquet_table, hdf5_table, tfrecord_table])
def test_every_row_is_read_or_left_out(
    make: Callable[[Random, Path], Table], tmp_path: Path
) -> None:
    """Rows were dropped in silence."""
    for seed in range(TABLES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        table = make(Random(seed), folder)
        scan = formats.scan(find_place(table.location))
        samples = sum(len(rows.sizes) for rows in scan.rows)
        assert samples + scan.left_out.total == table.rows, f"{seed}: {scan.left_out}"
