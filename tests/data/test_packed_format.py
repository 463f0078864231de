"""The packed format: shards with a table at their end, and data sets into and out of it."""

import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.looks import silent
from tests.data.tars import Patch, open_splits, read_rows
from tests.errors import raises
from trainyard.data import formats
from trainyard.data._native import own_decoder
from trainyard.data.decode.crops import CentralCrop
from trainyard.data.decode.decode import decode_batch, reference_image
from trainyard.data.decode.packed_record import has_pixels, is_record, pixels_of
from trainyard.data.formats import packed
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.location import find_place
from trainyard.data.storage.manifest import Manifest
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Closing, Source
from trainyard.datasets.pack.pack import pack
from trainyard.datasets.pack.recode import ShortSide
from trainyard.datasets.pack.shards import PackOptions, shuffled
from trainyard.datasets.pack.worker import storing
from trainyard.datasets.verify.checks import Check
from trainyard.datasets.verify.verify import verify
from trainyard.errors import DataError

CLASSES = ("cat", "dog", "eel")
SAMPLES = [(bytes([number]) * (37 * number), number % 3) for number in range(12)]
needs_extension = pytest.mark.skipif(own_decoder() is None, reason="the extension is not built")


def write(
    path: Path,
    classes: tuple[str, ...] | None = CLASSES,
    samples: Sequence[tuple[bytes, int]] = SAMPLES,
) -> Path:
    encoded = (EncodedSample(image, ".jpg", label, "key") for image, label in samples)
    packed.write(path, encoded, classes)
    return path


# --- one shard ---


class Counted(Closing):
    """A source that says what is read of it."""

    def __init__(self, source: Source, reads: list[tuple[int, int]]) -> None:
        self.name, self.size, self.stamp = source.name, source.size, source.stamp
        self._source, self._reads = source, reads

    def read(self, offset: int, size: int) -> bytes:
        self._reads.append((offset, size))
        return self._source.read(offset, size)

    def close(self) -> None:
        self._source.close()


@pytest.mark.parametrize(("count", "size"), [(12, 40_000), (5_000, 100)], ids=["short", "long"])
def test_only_the_table_is_read(tmp_path: Path, monkeypatch: Patch, count: int, size: int) -> None:
    """At once if it is short, and else after the end of the file, which says where it begins."""
    samples = [(bytes([number % 256]) * size, number % 3) for number in range(count)]
    path = write(tmp_path / "a.packed", samples=samples)
    reads: list[tuple[int, int]] = []
    monkeypatch.setattr(packed, "open_source", lambda name: Counted(open_source(name), reads))
    assert read_rows(path) == samples
    assert len(reads) <= 2 * 2
    assert min(offset for offset, _ in reads) > path.stat().st_size / 2


def offsets(path: Path) -> list[int]:
    with closing(open_source(str(path))) as source:
        found: list[int] = packed.read_table(source).offset.tolist()
    return found


def test_each_changed_byte_of_the_table_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.packed")
    whole = path.read_bytes()
    table = offsets(path)[-1] + len(SAMPLES[-1][0])
    for position in range(table + 64, len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(DataError) as caught:
            read_rows(path)
        assert caught.value.fields["path"] == str(path)
    path.write_bytes(whole[:64] + whole[128:])
    with raises("packed.damaged", path=path):
        read_rows(path)
    path.write_bytes(whole[:-56] + b"\x02" + whole[-55:])
    with raises("file.other-version", path=path, version=2, known=1):
        read_rows(path)


def test_tables_that_point_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "a.packed"
    for sample, classes in [
        (EncodedSample(b"1", "", 3, ""), CLASSES),
        (EncodedSample(b"1", "", -1, ""), None),
        (EncodedSample(b"1", "", 0, ""), ("cat", "cat")),
    ]:
        packed.write(path, [sample], classes)
        with raises("packed.damaged", path=path):
            read_rows(path)
    content = write(path).read_bytes()
    with closing(open_source(str(path))) as source:
        end = packed.read_table(source)
    for row in (-1, len(content) - 1, 1 << 62):
        moved = end._replace(offset=np.where(np.arange(12) == 5, row, end.offset))
        with raises("packed.damaged", path=path, reason="sample 5 lies outside of it"):
            packed._check(Counted(open_source(str(path)), []), moved, len(content))


# --- data sets ---


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and val of JPEGs of several kinds; a PNG, a progressive JPEG and text among them."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(20):
        folder = root / ("train", "val")[number >= 15] / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        smooth = rng.integers(0, 256, (5, 6, 3), np.uint8)
        image = Image.fromarray(smooth).resize((50 + number, 40), Image.Resampling.BICUBIC)
        path, options = folder / f"{number:02d}.jpg", {"subsampling": number % 3}
        image.save(path, "JPEG", quality=60 + 2 * number, **options)
    image.save(root / "train/cat/03.jpg", "PNG")
    image.save(root / "train/dog/04.jpg", "JPEG", progressive=True)
    (root / "train/eel/05.jpg").write_text("no image")
    return root


def packed_into(source: Path, destination: Path, format: str = "packed", **more: Any) -> Manifest:
    options = PackOptions(format, "mini", shard_samples=6, workers=1)
    found = open_splits(source)
    selections = {split: shuffled(index, None) for split, index in found.items()}
    classes = next(iter(found.values())).classes
    settings = dataclasses.replace(options, **more)
    manifest = pack(selections, classes, destination, settings, about={})
    assert manifest is not None
    return manifest


def contents(location: Path) -> list[tuple[str, str, bytes]]:
    """Split, class and stored bytes of each sample."""
    return [
        (split, index.classes[index.label[sample]], Reader(index).read(sample))
        for split, index in open_splits(location).items()
        for sample in range(len(index))
    ]


@needs_extension
def test_jpegs_go_in_and_come_out_as_they_were(photos: Path, tmp_path: Path) -> None:
    manifest = packed_into(photos, tmp_path / "packed")
    assert manifest.splits["train"].files == "mini-train-{000000..000002}.packed"
    assert manifest.about["odd"].keys() == {"PNG in disguise", "not an image"}
    stored = contents(tmp_path / "packed")
    assert [is_record(content) for *_, content in stored].count(False) == 3
    for format in ("folder", "webdataset", "hdf5"):
        packed_into(tmp_path / "packed", tmp_path / format, format)
        assert Counter(contents(tmp_path / format)) == Counter(contents(photos))


@needs_extension
def test_packed_from_packed_is_the_same(photos: Path, tmp_path: Path) -> None:
    packed_into(photos, tmp_path / "first")
    packed_into(tmp_path / "first", tmp_path / "second")
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    packed_into(tmp_path / "first", tmp_path / "small", recode=ShortSide(20, 90))
    packed_into(photos, tmp_path / "direct", recode=ShortSide(20, 90))
    assert contents(tmp_path / "small") == contents(tmp_path / "direct")


def test_pixels(photos: Path, tmp_path: Path) -> None:
    manifest = packed_into(photos, tmp_path / "pixels", pixels=True)
    assert manifest.about["pixels"] is True
    assert manifest.about["odd"]["cannot be decoded"]["count"] == 1
    originals = [content for *_, content in contents(photos)]
    stored = [content for *_, content in contents(tmp_path / "pixels")]
    for record, original in zip(stored, originals, strict=True):
        if original == b"no image":
            assert record == original
            continue
        assert has_pixels(record)
        assert np.array_equal(pixels_of(record), np.asarray(reference_image(original)))
    packed_into(tmp_path / "pixels", tmp_path / "folder", "folder")
    suffixes = Counter(path.suffix for path in (tmp_path / "folder/train").rglob("*.*"))
    assert suffixes == {".png": 14, ".jpg": 1}
    for _, _, content in contents(tmp_path / "folder"):
        if content != b"no image":
            record = next(r for r in stored if is_same_picture(r, content))
            assert has_pixels(record)


def is_same_picture(record: bytes, image: bytes) -> bool:
    return has_pixels(record) and np.array_equal(
        pixels_of(record), np.asarray(Image.open(io.BytesIO(image)))
    )


def test_smaller_pixels(photos: Path, tmp_path: Path) -> None:
    packed_into(photos, tmp_path / "pixels", pixels=True, recode=ShortSide(16, 90))
    for *_, content in contents(tmp_path / "pixels"):
        assert content == b"no image" or min(pixels_of(content).shape[:2]) == 16


@needs_extension
def test_decoding_is_that_of_the_originals(photos: Path, tmp_path: Path) -> None:
    packed_into(photos, tmp_path / "packed")
    stored = [content for *_, content in contents(tmp_path / "packed")]
    originals = [content for *_, content in contents(photos)]
    made = []
    for content, decoder in ((stored, own_decoder()), (stored, None), (originals, own_decoder())):
        out = np.empty((len(content), 24, 24, 3), np.uint8)
        bad = decode_batch(content, CentralCrop(24, 0.8), out, "bilinear", decoder=decoder)
        assert len(bad) == 1  # the text
        made.append(out)
    assert np.array_equal(made[0], made[2])
    assert np.abs(made[0].astype(int) - made[1]).mean() < 0.5


@needs_extension
def test_coefficients_without_the_extension_are_one_error(
    photos: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Of the data, not of each image: a run ends instead of going on without images."""
    packed_into(photos, tmp_path / "packed")
    records = [content for *_, content in contents(tmp_path / "packed")]
    monkeypatch.setattr("trainyard.datasets.pack.worker.is_built", lambda: False)
    monkeypatch.setattr("trainyard.data.decode.packed_record.own_decoder", lambda: None)
    with raises("data.needs-c-extension"):
        packed_into(photos, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    out = np.empty((len(records), 24, 24, 3), np.uint8)
    with raises("data.needs-c-extension"):
        decode_batch(records, CentralCrop(24, 0.8), out, "bilinear")
    with raises("data.needs-c-extension"):
        storing(PackOptions("folder"))(records[0])


def test_only_packed_holds_pixels(photos: Path, tmp_path: Path) -> None:
    with raises("pack.format-without-pixels", format="webdataset"):
        packed_into(photos, tmp_path / "out", "webdataset", pixels=True)


# --- all else ---


def problems(location: Path) -> list[Check]:
    checks = verify(str(location), deep=True, workers=1, counters=silent)
    return [check for check in checks if check.result == "problem"]


def change_a_sample(path: Path, change: Callable[[bytes], bytes]) -> None:
    """The second sample, with checksums that are right."""
    scan = formats.scan(find_place(str(path)))
    rows, classes = read_rows(path), list(scan.classes or ())
    content = path.read_bytes()
    assert rows[1][0] in content
    rows[1] = (change(rows[1][0]), rows[1][1])
    packed.write(path, [EncodedSample(image, "", label, "") for image, label in rows], classes)


@needs_extension
def test_verify(photos: Path, tmp_path: Path) -> None:
    packed_into(photos, tmp_path / "whole")
    (check,) = problems(tmp_path / "whole")
    assert (check.name, check.count) == ("images", 1)
    assert check.found[0].code == "verify.undecodable"
    shard = tmp_path / "whole" / "mini-val-000000.packed"
    (tmp_path / "whole" / "dataset.json").unlink()
    whole = shard.read_bytes()
    shard.write_bytes(whole[:200] + b"\0\1" + whole[202:])
    found = {check.name: check.found[0].code for check in problems(tmp_path / "whole")}
    assert found["records"] == "packed.wrong-checksum"
    shard.write_bytes(whole)
    change_a_sample(shard, lambda record: record[:700])
    found = {check.name: " ".join(map(str, check.found)) for check in problems(tmp_path / "whole")}
    assert "records" not in found
    assert "packed record" in found["images"]
