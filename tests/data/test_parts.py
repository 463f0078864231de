"""Indexing and preparing in parts give what one machine gives."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import Capture, complaint, run, shown
from tests.data.streams import Server
from tests.data.tars import Patch, write_tar
from tests.data.test_pack_restart import tree
from tests.images import jpeg
from tests.mini_imagenet import write_mini_imagenet
from trainyard.data._native import core
from trainyard.data.formats import webdataset
from trainyard.data.formats.scan import FileScan
from trainyard.data.storage.location import ResolvedLocation

SIZES = {"train": range(140, 167), "val": range(170, 180)}  # pixels; each image has its own
WITHOUT_INDEX = shutil.ignore_patterns(".trainyard-*")
PACKED = ("webdataset", "hdf5", "packed", "parquet", "folder")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of several tiles, in three classes. Not to be written to."""
    root = tmp_path_factory.mktemp("originals")
    for split, sizes in SIZES.items():
        for size in sizes:
            path = root / split / ("ant", "bee", "cat")[size % 3] / f"{size}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(size))
    return root


def as_packed(originals: Path, folder: Path, form: str) -> Path:
    words = ("--format", form, "--shard-samples", 4, "--workers", 1)
    assert run("data", "pack", originals, folder, *words) == 0
    return folder


def as_class_tars(originals: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("ant", "bee", "cat"):
        paths = sorted((originals / "train" / name).iterdir())
        write_tar(folder / f"{name}.tar", [(path.name, path.read_bytes()) for path in paths])
    return folder


def as_one_tar(originals: Path, folder: Path) -> Path:
    """Photographs in two splits."""
    folder.mkdir()
    paths = sorted(originals.rglob("*.jpg"))
    members = [(str(path.relative_to(originals)), path.read_bytes()) for path in paths]
    return write_tar(folder / "all.tar", members)


def as_list(originals: Path, folder: Path) -> Path:
    shutil.copytree(originals, folder, ignore=WITHOUT_INDEX)
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*.jpg"))]
    rows = [f"{path},{path.parent.name},{path.parts[0]}" for path in paths]
    (folder / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    return folder / "list.csv"


LAYOUTS: dict[str, Callable[[Path, Path], Path]] = {
    **{form: lambda o, f, form=form: as_packed(o, f, form) for form in PACKED},  # type: ignore[misc]
    "tars of classes": as_class_tars,
    "a tar of splits": as_one_tar,
    "a list": as_list,
}


def saved(folder: Path) -> dict[str, bytes]:
    """Indices, seek tables and journals."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob(".trainyard-*")}


def in_parts(count: int, *words: object) -> None:
    for number in range(1, count + 1):
        assert run(*words, "--part", f"{number}/{count}") == 0


def joined(capsys: Capture, *words: object) -> str:
    """What a command that joins parts prints; it reports on stderr whose results it takes."""
    capsys.readouterr()
    assert run(*words) == 0
    said = capsys.readouterr()
    assert {line.partition(" the results of ")[1] != "" for line in said.err.splitlines()} == {True}
    return said.out


@pytest.mark.skipif(core is None, reason="needs the extension in C")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_in_parts(layout: str, originals: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "data"
    words = ("data", "index", LAYOUTS[layout](originals, folder), "--seek")
    told = json.loads(shown(capsys, *words, "--json"))
    whole = saved(folder)
    assert len(whole) == 2 * len(told)
    rows = 64 + 8 * (len(SIZES["train"]) + 1)
    assert (told.get("train") or told["data"])["seek_bytes"] > rows or layout == "packed"
    for count in (1, 2, 3):
        for name in whole:
            (folder / name).unlink()
        in_parts(count, *words)
        assert len(saved(folder)) == count * len(told)
        assert json.loads(joined(capsys, *words, "--json")) == told
        assert saved(folder) == whole


def test_a_remote_index_in_parts(originals: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    with Server(tmp_path / "source") as server:
        as_packed(originals, tmp_path / "source", "webdataset")
        monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "whole"))
        assert run("data", "index", server.url) == 0
        monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "parts"))
        in_parts(3, "data", "index", server.url)
        assert run("data", "index", server.url) == 0
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


@pytest.fixture
def shards(originals: Path, tmp_path: Path) -> Path:
    """Seven shards to train on and three others."""
    return as_packed(originals, tmp_path / "shards", "webdataset")


def cut(journal: Path, lines: int) -> bytes:
    """Leaves the beginning of a journal, as a kill does; returns all of it."""
    content = journal.read_bytes()
    kept = content.splitlines(keepends=True)
    journal.write_bytes(b"".join(kept[:lines]) + kept[lines][:-5])
    return content


def test_a_part_of_an_index_resumes(shards: Path, monkeypatch: Patch) -> None:
    words = ("data", "index", shards / "imagenet-train-{000000..000006}.tar", "--part", "1/2")
    assert run(*words) == 0
    (journal,) = shards.glob(".trainyard-*-1-of-2.jsonl")
    whole = cut(journal, 3)
    plain, read = webdataset._read_shard, []

    def noted(place: ResolvedLocation, name: str) -> FileScan:
        read.append(name[-10:])
        return plain(place, name)

    monkeypatch.setattr(webdataset, "_read_shard", noted)
    assert run(*words) == 0
    assert (journal.read_bytes(), read) == (whole, ["000004.tar", "000006.tar"])
    assert run(*words) == 0
    assert (journal.read_bytes(), len(read)) == (whole, 2)


# --- parts that are absent, running, or of other work ---


def test_parts_that_are_absent(shards: Path, capsys: Capture) -> None:
    for number in (1, 3):
        assert run("data", "index", shards, "--part", f"{number}/4") == 0
    said = complaint(capsys, "data", "index", shards)
    assert f"{shards}: not finished: 2/4, 4/4: give the same command with --part" in said
    assert f"or remove {shards}/.trainyard-index-" in said


def changed(shards: Path) -> None:
    path = shards / "imagenet-train-000001.tar"
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("words", "change", "reason"),
    [
        (("--seek",), None, "holds part 1/2 of an index made with seek False instead of True"),
        (("--part", "2/3"), None, "holds an index in 2 and in 3 parts: keep to one number"),
        (("--part", "2/2"), changed, "holds parts of an index made with a source that has changed"),
    ],
)
def test_parts_that_do_not_belong_together(
    words: tuple[str, ...],
    change: Callable[[Path], None] | None,
    reason: str,
    shards: Path,
    capsys: Capture,
) -> None:
    assert run("data", "index", shards, "--part", "1/2") == 0
    before = saved(shards)
    if change is not None:
        change(shards)
    assert reason in complaint(capsys, "data", "index", shards, *words)
    assert saved(shards) == before


# --- preparations ---


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet-1K in miniature. Not to be written to."""
    return write_mini_imagenet(tmp_path_factory.mktemp("archives")).folder


@pytest.mark.parametrize("form", ["webdataset", "folder"])
def test_imagenet_in_parts(form: str, archives: Path, tmp_path: Path, capsys: Capture) -> None:
    def words(folder: str, *more: object) -> tuple[object, ...]:
        options = ("--no-checksum", "--format", form, "--workers", 1, "--repair")
        return ("data", "prepare", "imagenet-1k", archives, tmp_path / folder, *options, *more)

    told = shown(capsys, *words("whole"))
    for number in (3, 1):
        assert run(*words("parts", "--part", f"{number}/3")) == 0
    said = complaint(capsys, *words("parts"))
    assert "not finished: 2/3: give the same command with --part" in said
    last = json.loads(shown(capsys, *words("parts", "--json", "--part", "2/3")))
    assert (last["part"], last["samples"] > 0) == ("2/3", True)
    assert shown(capsys, *words("parts")) == told
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


def test_only_the_first_part_reads_all_archives(
    archives: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ("data", "prepare", "imagenet-1k", archives, tmp_path / "out", "--part")
    assert "its MD5 is" in complaint(capsys, *words, "1/2")
    assert "instead of 1,281,167" in complaint(capsys, *words, "2/2")


@pytest.mark.parametrize("option", [("--part", "1/2"), ("--ray",)])
@pytest.mark.parametrize(
    "words", [("digits", "out"), ("cifar10", ".", "out"), ("mnist", ".", "out")]
)
def test_small_data_sets_have_no_parts(
    words: tuple[str, ...], option: tuple[str, ...], capsys: Capture
) -> None:
    said = complaint(capsys, "data", "prepare", *words, *option)
    assert f"{option[0]}: this data set is small: run it on one machine" in said
