"""Parquet as `datasets` and pyarrow write it, at several sizes of row groups, pages and codecs."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.parquet_files import IMAGE, IMAGES, contents, table_of, write, write_arrow
from tests.data.tars import stored
from tests.errors import raises
from trainyard.data._native import core, is_built
from trainyard.data.formats import parquet
from trainyard.data.formats.left_out import COLUMNS
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.overlap import check_apart
from trainyard.data.index.splits import find_splits
from trainyard.data.index.val_share import both_sides, open_part
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.encoded import contents_of
from trainyard.data.storage.snappy import SnappyStream, unpacked


@pytest.mark.parametrize("codec", ["none", "snappy"])
@pytest.mark.parametrize(
    "settings",
    [
        {"row_group_size": 10},  # as `datasets` writes: all images in a dictionary page
        {"row_group_size": 7, "use_dictionary": False},
        {"data_page_version": "2.0", "use_dictionary": False},
        {"data_page_version": "2.0", "data_page_size": 1000, "write_batch_size": 2},
        {"dictionary_pagesize_limit": 1000, "write_batch_size": 3, "write_page_index": True},
        {"kind": pa.binary(), "write_page_checksum": True},
    ],
    ids=["groups", "plain", "v2", "v2 pages", "falls back", "binary"],
)
def test_every_image_is_found(tmp_path: Path, codec: str, settings: dict[str, Any]) -> None:
    """Images with a common head, which Snappy copies, and images over several of its blocks."""
    everything = [*IMAGES, *IMAGES[3:5], b""]
    path = write(tmp_path / "a.parquet", everything, compression=codec, **settings)
    expected = [(image, n % 3) for n, image in enumerate(everything)]
    index = open_index(str(path))
    reader = Reader(index)
    rows = [(reader.read(n), label) for n, label in enumerate(index.label.tolist())]
    assert rows == expected
    ids = np.array([5, 0, 17, 6, 38, 36])
    ((_, images, bad),) = reader.prefetch(ids).read(slice(0, 6))
    assert contents_of(images) == ([expected[sample][0] for sample in ids.tolist()], {})
    assert not bad


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("kind", [IMAGE, pa.binary(), pa.large_binary()])
def test_every_image_of_arrow_is_found(tmp_path: Path, is_stream: bool, kind: pa.DataType) -> None:
    """A set that save_to_disk of `datasets` writes: it had to be written anew."""
    names = ["fox", "bee", "ape"]
    for split, images in (("train", IMAGES), ("test", IMAGES[:5])):
        path = tmp_path / split / "data-00000-of-00001.arrow"
        write_arrow(path, table_of(images, names, kind=kind), is_stream=is_stream)
        (path.parent / "state.json").write_text("{}")
    splits = find_splits(str(tmp_path))
    expected = [(names[n % 3], image) for n, image in enumerate(IMAGES)]
    assert [stored(place) for place in splits.values()] == [expected, expected[:5]]
    assert open_index(splits["train"]).classes == ("ape", "bee", "fox")


def test_a_row_of_arrow_without_its_image_is_named(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", table_of([*IMAGES[:12], None, b"x"]))
    with raises("parquet.row-of-path", path=path, row=12, image="x.jpg"):
        build_index(str(path))
    write_arrow(path, table_of([*IMAGES[:12], None, b"x"], kind=pa.binary()))
    with raises("parquet.no-image", path=path, row=12):
        build_index(str(path))
    write_arrow(path, table_of(), codec="lz4")
    with raises("parquet.damaged-row-group", path=path, group=0):
        build_index(str(path))
    path.write_bytes(path.read_bytes()[:1000])
    with raises("data.malformed-file", path=path):
        build_index(str(path))


def test_classes_come_from_the_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", names=["fox", "bee", "ape"])
    names = ["fox", "bee", "ape"]
    assert stored(path) == [(names[n % 3], image) for n, image in enumerate(IMAGES)]
    assert open_index(str(path)).classes == ("ape", "bee", "fox")


def test_a_merged_index_reads_compressed_images(tmp_path: Path) -> None:
    for name, codec in (("a", "none"), ("b", "snappy")):
        write(tmp_path / f"{name}.parquet", compression=codec, names=["x", "y", "z"])
    merged = open_merged([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], None)
    reader = Reader(merged)
    assert [reader.read(sample) for sample in range(len(merged))] == IMAGES * 2


def test_data_without_an_image_or_a_label_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    none: list[Any] = [*IMAGES[:5], None]
    many = len(IMAGES)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("parquet.row-of-path", 0, {"images": [None] * 3}),
        ("parquet.no-image", 5, {"images": none, "kind": pa.binary()}),
        ("parquet.no-label", 0, {"labels": [-1] * many}),
        ("parquet.no-label", 1, {"labels": [1, None] * (many // 2), "row_group_size": 1}),
        ("parquet.not-a-class-number", 0, {"labels": [7] * many, "names": ["a", "b"]}),
    ]
    for code, row, settings in cases:
        write(path, **settings)
        with raises(code, path=path, row=row):
            build_index(str(path))


ROWS = 6
PICTURES = pa.array([{"bytes": b"%d" % n, "path": None} for n in range(ROWS)], IMAGE)
COUNT = list(range(ROWS))
TEXTS = ["cow", "ape ", "cow", "ape", " cow", "bee"]
CLASS = {"names": ["x", "y", "z"], "_type": "ClassLabel"}


def write_columns(
    path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None
) -> Path:
    """`columns` beside those of images; a None removes one."""
    everything = {"image": PICTURES} | columns
    table = pa.table({name: cells for name, cells in everything.items() if cells is not None})
    about = {"huggingface": json.dumps({"info": {"features": features or {}}})}
    pq.write_table(table.replace_schema_metadata(about), path, row_group_size=4)
    return path


def test_labels_that_are_texts_are_classes(tmp_path: Path) -> None:
    """They were passed over, and a lone column of integers, such as an id, became the label."""
    numbers, lists = {"__index_level_0__": COUNT, "width": COUNT}, [[text] * 2 for text in TEXTS]
    for name, column in {
        "label": TEXTS,
        "Class": pa.array(TEXTS, pa.large_string()),
        "target": pa.array(TEXTS).dictionary_encode(),
        "labels": lists,
    }.items():
        index = build_index(str(write_columns(tmp_path / "a.parquet", {name: column} | numbers)))
        assert index.classes == ("ape", "bee", "cow") and index.has_names
        assert [index.class_names(n) for n in range(ROWS)] == [[text.strip()] for text in TEXTS]
    write_columns(tmp_path / "a.parquet", {"label": TEXTS})
    write_columns(tmp_path / "b.parquet", {"label": TEXTS[::-1]})
    index = build_index(f"{tmp_path}/*.parquet")
    found = [index.classes[label] for label in index.label.tolist()]
    assert found == [text.strip() for text in TEXTS + TEXTS[::-1]]


def test_the_label_is_a_column_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"kind": [n % 3 for n in COUNT], "id": COUNT}
    write_columns(path, columns, {"kind": CLASS})
    assert build_index(str(path)).classes == ("x", "y", "z")
    write_columns(path, columns | {"coarse": COUNT}, {"kind": CLASS, "coarse": CLASS})
    location = f"{path}#label=kind"
    assert build_index(location).label.tolist() == [0, 1, 2] * 2
    assert open_index(location).classes == ("x", "y", "z")  # saved, and apart from other columns
    assert build_index(f"{path}#label=id").label.tolist() == COUNT
    write_columns(path, {"label": pa.array([1, 0] * 3).dictionary_encode(), "label_name": TEXTS})
    assert build_index(str(path)).label.tolist() == [1, 0] * 3  # never guesses their names
    write(tmp_path / "train.parquet", labels=[0, 1] * (len(IMAGES) // 2))
    splits = find_splits(f"{tmp_path}#label=label")
    assert splits == {"train": f"{tmp_path}/*train*.parquet#label=label"}
    assert len(open_index(splits["train"])) == len(IMAGES)


PATHS = [{"bytes": None, "path": "a.jpg"}] * ROWS
TYPES = ([0.0] * ROWS, [True] * ROWS, [b"a"] * ROWS, [{"id": 1}] * ROWS, [[1.0, 0.0]] * ROWS)


@pytest.mark.parametrize(
    ("columns", "code", "fields"),
    [
        *(
            (columns, "data.no-column", {"kind": "label"})
            for columns in ({"id": COUNT}, {"width": COUNT}, {"a": [{"label": 1}] * ROWS})
        ),
        *(
            (dict.fromkeys(names, COUNT), "data.several-columns", {"names": " and ".join(quoted)})
            for names in (("fine_label", "class"), ("coarse", "fine"))
            if (quoted := [f"'{name}'" for name in names])
        ),
        (
            {"label": COUNT, "jpg": [b"a"] * 6, "png": [b"b"] * 6, "image": None},
            *("data.several-columns", {"names": "'jpg' and 'png'"}),
        ),
        *(
            ({"label": cells, "id": COUNT}, "parquet.unknown-label-type", {"column": "label"})
            for cells in TYPES
        ),
        ({"label": [[0, 0, 1]] * ROWS}, "parquet.label-is-vector", {"row": 0}),
        ({"label": [*COUNT[:5], None]}, "parquet.no-label", {"row": 5}),
        ({"label": [*TEXTS[:5], None]}, "parquet.no-label", {"row": 5}),
        ({"label": [*TEXTS[:5], " "]}, "parquet.no-label", {"row": 5}),
        ({"label": [["a"], [], None, [], [], []]}, "parquet.no-label", {"row": 2}),
        ({"label": [["a"], [], [], [], [], ["a", None]]}, "parquet.no-label", {"row": 5}),
        ({"label": COUNT, "split": ["train"] * 5 + ["val"]}, "parquet.several-splits", {}),
        *(
            ({"label": COUNT, "image": cells, "hash": [b"a"] * ROWS}, "parquet.column-of-paths", {})
            for cells in (["a.jpg"] * ROWS, [{"path": "a.jpg"}] * ROWS, PATHS)
        ),
        ({"label": COUNT, "image": [[0]] * ROWS}, "parquet.column-not-images", {}),
    ],
)
def test_columns_that_do_not_say_what_they_are(
    columns: dict[str, Any], code: str, fields: dict[str, object], tmp_path: Path
) -> None:
    """The only column of integers was the label, whatever it was called."""
    path = write_columns(tmp_path / "a.parquet", columns, {"coarse": CLASS, "fine": CLASS})
    with raises(code, path=path, **fields):
        build_index(str(path))


def test_each_column_of_labels_has_an_index_of_its_own(tmp_path: Path) -> None:
    """The second column that was asked for in a folder had the labels of the first."""
    columns = {"fine": ["ape", "bee", "cow"] * 2, "coarse": ["animal", "insect", "animal"] * 2}
    write_columns(tmp_path / "0.parquet", columns)
    for _ in range(2):
        assert open_index(f"{tmp_path}#label=fine").classes == ("ape", "bee", "cow")
        assert open_index(f"{tmp_path}#label=coarse").classes == ("animal", "insect")
    of_release_before = open_index(f"{tmp_path}#label=fine").path
    of_release_before.rename(tmp_path / ".trainyard-index")
    with raises("data.no-column", kind="label"):
        open_index(str(tmp_path))
    with raises("data.unknown-option", name="#nosuch="):
        open_index(f"{tmp_path}#label=coarse#nosuch=1")


@pytest.mark.parametrize(
    ("column", "cells"),
    [("is_valid", [False, True] * 3), ("phase", ["train", "val"] * 3), ("test", [0, 0, 1] * 2)],
)
def test_a_split_by_another_name_is_named(tmp_path: Path, column: str, cells: list[Any]) -> None:
    """Also where each of two files is of one split."""
    for number in range(2):
        some = cells if number else [cells[0]] * len(cells)
        write_columns(tmp_path / f"{number}.parquet", {"label": COUNT, column: some, "id": COUNT})
    place = str(tmp_path)
    with raises("parquet.unread-split", column=column, location=place):
        open_index(place)
    assert len(open_index(f"{place}/0.parquet")) == ROWS
    index = open_index(f"{place}#split=none")
    assert index.left_out.kinds[COLUMNS] == (2, f"{column!r}, 'id'")
    with raises("parquet.several-splits"):
        open_index(f"{place}#split={column}")


def test_files_that_differ_in_their_labels(tmp_path: Path) -> None:
    write_columns(tmp_path / "a.parquet", {"label": TEXTS, "split": ["train"] * ROWS})
    for columns, code in (
        ({"label": COUNT}, "data.files-differ-in-labels"),
        ({"class": TEXTS}, "data.files-differ-in-labels"),
        ({"label": [0.0] * ROWS}, "parquet.unknown-label-type"),
    ):
        write_columns(tmp_path / "b.parquet", columns)
        with raises(code, path=f"{tmp_path}/b.parquet"):
            build_index(f"{tmp_path}/*.parquet")
    write_columns(tmp_path / "b.parquet", {"label": TEXTS, "split": ["val"] * ROWS})
    with raises("parquet.several-splits", path=f"{tmp_path}/b.parquet", names="train, val"):
        build_index(f"{tmp_path}/*.parquet")


@pytest.mark.parametrize("codec", ["zstd", "gzip"])
def test_another_codec_is_refused_with_the_way_round(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path / "a.parquet", compression=codec)
    with raises("parquet.images-encoded", path=path):
        build_index(str(path))


def test_damaged_snappy_data_is_an_error() -> None:
    text = b"".join(contents([500, 600, 170_000]))
    content = bytes(pa.compress(text, "snappy", asbytes=True))
    span = SnappyStream(content).span(900, 150_000)
    with pytest.raises(ValueError, match="cut short"):
        unpacked(content[span.offset : span.offset + span.size // 2], span.start, span.length)
    with pytest.raises(ValueError, match="cut short"):
        SnappyStream(content[:-1])


def unpacked_by_extension(stored: bytes, start: int, length: int) -> bytes | None:
    room = length + max(0, -start)
    out, status = np.zeros(room + 1, np.uint8), np.ones(1, np.uint8)
    zero, size = np.zeros(1, np.int64), np.array([len(stored)])
    core.unpack_snappy([stored], zero, zero, size, np.array([start]), np.array([room]), out, status)
    assert not out[-1]
    return bytes(out[room - length : room]) if status[0] == core.OK else None


def test_snappy_data_is_unpacked() -> None:
    """Copies of every kind. The extension never takes damaged spans for another image."""
    random = np.random.default_rng(0)
    words = [random.bytes(size) for size in (3, 5, 70, 900)]
    text = b"".join(words[n] * (1 + n % 3) for n in random.integers(0, 4, 800)) + b"a" * 999
    whole = text + random.bytes(99_000)
    content = bytes(pa.compress(whole, "snappy", asbytes=True))
    stream = SnappyStream(content)
    for _ in range(200):
        at, size = int(random.integers(0, len(text))), int(random.integers(1, 70_000))
        span = stream.span(at, size)
        stored = content[span.offset : span.offset + span.size]
        length = span.length or span.size
        found = unpacked(stored, *span[2:]) if span.length else stored
        assert found == whole[at : at + size]
        if not is_built():
            continue
        if span.length:
            assert unpacked_by_extension(stored, span.start, length) == found
        damaged = bytearray(stored[: random.integers(0, len(stored) + 1)])
        if damaged:
            damaged[random.integers(0, len(damaged))] ^= int(random.integers(1, 256))
        by_extension = unpacked_by_extension(bytes(damaged), span.start, length)
        is_taken = by_extension is not None
        assert not is_taken or by_extension == unpacked(bytes(damaged), span.start, length)


def test_other_tools_read_what_pack_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    samples = [EncodedSample(image, ".jpg", n % 2, str(n)) for n, image in enumerate(IMAGES)]
    parquet.write(path, iter(samples), ["ape", "bee"])
    table = pq.read_table(path, page_checksum_verification=True)
    assert table.column("image").to_pylist() == [
        {"bytes": image, "path": f"{n}.jpg"} for n, image in enumerate(IMAGES)
    ]
    assert table.column("label").to_pylist() == [n % 2 for n in range(len(IMAGES))]
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": ["ape", "bee"], "_type": "ClassLabel"}
    assert features["image"] == {"_type": "Image"}
    assert os.path.getsize(path) < sum(map(len, IMAGES)) + 16_384


def test_images_of_one_block_of_snappy_are_divided(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write(path, contents([100 + number for number in range(60)]), labels=[0, 1] * 30)
    index = open_index(str(path))
    assert len({*index.offset.tolist()}) < len({*index.keys_in_file.tolist()}) == len(index) == 60
    train, val = (open_part(index, side) for side in both_sides(0.2, seed=0))
    check_apart(train, val)
    assert sorted(stored(train) + stored(val)) == sorted(stored(index))
