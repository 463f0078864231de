"""Parquet as `datasets` and pyarrow write it, at several sizes of row groups, pages and codecs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.tars import stored
from trainyard.data._native import core, is_built
from trainyard.data.formats import parquet
from trainyard.data.formats.sample import EncodedSample
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.snappy import SnappyStream, unpacked
from trainyard.errors import DataError

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
HEAD = np.random.default_rng(9).bytes(400)  # the same in all images, like tables of a JPEG


def contents(sizes: list[int]) -> list[bytes]:
    random = np.random.default_rng(3)
    return [HEAD + random.bytes(size) for size in sizes]


IMAGES = contents([0, 10, 3000, 40_000, 65_536, 70_000, 150_000, 200, 300] * 4)


def write(
    path: Path,
    images: Sequence[bytes | None] = IMAGES,
    names: list[str] | None = None,
    *,
    kind: pa.DataType = IMAGE,
    labels: list[int | None] | None = None,
    **settings: Any,
) -> Path:
    """A file with the metadata that `datasets` writes."""
    label: dict[str, Any] = {"dtype": "int64", "_type": "Value"}
    if names:
        label = {"names": names, "_type": "ClassLabel"}
    about = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    column = list(images) if kind != IMAGE else [{"bytes": i, "path": "x.jpg"} for i in images]
    table = pa.table(
        {
            "image": pa.array(column, kind),
            "label": pa.array(labels or [n % 3 for n in range(len(images))], pa.int64()),
        }
    ).replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(table, path, **settings)
    return path


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
    path = write(tmp_path / "a.parquet", IMAGES + IMAGES[3:5], compression=codec, **settings)
    expected = [(image, n % 3) for n, image in enumerate(IMAGES + IMAGES[3:5])]
    index = open_index(str(path))
    reader = Reader(index)
    rows = [(reader.read(n), label) for n, label in enumerate(index.label.tolist())]
    assert rows == expected
    ids = np.array([5, 0, 17, 6, 36, 8])
    (buffers, which, offsets, lengths, _), bad = reader.expect(ids).stored(slice(0, 6))
    found = [
        bytes(memoryview(buffers[w])[at : at + size])
        for w, at, size in zip(which.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    ]
    assert found == [expected[sample][0] for sample in ids.tolist()] and not bad


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
    cases: dict[str, dict[str, Any]] = {
        "a row has no bytes": {"images": none},
        "no labels: label is -1": {"labels": [-1] * len(IMAGES)},
        "label is null": {"labels": [None] * len(IMAGES)},
        "label is 7, which is no class": {"labels": [7] * len(IMAGES), "names": ["a", "b"]},
    }
    for message, settings in cases.items():
        write(path, **settings)
        with pytest.raises(DataError, match=f"^{path}: .*{message}"):
            build_index(str(path))


@pytest.mark.parametrize("codec", ["zstd", "gzip"])
def test_another_codec_is_refused_with_the_way_round(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path / "a.parquet", compression=codec)
    with pytest.raises(DataError, match=f"compressed by {codec.upper()}; write the file anew"):
        build_index(str(path))


def test_snappy_data_is_unpacked_as_the_library_does() -> None:
    """Copies of every kind: short, long, and overlapping themselves."""
    random = np.random.default_rng(0)
    words = [random.bytes(size) for size in (3, 5, 70, 900)]
    text = b"".join(words[n] * (1 + n % 3) for n in random.integers(0, 4, 800)) + b"a" * 999
    content = bytes(pa.compress(text, "snappy", asbytes=True))
    stream = SnappyStream(content)
    for at, size in zip(
        random.integers(0, 200_000, 99), random.integers(1, 70_000, 99), strict=True
    ):
        at = int(at) % len(text)
        wanted = text[at : at + int(size)]
        span = stream.span(at, len(wanted))
        stored = content[span.offset : span.offset + span.size]
        assert unpacked(stored, span.start, span.length) == wanted


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


@pytest.mark.skipif(not is_built(), reason="needs the extension")
def test_the_extension_unpacks_what_python_unpacks() -> None:
    """Whole spans and damaged ones, which it never takes for another image."""
    random = np.random.default_rng(0)
    words = [random.bytes(size) for size in (3, 5, 70, 900)]
    text = b"".join(words[n] * (1 + n % 3) for n in random.integers(0, 4, 800)) + b"a" * 999
    content = bytes(pa.compress(text + random.bytes(99_000), "snappy", asbytes=True))
    stream = SnappyStream(content)
    for _ in range(300):
        span = stream.span(int(random.integers(0, len(text))), int(random.integers(1, 99_000)))
        stored = content[span.offset : span.offset + span.size]
        length = span.length or span.size
        if span.length:
            assert unpacked_by_extension(stored, span.start, length) == unpacked(stored, *span[2:])
        damaged = bytearray(stored[: random.integers(0, len(stored) + 1)])
        if damaged:
            damaged[random.integers(0, len(damaged))] ^= int(random.integers(1, 256))
        found = unpacked_by_extension(bytes(damaged), span.start, length)
        assert found is None or found == unpacked(bytes(damaged), span.start, length)


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
