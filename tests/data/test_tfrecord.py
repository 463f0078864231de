import gzip
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from tfrecord.writer import TFRecordWriter

from tests.data.tars import stored
from tests.data.tfrecords import (
    block,
    bytes_feature,
    example,
    feature,
    int_feature,
    number,
    record,
    write_records,
)
from tests.errors import raises
from tests.images import jpeg
from trainyard.data.formats import tfrecord
from trainyard.data.index.build import build_index
from trainyard.data.index.splits import find_splits
from trainyard.data.storage.location import find_place
from trainyard.data.storage.source import LocalFile

SHARD = "train-00000-of-00001"


def some_images() -> list[bytes]:
    """Real ones, and lengths around the borders of what protobuf and reading ahead count in."""
    sizes = (1, 127, 128, 1000, 1024, 16_383, 16_384, 110_000, 2_100_000)
    random = np.random.default_rng(3)
    return [jpeg(8), jpeg(100), b"", *(random.bytes(size) for size in sizes)]


# --- an encoder of protobuf that knows no schema ---


IMAGE = bytes_feature(b"image/encoded", b"the image")
LABEL = int_feature(b"image/class/label", 3)
IMAGE_OF_TFDS = bytes_feature(b"image", b"the image")


# --- files of others ---


def test_reads_what_the_tfrecord_package_writes(tmp_path: Path) -> None:
    images = some_images()
    writer = TFRecordWriter(str(tmp_path / SHARD))
    for n, image in enumerate(images):
        writer.write({"image/encoded": (image, "byte"), "image/class/label": (n % 3 + 1, "int")})
    writer.close()
    assert stored(tmp_path) == [(str(n % 3), image) for n, image in enumerate(images)]
    assert build_index(str(tmp_path)).format == "tfrecord"


@pytest.mark.parametrize("packed", [True, False])
def test_reads_features_in_every_order_beside_unknown_ones(tmp_path: Path, packed: bool) -> None:
    image = jpeg(40)
    parts = (
        bytes_feature(b"image/encoded", image),
        int_feature(b"image/class/label", 2, packed=packed),
        bytes_feature(b"image/class/synset", b"n2"),
        feature(b"x" * 300, block(2, bytes(2000))),
        # What a later version might add: other fields of every wire type at every level.
        number(5 << 3) + number(7) + number(6 << 3 | 1) + bytes(8) + number(9 << 3 | 5) + bytes(4),
    )
    contents = [example(*order) for order in permutations(parts)]
    path = write_records(tmp_path / "a.tfrecords", contents)
    assert stored(path) == [("1", image)] * 120  # of class 0 there is no name


def test_a_value_may_come_before_its_name_and_a_later_one_replaces_it(tmp_path: Path) -> None:
    backwards = block(1, block(2, block(1, block(1, b"new"))) + block(1, b"image/encoded"))
    path = write_records(tmp_path / SHARD, [example(IMAGE, LABEL, backwards)])
    assert stored(path) == [("2", b"new")]
    in_two_parts = [example(IMAGE) + example(LABEL)]
    assert stored(write_records(tmp_path / "b" / SHARD, in_two_parts)) == [("2", b"the image")]


def test_labels_of_tfds_count_from_0(tmp_path: Path) -> None:
    images = some_images()
    contents = [
        example(
            bytes_feature(b"file_name", b"n01440764_1.JPEG"),
            bytes_feature(b"image", image),
            int_feature(b"label", n % 2),
        )
        for n, image in enumerate(images)
    ]
    for split in ("train", "validation"):
        write_records(tmp_path / f"imagenet2012-{split}.tfrecord-00000-of-00001", contents)
    splits = find_splits(str(tmp_path))
    assert sorted(splits) == ["train", "val"]
    for location in splits.values():
        assert stored(location) == [(str(n % 2), image) for n, image in enumerate(images)]


@pytest.mark.parametrize("feature_name", [b"class", b"target"])
def test_labels_of_kaggle_count_from_0(tmp_path: Path, feature_name: bytes) -> None:
    records = [
        example(bytes_feature(b"image", b"%d" % n), int_feature(feature_name, n)) for n in range(3)
    ]
    write_records(tmp_path / "train/00-224x224-3.tfrec", records)
    write_records(tmp_path / "val/00-224x224-3.tfrec", records[:1])
    splits = find_splits(str(tmp_path))
    assert [build_index(place).label.tolist() for place in splits.values()] == [[0, 1, 2], [0]]
    both = example(*(int_feature(name, 7) for name in (b"class", b"target")), IMAGE_OF_TFDS)
    write_records(tmp_path / "train/00-224x224-3.tfrec", [both])
    with raises("tfrecord.missing-features", record=1):
        build_index(splits["train"])


def test_index_files_and_folders_are_no_shards(tmp_path: Path) -> None:
    for split, label in (("train", 1), ("validation", 2)):
        for shard in range(3):
            name = f"{split}-{shard:05d}-of-00003"
            image = bytes_feature(b"image/encoded", f"{split} {shard}".encode())
            contents = [example(image, int_feature(b"image/class/label", label))]
            path = write_records(tmp_path / split / name, contents)
            path.with_name(f"{name}.idx").write_text("0 99\n")
        (tmp_path / split / "idx_files").mkdir()
        (tmp_path / split / "idx_files" / name).write_text("0 99\n")
    splits = find_splits(str(tmp_path))
    assert stored(splits["train"]) == [("0", f"train {n}".encode()) for n in range(3)]
    assert stored(splits["val"]) == [("1", f"validation {n}".encode()) for n in range(3)]
    assert len(stored(tmp_path / "train" / "train-{00000..00001}-of-00003")) == 2


@pytest.mark.parametrize("image_comes_first", [True, False])
def test_a_scan_reads_little_of_each_image(
    tmp_path: Path, image_comes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = bytes_feature(b"image/encoded", bytes(110_000))
    parts = (image, LABEL) if image_comes_first else (LABEL, image)
    path = write_records(tmp_path / SHARD, [example(*parts)] * 20)
    reads: list[int] = []

    class Counted(LocalFile):
        def read(self, offset: int, size: int) -> bytes:
            reads.append(size)
            return super().read(offset, size)

    monkeypatch.setattr(tfrecord, "open_source", Counted)
    place = find_place(str(path))
    assert [len(rows.labels) for rows in tfrecord.scan(place).rows] == [20]
    assert sum(reads) <= 22 * 1024 and len(reads) <= 24  # one or so per record


# --- the names of the classes ---


Named = list[tuple[int, str | None]]  # label and name of each record


def named_shards(folder: Path, *shards: Named) -> Path:
    for n, records in enumerate(shards):
        contents = []
        for label, name in records:
            words = [] if name is None else [bytes_feature(b"image/class/synset", name.encode())]
            contents.append(example(int_feature(b"image/class/label", label), *words, IMAGE))
        write_records(folder / f"train-{n:05d}-of-{len(shards):05d}", contents)
    return folder


@pytest.mark.parametrize(
    ("shards", "classes", "labels"),
    [
        ([[(3, "ant"), (1, "cow")], [(2, "bee"), (1, "cow")]], "ant bee cow", [0, 2, 1, 2]),
        ([[(2, "ant"), (1, "bee")], [(1, None)]], "0 1", [1, 0, 0]),  # a record has no name
        ([[(3, "ant"), (1, "bee")]], "0 1 2", [2, 0]),  # a class has no record
    ],
)
def test_classes_are_numbered_by_their_sorted_names_or_bare_numbers(
    tmp_path: Path, shards: list[Named], classes: str, labels: list[int]
) -> None:
    index = build_index(str(named_shards(tmp_path, *shards)))
    assert (index.classes, index.label.tolist()) == (tuple(classes.split()), labels)
    assert index.has_names is ("ant" in classes)


@pytest.mark.parametrize(
    ("shards", "code", "fields"),
    [
        ([[(1, "ant"), (1, "bee")]], "tfrecord.label-named-twice", {"name": "bee"}),
        ([[(1, "ant")], [(1, "bee")]], "tfrecord.label-named-twice", {"name": "bee"}),
        ([[(1, "ant"), (2, "ant")]], "tfrecord.class-numbered-twice", {}),
    ],
)
def test_names_that_contradict_each_other(
    tmp_path: Path, shards: list[Named], code: str, fields: dict[str, object]
) -> None:
    with raises(code, **fields):
        build_index(str(named_shards(tmp_path, *shards)))


# --- damage ---


def labelled(*features: bytes) -> bytes:
    return example(LABEL, *features)


def pictured(*values: int) -> bytes:
    return example(IMAGE, int_feature(b"image/class/label", *values))


def label_of(content: bytes) -> bytes:
    return example(IMAGE, feature(b"image/class/label", block(3, content)))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (example(IMAGE), "missing-features"),
        (example(LABEL), "missing-features"),
        (example(IMAGE, int_feature(b"label", 1)), "missing-features"),
        (b"", "missing-features"),
        (pictured(0), "label-0"),
        (pictured(2**64 - 1), "not-a-class-number"),
        (pictured(2**40), "not-a-class-number"),
        (pictured(), "bad-record"),
        (pictured(1, 2), "bad-record"),
        (labelled(bytes_feature(b"image/encoded", b"", b"")), "bad-record"),
        (example(IMAGE, bytes_feature(b"image/class/label", b"1")), "bad-record"),
        (labelled(int_feature(b"image/encoded", 1)), "bad-record"),
        (labelled(feature(b"image/encoded", b"")), "bad-record"),
        (number(1 << 3) + number(5), "bad-record"),  # wire type 0 for a message
        (labelled(feature(b"image/encoded", block(1, b"\x09" + bytes(8)))), "bad-record"),
        (label_of(b"\x09" + bytes(8)), "bad-record"),  # wire type 1
        (example(IMAGE, LABEL, b"\x0b"), "bad-record"),  # wire type 3
        (b"\x0a" + number(2**62), "bad-record"),
        (labelled(feature(b"image/encoded", b"\x0a" + number(2**40))), "bad-record"),
        (b"\x0a" + b"\xff" * 30, "bad-record"),  # a number without end, and one that is cut
        (label_of(block(1, b"\x80")), "bad-record"),
        (example(IMAGE, LABEL, bytes_feature(b"image/class/synset", bytes(5000))), "bad-record"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, content: bytes, code: str) -> None:
    good = example(IMAGE, LABEL)
    path = write_records(tmp_path / SHARD, [good, content, good])
    with raises(f"tfrecord.{code}", path=path, record=2, offset=len(record(good))):
        build_index(str(path))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (record(b"", 2**63 - 1), "tfrecord.truncated-record"),
        (record(b"", 2**40), "tfrecord.truncated-record"),
        (record(IMAGE)[:9] + b"?" + record(IMAGE)[10:], "tfrecord.damaged-length"),
    ],
)
def test_a_damaged_length_is_named(tmp_path: Path, damage: bytes, code: str) -> None:
    good = record(example(IMAGE, LABEL))
    (tmp_path / SHARD).write_bytes(good + damage)
    with raises(code, path=tmp_path / SHARD, offset=len(good)):
        build_index(str(tmp_path / SHARD))


def test_a_compressed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(gzip.compress(record(IMAGE)))
    with raises("tfrecord.compressed", path=tmp_path / SHARD):
        build_index(str(tmp_path / SHARD))
