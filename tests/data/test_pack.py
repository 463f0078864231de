"""From any index to any format that can be written."""

import dataclasses
import errno
import hashlib
import io
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.tars import Patch, open_splits, stored
from tests.errors import raises
from tests.full_disk import full_disk
from trainyard.data.index.build import open_index
from trainyard.data.storage.manifest import Manifest, read_manifest
from trainyard.datasets.pack import files
from trainyard.datasets.pack.journal import locked
from trainyard.datasets.pack.pack import pack
from trainyard.datasets.pack.recode import ShortSide
from trainyard.datasets.pack.shards import PackOptions, Selection, only_classes, plan_jobs, shuffled

FORMATS = ("webdataset", "hdf5", "folder")
CLASSES = ("n01", "n02", "n03", "n04")  # the last one without an image
COUNTS = {"train": 23, "val": 7}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder: JPEGs, one in CMYK, a PNG under a JPEG's name, and text."""
    root = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            path = root / split / CLASSES[number % 3] / f"{CLASSES[number % 3]}_{number}.JPEG"
            image.save(path, "JPEG")
    image.convert("CMYK").save(root / "train/n01/n01_0.JPEG", "JPEG")
    image.save(root / "train/n02/n02_1.JPEG", "PNG")
    (root / "train/n03/n03_2.JPEG").write_text("no image")
    return root


def selections(location: Path, seed: int | None = 0) -> dict[str, Selection]:
    return {
        split: shuffled(index, seed if split == "train" else None)
        for split, index in open_splits(location).items()
    }


def packed(source: Path, destination: Path, format: str, **options: Any) -> Manifest:
    settings = PackOptions(format, "mini", shard_samples=5, workers=2)
    settings = dataclasses.replace(settings, **options)
    manifest = pack(selections(source), CLASSES, destination, settings, about={"seed": 0})
    assert manifest is not None
    return manifest


def tree(folder: Path) -> dict[str, bytes]:
    """All files but the saved indices."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".trainyard-index")
    }


@pytest.fixture(scope="module")
def all_formats(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same data in each format. Not to be written to."""
    root = tmp_path_factory.mktemp("packed")
    for format in FORMATS:
        packed(source, root / format, format)
    return {format: root / format for format in FORMATS}


# --- what is written ---


@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_data_set_reads_as_its_source(
    source: Path, all_formats: dict[str, Path], format: str
) -> None:
    """In the order of the selection; a folder in that of its names."""
    written = open_splits(all_formats[format])
    assert list(written) == ["train", "val"]
    for split, selection in selections(source).items():
        ordered = stored(selection.index)
        expected = [ordered[i] for i in selection.ids]
        assert written[split].classes == CLASSES
        assert Counter(stored(written[split])) == Counter(expected)
        assert format == "folder" or stored(written[split]) == expected
    assert selections(source)["train"].ids.tolist() != list(range(COUNTS["train"]))


def test_names_of_shards(source: Path, tmp_path: Path, all_formats: dict[str, Path]) -> None:
    names = {format: set(tree(path)) - {"dataset.json"} for format, path in all_formats.items()}
    counts = (("train", 5), ("val", 2))
    assert names["webdataset"] == {f"mini-{s}-{n:06d}.tar" for s, c in counts for n in range(c)}
    assert names["hdf5"] == {f"mini-{s}-{n:05d}.h5" for s, c in counts for n in range(c)}
    assert {"train/n01/n01_0.jpg", "train/n02/n02_1.png", "val/n03/n03_5.jpg"} < names["folder"]
    assert (all_formats["folder"] / "val" / "n04").is_dir()
    packed(source, tmp_path / "out", "hdf5", shard_samples=1 << 62)  # a single file has no number
    assert set(tree(tmp_path / "out")) == {"mini-train.h5", "mini-val.h5", "dataset.json"}


@pytest.mark.parametrize("format", FORMATS)
def test_the_manifest_tells_the_truth(all_formats: dict[str, Path], format: str) -> None:
    manifest = read_manifest(str(all_formats[format]))
    assert manifest is not None
    assert (manifest.format, manifest.classes) == (format, CLASSES)
    assert {name: split.samples for name, split in manifest.splits.items()} == COUNTS
    for split in manifest.splits.values():
        for shard in split.shards:
            content = (all_formats[format] / shard.name).read_bytes()
            assert shard.bytes == len(content)
            assert shard.sha256 == hashlib.sha256(content).hexdigest()
    assert manifest.about["odd"] == {
        "CMYK": {"count": 1, "files": ["n01/n01_0.JPEG"]},
        "PNG in disguise": {"count": 1, "files": ["n02/n02_1.JPEG"]},
        "not an image": {"count": 1, "files": ["n03/n03_2.JPEG"]},
    }


def test_files_of_a_folder_have_their_checksums(all_formats: dict[str, Path]) -> None:
    folder = all_formats["folder"]
    lists = [str(path) for path in sorted((folder / "checksums").iterdir())]
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", *lists],
        cwd=folder,
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0
    assert checked.stdout.count(": OK\n") == sum(COUNTS.values())


@pytest.mark.parametrize("format", FORMATS)
def test_the_bytes_do_not_depend_on_workers(
    source: Path, all_formats: dict[str, Path], tmp_path: Path, format: str
) -> None:
    packed(source, tmp_path / "one", format, workers=1)
    assert tree(tmp_path / "one") == tree(all_formats[format])


def test_odd_members_of_tars_are_named(all_formats: dict[str, Path], tmp_path: Path) -> None:
    manifest = packed(all_formats["webdataset"], tmp_path / "out", "webdataset")
    assert {kind: found["count"] for kind, found in manifest.about["odd"].items()} == {
        "CMYK": 1,
        "not an image": 1,
    }
    (name,) = manifest.about["odd"]["CMYK"]["files"]
    assert name.startswith("mini-train-00000") and name.endswith(".jpg")


def test_shards_by_bytes(source: Path) -> None:
    selection = selections(source)["train"]
    limit = 1500
    jobs = plan_jobs(
        {"train": selection}, PackOptions("webdataset", shard_samples=4, shard_bytes=limit)
    )["train"]
    sizes = [selection.index.size[job.ids] for job in jobs]
    assert np.concatenate([job.ids for job in jobs]).tolist() == selection.ids.tolist()
    assert all(len(part) <= 4 and (part.sum() <= limit or len(part) == 1) for part in sizes)
    for part, after in pairwise(sizes):  # none could have held one more
        assert len(part) == 4 or part.sum() + after[0] > limit
    alone = plan_jobs({"train": selection}, PackOptions("webdataset", shard_bytes=1))["train"]
    assert [len(job.ids) for job in alone] == [1] * COUNTS["train"]


def test_scaled_images(source: Path, tmp_path: Path) -> None:
    manifest = packed(source, tmp_path / "out", "webdataset", recode=ShortSide(6, 90))
    assert manifest.about["recode"] == {"ShortSide": {"pixels": 6, "quality": 90}}
    assert manifest.about["odd"]["cannot be decoded"]["files"] == ["n03/n03_2.JPEG"]
    found = stored(open_splits(tmp_path / "out")["train"])
    images = [content for _, content in found if content != b"no image"]
    assert len(images) == COUNTS["train"] - 1  # what cannot be decoded stays as it is
    assert {Image.open(io.BytesIO(content)).size for content in images} == {(8, 6)}
    assert {Image.open(io.BytesIO(content)).mode for content in images} == {"RGB"}


def test_a_subset_of_classes_is_numbered_anew(source: Path, tmp_path: Path) -> None:
    keep = np.array([0, 2])
    splits = {name: only_classes(s, keep) for name, s in selections(source).items()}
    pack(splits, ("n01", "n03"), tmp_path / "out", PackOptions("webdataset"), about={})
    for split, index in open_splits(tmp_path / "out").items():
        expected = [row for row in stored(open_splits(source)[split]) if row[0] in ("n01", "n03")]
        assert Counter(stored(index)) == Counter(expected)


def test_classes_without_names_become_folders_in_their_order(source: Path, tmp_path: Path) -> None:
    index = open_splits(source)["train"]
    labels = (index.label * 4 + 3).astype(np.int32)  # 3, 7, 11
    selection = Selection(index, np.arange(len(index)), labels)
    pack({"train": selection}, None, tmp_path / "out", PackOptions("folder"), about={})
    found = open_index(str(tmp_path / "out" / "train"))
    assert found.classes == tuple(f"{number:02d}" for number in range(12))
    assert Counter(found.label.tolist()) == Counter(labels.tolist())


def test_equal_base_names_in_a_class_give_way_to_numbers(tmp_path: Path) -> None:
    for number, place in enumerate(("a/x.jpg", "a/y.jpg", "b/x.jpg")):
        path = tmp_path / "data" / "n01" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(path)
    selection = shuffled(open_index(str(tmp_path / "data")), None)
    pack({"train": selection}, ("n01",), tmp_path / "out", PackOptions("folder"), about={})
    names = [path.name for path in sorted((tmp_path / "out/train/n01").iterdir())]
    assert names == ["00000000.jpg", "00000001.jpg", "00000002.jpg"]


# --- what is refused ---


def test_names_that_point_elsewhere_are_refused(source: Path, tmp_path: Path) -> None:
    """Names of classes and names of the data set."""
    for name in ("..", "a/b", "/etc", "", ".hidden", "a\0b"):
        classes = tuple(sorted((name, "n02", "n03", "n04")))
        with raises("pack.class-name-unusable"):
            pack(selections(source), classes, tmp_path / "out", PackOptions("folder"), about={})
    for name in ("../x", "a/b", "", ".x", "a b", "a{1..2}", "*"):
        with raises("pack.malformed-name"):
            packed(source, tmp_path / "out", "webdataset", name=name)
    assert not (tmp_path / "out").exists()


def test_another_destination_is_refused(source: Path, tmp_path: Path) -> None:
    """One that holds something, that cannot be made, or inside a class folder."""
    (tmp_path / "thesis.tex").write_text("five years")
    refused = {
        tmp_path: "pack.destination-not-empty",
        tmp_path / "thesis.tex": "file.unwritable",
        tmp_path / "thesis.tex/below": "file.unwritable",
        source / "train" / "packed": "pack.destination-inside-data",
    }
    for destination, code in refused.items():
        with raises(code, path=destination):
            packed(source, destination, "webdataset")
    assert set(tree(tmp_path)) == {"thesis.tex"}


def test_a_file_of_the_source_that_cannot_be_read_is_named(
    source: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """It was told as a destination that cannot be written."""
    destination = tmp_path / "out"
    for path, code in (source, "file.unreadable"), (destination, "file.unwritable"):
        error = PermissionError(errno.EACCES, "no", str(path / "train"))
        monkeypatch.setattr("trainyard.datasets.pack.pack.write_shards", failing(error))
        with raises(code):
            packed(source, destination, "webdataset")


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_labels_and_classes_that_do_not_fit_are_refused(source: Path, tmp_path: Path) -> None:
    wrong = {CLASSES[:2]: "pack.label-beyond-classes", CLASSES[::-1]: "pack.unsorted-classes"}
    for classes, code in wrong.items():
        with raises(code):
            pack(selections(source), classes, tmp_path / "out", PackOptions("hdf5"), about={})
    assert not (tmp_path / "out").exists()


def test_a_second_pack_into_one_destination_is_refused(source: Path, tmp_path: Path) -> None:
    with locked(tmp_path), raises("pack.in-use", path=tmp_path):
        packed(source, tmp_path, "webdataset")
    packed(source, tmp_path, "webdataset")


def test_other_settings_in_a_finished_destination_are_refused(
    source: Path, all_formats: dict[str, Path]
) -> None:
    before = tree(all_formats["webdataset"])
    with raises("pack.settings-differ", what="a data set"):
        packed(source, all_formats["webdataset"], "webdataset", shard_samples=6)
    with raises("pack.settings-differ", changes="shard_bytes None instead of 1500"):
        packed(source, all_formats["webdataset"], "webdataset", shard_bytes=1500)
    with raises("pack.settings-differ", changes="format 'webdataset' instead of 'hdf5'"):
        packed(source, all_formats["webdataset"], "hdf5")
    assert tree(all_formats["webdataset"]) == before


def test_too_little_space_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=20 * 1000 * 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    packed(source, tmp_path / "fits", "webdataset")
    usage = usage._replace(free=10 * 1000 * 1000)
    with raises("pack.disk-too-small", path=f"{tmp_path}/full", free="10.0 MB"):
        packed(source, tmp_path / "full", "webdataset")
    assert tree(tmp_path / "full") == {}


def test_a_file_that_a_full_disk_cuts_short_gets_no_name(tmp_path: Path) -> None:
    """The kernel writes what fits, and says so by a number alone."""
    with full_disk(500), pytest.raises(OSError, match="File too large"):
        files._write_file(tmp_path / "image", bytes(1000))
    assert list(tmp_path.iterdir()) == []
