"""ImageNet-21K-P: the processed tar is packed as it is."""

from pathlib import Path

import pytest

from tests.command_line import Capture, run, shown
from tests.data.tars import open_splits, stored
from tests.errors import check, refused
from tests.mini_imagenet import tar_of

CLASSES = ("n00007846", "n02084071")
TOP = "imagenet21k_resized/imagenet21k"
Content = dict[str, list[tuple[str, bytes]]]


def images(split: str) -> Content:
    """Bytes by class that no other image has."""
    return {
        wnid: [(f"{wnid}_{number}.JPEG", f"{split}{wnid}{number}".encode()) for number in range(5)]
        for wnid in CLASSES
    }


@pytest.fixture
def processed(tmp_path: Path) -> Path:
    path = tmp_path / "archive" / "imagenet21k_resized.tar"
    path.parent.mkdir()
    members = {f"{TOP}_small_classes/n01503061/a.JPEG": b"small"}
    for split in ("val", "train"):
        for wnid, rows in images(split).items():
            members |= {f"{TOP}_{split}/{wnid}/{name}": content for name, content in rows}
    path.write_bytes(tar_of(members))
    return path


def words(source: Path, destination: Path) -> tuple[object, ...]:
    return ("data", "prepare", "imagenet-21k-p", source, destination, "--workers", 1)


def test_the_processed_tar_is_packed_as_it_is(processed: Path, tmp_path: Path) -> None:
    for number, source in enumerate((processed, processed.parent)):
        out = tmp_path / f"out{number}"
        assert run(*words(source, out)) == 0
        for split, index in open_splits(out).items():
            wanted = images(split).items()
            expected = [(wnid, content) for wnid, rows in wanted for _, content in rows]
            assert sorted(stored(index)) == sorted(expected)


def test_counts_stand_beside_the_published_ones(
    processed: Path, tmp_path: Path, capsys: Capture
) -> None:
    printed = shown(capsys, *words(processed, tmp_path / "out"))
    rows = [line.split() for line in printed.splitlines()]
    assert ["here", "10", "10", "2"] in rows
    assert ["published,", "fall11", "11,797,632", "561,052", "11,221"] in rows
    assert ["published,", "winter21", "11,060,223", "522,500", "10,450"] in rows
    assert "not the published counts" in printed


def test_another_source(tmp_path: Path) -> None:
    packed, whole = tmp_path / "winter21_whole.tar.gz", tmp_path / "fall11_whole.tar"
    packed.write_bytes(b"")
    whole.write_bytes(tar_of({"n01503061.tar": tar_of({"a.JPEG": b"x"})}))
    sources = {packed: "tar.compressed", whole: "prepare.no-train-and-val"}
    for source, code in (sources | {tmp_path / "none": "prepare.not-one-tar"}).items():
        check(refused(*words(source, tmp_path / "out")), code, path=source)
