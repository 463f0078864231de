"""ImageNet-1K from its archives, in miniature: labels as torchvision's, bytes as they were."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets import imagenet as torchvision_imagenet

from tests.command_line import Capture, run, shown
from tests.cuts import Killed
from tests.data.looks import silent
from tests.data.tars import Patch, open_splits, stored
from tests.errors import check, raises, refused
from tests.mini_imagenet import (
    CMYK,
    PNG_IN_DISGUISE,
    WNIDS,
    MiniImageNet,
    tar_of,
    write_devkit,
    write_mini_imagenet,
)
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.real_labels import read_labels
from trainyard.data.index.splits import find_splits
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.manifest import read_manifest
from trainyard.datasets.prepare import imagenet, preparation
from trainyard.datasets.prepare.imagenet import prepare_imagenet_1k, read_devkit
from trainyard.datasets.prepare.preparation import Preparation

FORMATS = ("webdataset", "folder", "hdf5")
TRAIN, VAL, DEVKIT = (name for name, _ in imagenet.ARCHIVES.values())


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> MiniImageNet:
    """Not to be written to."""
    return write_mini_imagenet(tmp_path_factory.mktemp("archives"))


@pytest.fixture
def source(mini: MiniImageNet, tmp_path: Path) -> Path:
    """A copy of the archives to be written to."""
    return Path(shutil.copytree(mini.folder, tmp_path / "source"))


def words(source: Path, destination: Path, *options: object) -> tuple[object, ...]:
    return ("data", "prepare", "imagenet-1k", source, destination, *options)


def content(folder: Path) -> dict[str, tuple[tuple[str, ...], list[tuple[int, bytes]]]]:
    """Class names and sorted (label, image) of each split of a data set."""
    return {
        split: (index.classes, sorted((index.classes.index(name), i) for name, i in stored(index)))
        for split, index in open_splits(folder).items()
    }


def files_in(folder: Path) -> dict[str, bytes]:
    """All but hidden files."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def prepare(source: Path, destination: Path, *options: object) -> int:
    return run(*words(source, destination, "--no-checksum", "--processes", 1, *options))


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")  # of torchvision
def test_labels_are_those_of_torchvision(
    mini: MiniImageNet, tmp_path: Path, monkeypatch: Patch
) -> None:
    root = Path(shutil.copytree(mini.folder, tmp_path / "torchvision"))
    monkeypatch.setattr(torchvision_imagenet, "_verify_archive", lambda *_: None)
    torchvision_imagenet.parse_devkit_archive(root)
    torchvision_imagenet.parse_train_archive(root)
    torchvision_imagenet.parse_val_archive(root)
    assert prepare(mini.folder, tmp_path / "shards") == 0
    for split, (classes, pairs) in content(tmp_path / "shards").items():
        theirs = ImageFolder(str(root / split))
        assert list(classes) == theirs.classes
        assert pairs == sorted((label, Path(path).read_bytes()) for path, label in theirs.samples)
        assert pairs == mini.pairs(split)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_has_the_same_classes_and_bytes(
    kind: str, mini: MiniImageNet, tmp_path: Path
) -> None:
    assert prepare(mini.folder, tmp_path / "out", "--format", kind) == 0
    found = content(tmp_path / "out")
    assert found == {split: (WNIDS, mini.pairs(split)) for split in ("train", "val")}
    assert not (tmp_path / "out" / ".prepare").exists()


def test_a_folder_keeps_the_names_and_their_order(mini: MiniImageNet, tmp_path: Path) -> None:
    """So that a class's files come in ImageFolder's order of the unpacked archives."""
    assert prepare(mini.folder, tmp_path / "out", "--format", "folder") == 0
    for split, images in (("train", mini.train), ("val", mini.val)):
        for wnid, by_name in images.items():
            files = sorted((tmp_path / "out" / split / wnid).iterdir())
            assert {file.stem for file in files} == {Path(name).stem for name in by_name}
            assert [file.read_bytes() for file in files] == [by_name[n] for n in sorted(by_name)]


def test_the_seed_decides_the_order_of_the_training_images(
    mini: MiniImageNet, tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert prepare(mini.folder, tmp_path / name, "--seed", seed) == 0
    a, b, c = (files_in(tmp_path / name) for name in "abc")
    assert a == b
    train, val = "imagenet-train-000000.tar", "imagenet-val-000000.tar"
    assert sorted(a) == ["dataset.json", train, val]
    assert a[train] != c[train]
    assert a[val] == c[val]
    labels = open_index(str(tmp_path / "a" / train)).label.tolist()
    assert labels != sorted(labels)


def test_odd_files_are_named_and_kept(mini: MiniImageNet, tmp_path: Path, capsys: Capture) -> None:
    said = shown(capsys, *words(mini.folder, tmp_path / "out", "--no-checksum"))
    assert f"1 PNG in disguise: {TRAIN}: {PNG_IN_DISGUISE}\n" in said
    assert f"1 CMYK: {TRAIN}: {CMYK}\n" in said
    assert "--repair" in said
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None
    assert manifest.about["odd"]["CMYK"] == {"count": 1, "files": [f"{TRAIN}: {CMYK}"]}
    assert content(tmp_path / "out")["train"][1] == mini.pairs("train")


def test_repair_changes_the_odd_files_alone(
    mini: MiniImageNet, tmp_path: Path, capsys: Capture
) -> None:
    command = words(mini.folder, tmp_path / "out", "--no-checksum", "--repair", "--json")
    said = json.loads(shown(capsys, *command))
    assert said["about"]["odd"].keys() == {"CMYK", "PNG in disguise"}
    before, after = mini.pairs("train"), content(tmp_path / "out")["train"][1]
    assert len(after) == len(before)
    new = [image for pair in after for image in pair[1:] if pair not in before]
    assert len(new) == 2
    for image in new:
        with Image.open(io.BytesIO(image)) as file:
            assert (file.format, file.mode) == ("JPEG", "RGB")
    assert sum(pair in after for pair in before) == len(before) - 2


# --- killed and started again ---


def prepare_until(source: Path, destination: Path, kind: str, stage: str, count: int) -> None:
    """Prepare with many small shards; ends once a stage has come so far."""

    @contextmanager
    def counter(what: str, total: int | None) -> Iterator[Callable[..., None]]:
        def progress(done: int, *_: object) -> None:
            if what.startswith(stage) and done >= count:
                raise Killed

        yield progress

    preparation = Preparation(
        destination, counter, format=kind, checksum=False, workers=2, shard_samples=4
    )
    imagenet.prepare_imagenet_1k(source, preparation, repair=False)


def test_killed_while_packing_it_goes_on_to_the_same_bytes(
    mini: MiniImageNet, tmp_path: Path
) -> None:
    prepare_until(mini.folder, tmp_path / "whole", "webdataset", "none", 0)
    folder, undisturbed = tmp_path / "killed", files_in(tmp_path / "whole")
    for stage, count in (("reading the headers of ILSVRC2012", 1), ("packing", 6), ("packing", 30)):
        with pytest.raises(Killed):
            prepare_until(mini.folder, folder, "webdataset", stage, count)
        assert not (folder / "dataset.json").exists()
    assert 1 < len(files_in(folder)) < len(undisturbed)
    command = words(mini.folder, folder, "--no-checksum", "--seed", 7)
    check(refused(*command), "pack.settings-differ")
    prepare_until(mini.folder, folder, "webdataset", "none", 0)
    assert files_in(folder) == undisturbed
    assert not [path for path in folder.rglob(".*") if path.suffix in (".part", ".jsonl")]


# --- checksums and counts ---


def test_the_checksums_are_those_of_torchvision() -> None:
    assert imagenet.ARCHIVES == torchvision_imagenet.ARCHIVE_META


def test_a_wrong_checksum_names_archive_and_sums(mini: MiniImageNet, tmp_path: Path) -> None:
    check(
        refused(*words(mini.folder, tmp_path / "out")),
        "prepare.wrong-md5",
        path=mini.folder / TRAIN,
        md5=hashlib.md5((mini.folder / TRAIN).read_bytes()).hexdigest(),
        expected="1d675b47d978889d74fa0da5fadfb00e",
    )
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.fixture
def official(mini: MiniImageNet, monkeypatch: Patch) -> None:
    """Makes the miniature's checksums the official ones."""
    sums = {
        part: (name, hashlib.md5((mini.folder / name).read_bytes()).hexdigest())
        for part, (name, _) in imagenet.ARCHIVES.items()
    }
    monkeypatch.setattr(imagenet, "ARCHIVES", sums)


@pytest.mark.usefixtures("official")
def test_fewer_images_than_published_are_an_error(mini: MiniImageNet, tmp_path: Path) -> None:
    check(
        refused(*words(mini.folder, tmp_path / "out")),
        "prepare.wrong-imagenet-count",
        what="training images",
    )


def test_an_interrupted_check_ends_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
    expected = {path: hashlib.md5(path.read_bytes()).hexdigest() for path in paths}
    read: list[int] = []

    def interrupt(count: int) -> None:
        read.append(count)
        time.sleep(0.001)
        if count == 300:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: the main thread takes it

    with pytest.raises(KeyboardInterrupt):
        preparation.check_md5(expected, interrupt, chunk_bytes=10)
    assert read[-1] < 2500
    preparation.check_md5(expected)
    paths[0].write_bytes(b"another")
    with raises("prepare.wrong-md5", path=f"{tmp_path}/a"):
        preparation.check_md5(expected)


# --- what else may be wrong with the source ---


@pytest.mark.parametrize("name", [TRAIN, VAL, DEVKIT])
def test_a_missing_archive_is_named(name: str, source: Path, tmp_path: Path) -> None:
    (source / name).unlink()
    check(refused(*words(source, tmp_path / "out")), "prepare.missing-file", name=name)
    assert not (tmp_path / "out").exists()


def test_a_subset_of_the_classes_leaves_out_their_validation_images(
    mini: MiniImageNet, source: Path, tmp_path: Path, capsys: Capture
) -> None:
    some = {wnid: mini.train[wnid] for wnid in WNIDS[1:4]}
    inner = {f"{wnid}.tar": tar_of(images) for wnid, images in some.items()}
    (source / TRAIN).write_bytes(tar_of(inner))
    capsys.readouterr()
    assert prepare(source, tmp_path / "out") == 0
    assert "8 validation images are left out" in capsys.readouterr().out
    found = content(tmp_path / "out")
    wanted = [image for wnid in WNIDS[1:4] for image in mini.val[wnid].values()]
    assert found["train"][0] == found["val"][0] == WNIDS[1:4]
    assert sorted(image for _, image in found["val"][1]) == sorted(wanted)


VAL_IMAGE = "ILSVRC2012_val_00000001.JPEG"


@pytest.mark.parametrize(
    ("archive", "members", "code", "fields"),
    [
        (
            TRAIN,
            {"n99999999.tar": tar_of({"a.JPEG": b"x"})},
            *("prepare.class-not-in-devkit", {"name": "n99999999"}),
        ),
        (
            TRAIN,
            {f"{WNIDS[0]}.tar": tar_of({"a.JPEG": b"x", "notes.txt": b"y"})},
            *("prepare.not-an-image", {"name": f"{WNIDS[0]}.tar: notes.txt"}),
        ),
        *(
            (VAL, {name: b"x"}, "prepare.image-not-in-devkit", {"name": name, "num_images": 20})
            for name in ("ILSVRC2012_val_00000021.JPEG", "cat.JPEG")
        ),
        (
            VAL,
            {VAL_IMAGE: b"x", f"a/{VAL_IMAGE}": b"y"},
            *("prepare.member-twice", {"name": f"a/{VAL_IMAGE}"}),
        ),
    ],
)
def test_members_that_do_not_belong(
    archive: str,
    members: dict[str, bytes],
    code: str,
    fields: dict[str, object],
    source: Path,
    tmp_path: Path,
) -> None:
    """None is left out in silence."""
    (source / archive).write_bytes(tar_of(members))
    error = refused(*words(source, tmp_path / "out", "--no-checksum", "--processes", 1))
    check(error, code, **fields)


def test_a_destination_in_use_is_refused_at_once(mini: MiniImageNet, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    check(refused(*words(mini.folder, tmp_path)), "pack.destination-not-empty", path=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


# --- the devkit ---


def packed(contents: dict[str, bytes]) -> bytes:
    return gzip.compress(tar_of(contents), mtime=0)


def broken_devkits(whole: dict[str, bytes]) -> list[tuple[str, bytes]]:
    """Codes of errors, and damaged contents of a devkit that make them."""
    meta, truth = sorted(name for name in whole if "/data/" in name)[::-1]
    assert meta.endswith("meta.mat")
    cut = packed(whole)
    return [
        ("prepare.archive-unreadable", b"not gzip"),
        ("prepare.archive-unreadable", cut[: len(cut) // 2]),
        ("prepare.missing-member", packed({truth: whole[truth]})),
        ("prepare.missing-member", packed({meta: whole[meta]})),
        ("prepare.not-the-devkit", packed(whole | {meta: b"MATLAB 5.0" + bytes(500)})),
        ("prepare.not-the-devkit", packed(whole | {truth: b"1\n2\nthree\n"})),
        ("prepare.undefined-class", packed(whole | {truth: b"1\n7\n"})),  # an inner node
        ("prepare.archive-too-large", gzip.compress(bytes(70 << 20), 1)),
    ]


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar}


def test_a_broken_devkit_is_named(mini: MiniImageNet, tmp_path: Path) -> None:
    path = tmp_path / DEVKIT
    for code, damaged in broken_devkits(unpacked(mini.folder / DEVKIT)):
        path.write_bytes(damaged)
        with raises(code, path=path):
            read_devkit(path)


def test_a_hostile_devkit_leaves_nothing_on_the_disk(mini: MiniImageNet, tmp_path: Path) -> None:
    file = io.BytesIO()
    whole = unpacked(mini.folder / DEVKIT)
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in ({"../evil": b"x"} | whole).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name in ("../../outside", "/absolute/data/meta.mat"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    folder = tmp_path / "kit"
    folder.mkdir()
    (folder / DEVKIT).write_bytes(gzip.compress(file.getvalue()))
    assert read_devkit(folder / DEVKIT) == read_devkit(mini.folder / DEVKIT)
    assert [path.name for path in tmp_path.rglob("*")] == ["kit", DEVKIT]


def test_a_wordnet_id_is_no_path(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("tests.mini_imagenet.LEAVES", {"../../evil": "a path"})
    write_devkit(tmp_path / DEVKIT, [1])
    with raises("prepare.not-a-wordnet-id", path=f"{tmp_path}/ILSVRC2012_devkit_t12.tar.gz"):
        read_devkit(tmp_path / DEVKIT)


def test_without_scipy_the_extra_is_named(mini: MiniImageNet, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with raises("data.needs-package", package="scipy"):
        read_devkit(mini.folder / DEVKIT)


# --- ImageNet-21K-P: the processed tar is packed as it is ---

CLASSES_21K = ("n00007846", "n02084071")
TOP = "imagenet21k_resized/imagenet21k"
Content = dict[str, list[tuple[str, bytes]]]


def images(split: str) -> Content:
    """Bytes by class that no other image has."""
    return {
        wnid: [(f"{wnid}_{number}.JPEG", f"{split}{wnid}{number}".encode()) for number in range(5)]
        for wnid in CLASSES_21K
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


def words_21k(source: Path, destination: Path) -> tuple[object, ...]:
    return ("data", "prepare", "imagenet-21k-p", source, destination, "--processes", 1)


def test_the_processed_tar_is_packed_as_it_is(processed: Path, tmp_path: Path) -> None:
    for number, source in enumerate((processed, processed.parent)):
        out = tmp_path / f"out{number}"
        assert run(*words_21k(source, out)) == 0
        for split, index in open_splits(out).items():
            wanted = images(split).items()
            expected = [(wnid, content) for wnid, rows in wanted for _, content in rows]
            assert sorted(stored(index)) == sorted(expected)


def test_counts_stand_beside_the_published_ones(
    processed: Path, tmp_path: Path, capsys: Capture
) -> None:
    printed = shown(capsys, *words_21k(processed, tmp_path / "out"))
    rows = [line.split() for line in printed.splitlines()]
    assert ["here", "10", "10", "2"] in rows
    assert ["published,", "fall11", "11,797,632", "561,052", "11,221"] in rows
    assert ["published,", "winter21", "11,060,223", "522,500", "10,450"] in rows
    assert "not the published counts" in printed


def test_another_source_of_imagenet_21k(tmp_path: Path) -> None:
    packed, whole = tmp_path / "winter21_whole.tar.gz", tmp_path / "fall11_whole.tar"
    packed.write_bytes(b"")
    whole.write_bytes(tar_of({"n01503061.tar": tar_of({"a.JPEG": b"x"})}))
    sources = {packed: "tar.compressed", whole: "prepare.no-train-and-val"}
    for source, code in (sources | {tmp_path / "none": "prepare.not-one-tar"}).items():
        check(refused(*words_21k(source, tmp_path / "out")), code, path=source)


# --- labels made anew belong to images by the numbers in their names, in every format ---

NUM_VAL, NUM_CLASSES = 20, 5


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Labels that spell each image's number to the base of five; the tenth has none."""
    return write(tmp_path, [of(number) for number in range(1, NUM_VAL + 1)])


def write(folder: Path, tree: Any) -> Path:
    path = folder / "real.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def of(number: int) -> list[int]:
    return [] if number == 10 else [number // 5, number % 5]


def prepared(mini: MiniImageNet, folder: Path, kind: str, samples: int | None = None) -> str:
    """The location of the validation data, in shards of so many samples."""
    preparation = Preparation(folder, silent, format=kind, checksum=False, shard_samples=samples)
    prepare_imagenet_1k(mini.folder, preparation, repair=False)
    return find_splits(str(folder))["val"]


@pytest.fixture(scope="module")
def shards(mini: MiniImageNet, tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(mini, tmp_path_factory.mktemp("shards") / "data", "webdataset")


@pytest.mark.parametrize(("kind", "samples"), [("webdataset", 3), ("hdf5", None), ("folder", None)])
def test_each_image_gets_its_own_labels(
    kind: str, samples: int | None, mini: MiniImageNet, real: Path, tmp_path: Path
) -> None:
    index = open_index(prepared(mini, tmp_path / "data", kind, samples))
    number_of = {
        image: int(re.sub(r"\D", "", name.removeprefix("ILSVRC2012")))
        for images in mini.val.values()
        for name, image in images.items()
    }
    labels, reader = read_labels(real, index), Reader(index)
    assert len(labels) == NUM_VAL
    for sample in range(NUM_VAL):
        assert labels[sample] == of(number_of[reader.read(sample)])


def test_a_folder_may_have_some_of_the_images(
    mini: MiniImageNet, real: Path, tmp_path: Path
) -> None:
    val = Path(prepared(mini, tmp_path / "data", "folder"))
    for path in val.glob("*/ILSVRC2012_val_0000000*"):
        path.unlink()
    index = open_index(str(val))
    assert sorted(read_labels(real, index)) == sorted(of(n) for n in range(10, NUM_VAL + 1))


def test_images_whose_numbers_are_not_known(
    mini: MiniImageNet, shards: str, real: Path, tmp_path: Path
) -> None:
    named = prepared(mini, tmp_path / "files", "folder")
    packed = tmp_path / "packed"  # in an order of its own
    assert run("data", "pack", shards, packed, "--format", "webdataset") == 0
    renamed = Path(shutil.copytree(named, tmp_path / "renamed"))
    first = next(renamed.glob("*/*_*"))
    first.rename(first.with_name("cat.jpg"))
    train = find_splits(str(Path(shards).parent))["train"]
    indices = [open_index(str(where)) for where in (*packed.glob("*.tar"), renamed, train)]
    for index in (*indices, open_merged([named, str(renamed)], None)):
        with raises("labels.unknown-image-numbers", path=real):
            read_labels(real, index)


@pytest.mark.parametrize(
    ("tree", "code", "fields"),
    [
        ("[", "file.unreadable", {}),
        ({"1": [2]}, "labels.not-a-list", {}),
        ([[1]] * 19, "labels.too-few", {"num_labels": 19, "number": 20}),
        ([[1]] * 19 + [5], "labels.not-class-numbers", {"value": "5", "number": 20}),
        ([[1], [5]], "labels.not-class-numbers", {"number": 2}),
        ([[-1]], "labels.not-class-numbers", {"number": 1}),
        ([[True]], "labels.not-class-numbers", {"number": 1}),
        ([["n02119789"]], "labels.not-class-numbers", {"number": 1}),
    ],
)
def test_files_of_other_labels(
    tree: Any, code: str, fields: dict[str, object], shards: str, tmp_path: Path
) -> None:
    index = open_index(shards)
    path = write(tmp_path, tree)
    with raises(code, **fields):
        read_labels(path, index)
