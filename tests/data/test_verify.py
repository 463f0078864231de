"""Every kind of damage, made for real, is found and named; a whole data set passes."""

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.looks import silent
from tests.data.tars import open_splits, write_files, write_tar
from tests.errors import check, raises, refused
from tests.images import encode
from trainyard.data.decode.crops import CentralCrop
from trainyard.data.formats.left_out import DOTTED
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.sampler.plan import OnePassPlan
from trainyard.data.storage.manifest import read_manifest, write_manifest
from trainyard.datasets.pack.pack import pack
from trainyard.datasets.pack.shards import PackOptions, Selection, shuffled
from trainyard.datasets.verify.checks import MAX_LISTED, Check, Finding, checked
from trainyard.datasets.verify.images import same_bytes
from trainyard.datasets.verify.verify import verify

SIDE = 32  # pixels
FORMATS = ("folder", "webdataset", "packed", "hdf5")


def square(number: int) -> Image.Image:
    """A piece of a photograph, another for each number."""
    picture = load_sample_images().images[number % 2]
    left, top = 37 * number % 600, 29 * number % 380
    return Image.fromarray(picture[top : top + SIDE, left : left + SIDE])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 images to train on and 4 others, in two classes. Not to be written to."""
    root = tmp_path_factory.mktemp("originals")
    for number in range(20):
        split = "val" if number >= 16 else "train"
        folder = root / split / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        square(number).save(folder / f"{number:02d}.jpg", quality=90)
    return root


@pytest.fixture
def photos(originals: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    without_index = shutil.ignore_patterns(".trainyard-*")
    return Path(shutil.copytree(originals, tmp_path / "photos", ignore=without_index))


def packed(originals: Path, destination: Path, form: str) -> Path:
    """The images in two shards to train on and one other, with a manifest."""
    splits = {name: shuffled(open_index(str(originals / name)), 1) for name in ("train", "val")}
    options = PackOptions(
        format=form, name="pets", shard_samples=8, shard_bytes=None, recode=None, workers=1
    )
    pack(splits, ("cat", "dog"), destination, options, about={})
    return destination


def look(location: Path | str, *, deep: bool = False) -> dict[tuple[str, str], Check]:
    checks = verify(str(location), deep=deep, workers=2, counters=silent)
    found = {(check.data, check.name): check for check in checks}
    assert len(found) == len(checks)
    return found


def wrong(found: dict[tuple[str, str], Check]) -> list[tuple[str, str, str]]:
    """What is not ok: split, check, result."""
    return [(*key, check.result) for key, check in found.items() if check.result != "ok"]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


# --- what is whole ---


@pytest.mark.parametrize("form", FORMATS)
def test_a_whole_data_set_passes(originals: Path, tmp_path: Path, form: str) -> None:
    folder = packed(originals, tmp_path / form, form)
    open_splits(folder)
    found = look(folder, deep=True)
    assert wrong(found) == []
    names = {name for _, name in found}
    assert {"structure", "sizes", "labels", "balance"} < names
    assert ({"checksums", "files"} < names) == (form != "folder")
    assert {"images", "oddities", "duplicates", "leakage", "classes"} < names
    assert ("records" in names) == (form == "packed")
    assert found["train", "images"].about == "16 of 16 decode"
    assert found["train", "oddities"].about == "16 JPEG RGB"
    assert all(check.count == 0 for check in found.values())
    # Without `deep` no image is decoded.
    assert not {"images", "duplicates", "leakage"} & {name for _, name in look(folder)}


def test_parts_of_a_data_set(originals: Path, tmp_path: Path) -> None:
    """Of a glob or a single shard, those named are looked at, with the checksums beside them."""
    folder = packed(originals, tmp_path / "shards", "webdataset")
    for location in (f"{folder}/pets-train-*.tar", folder / "pets-train-000001.tar"):
        found = look(location)
        assert wrong(found) == []
        assert ("data", "checksums") in found
    flip(folder / "pets-train-000001.tar", 1000)
    assert look(folder / "pets-train-000000.tar")["data", "checksums"].result == "ok"
    assert look(f"{folder}/pets-train-*.tar")["data", "checksums"].count == 1


# --- shards ---


@pytest.mark.parametrize("form", ["webdataset", "packed"])
def test_an_altered_shard(originals: Path, tmp_path: Path, form: str) -> None:
    folder = packed(originals, tmp_path / "shards", form)
    [shard] = folder.rglob("*train*00001*[rd]")
    index = open_index(str(shard))
    flip(shard, int(index.offset[0] + index.size[0] // 2))  # within an image
    found = look(folder)
    [finding] = found["train", "checksums"].found
    assert (finding.code, finding.file) == ("verify.wrong-sha256", str(shard))
    wrong_ones = [("train", "checksums", "problem"), ("train", "records", "problem")]
    assert wrong(found) == wrong_ones[: 2 if form == "packed" else 1]
    (folder / "dataset.json").unlink()
    assert wrong(look(folder)) == wrong_ones[1 : 2 if form == "packed" else 1]
    if form == "packed":
        [finding] = found["train", "records"].found
        assert str(shard) in str(finding)


@pytest.mark.parametrize("form", ["webdataset", "hdf5"])
def test_a_truncated_shard(originals: Path, tmp_path: Path, form: str) -> None:
    folder = packed(originals, tmp_path / form, form)
    shard = min(path for path in folder.rglob("*train*0000*") if path.is_file())
    os.truncate(shard, shard.stat().st_size // 2)
    found = look(folder, deep=True)
    assert ("train", "structure", "problem") in wrong(found)
    [finding] = found["train", "structure"].found
    assert str(shard) in str(finding)
    [finding] = found["train", "checksums"].found
    assert (finding.code, finding.file) == ("verify.wrong-size", str(shard))
    # The other shard is looked at all the same.
    assert found["train", "images"].about == "8 of 8 decode"


def test_a_shard_that_is_no_archive_any_more(originals: Path, tmp_path: Path) -> None:
    """Without a manifest, by its structure alone; of several all are named."""
    folder = packed(originals, tmp_path / "shards", "webdataset")
    (folder / "dataset.json").unlink()
    broken = [folder / f"pets-train-00000{number}.tar" for number in (0, 1)]
    for shard in broken:
        flip(shard, 3)
    found = look(folder)
    assert wrong(found) == [("train", "structure", "problem")]
    for finding, shard in zip(found["train", "structure"].found, broken, strict=True):
        assert str(shard) in str(finding)
    assert ("train", "sizes") not in found
    assert found["val", "sizes"].result == "ok"


def test_samples_with_a_dot_in_their_names(tmp_path: Path) -> None:
    image = encode(square(1))
    members = [
        (f"{key}.{kind}", image if kind == "jpg" else b"%d" % number)
        for number, key in enumerate(("a", "c", "b.0", "b.1"))
        for kind in ("cls", "jpg")
    ]
    write_tar(tmp_path / "0.tar", members)
    found = look(tmp_path)
    assert wrong(found) == [("data", "left out", "note")]
    assert [str(one) for one in found["data", "left out"].found] == [f"2 {DOTTED}, such as b.0"]
    assert found["data", "left out"].count == 2


def test_missing_files(originals: Path, tmp_path: Path) -> None:
    folder = packed(originals, tmp_path / "shards", "webdataset")
    gone = folder / "pets-train-000000.tar"
    gone.unlink()
    found = look(folder)
    assert wrong(found) == [("train", "files", "problem")]
    [finding] = found["train", "files"].found
    assert (finding.code, finding.file) == ("verify.missing", str(gone))
    (folder / "pets-train-000001.tar").unlink()
    with raises("verify.no-listed-file", path=gone):
        look(folder)


def test_labels_beyond_the_class_list(originals: Path, tmp_path: Path) -> None:
    folder = packed(originals, tmp_path / "shards", "webdataset")
    manifest = read_manifest(str(folder))
    assert manifest is not None
    write_manifest(folder, dataclasses.replace(manifest, classes=("cat",)))
    found = look(folder)
    assert [key for key in wrong(found) if key[0] == "train"] == [("train", "structure", "problem")]
    [finding] = found["train", "structure"].found
    assert finding.code == "manifest.label-beyond-classes"


# --- folders of images ---


def test_the_endings_that_are_read_are_listed(photos: Path) -> None:
    """A GIF among the JPEGs was neither read nor named."""
    square(7).save(photos / "train" / "cat" / "x.gif")
    assert look(photos)["train", "structure"].about.endswith(" .jpg, 1 .gif")


def test_broken_links(photos: Path) -> None:
    """Training leaves them out."""
    link = photos / "train" / "cat" / "gone.jpg"
    link.symlink_to("absent.jpg")
    open_splits(str(photos))
    found = look(photos)
    assert wrong(found) == [("train", "left out", "note")]
    assert [str(one) for one in found["train", "left out"].found] == [
        "1 broken link, such as cat/gone.jpg"
    ]
    assert ("val", "left out") not in found


# --- classes ---


def test_classes_that_differ(photos: Path) -> None:
    (photos / "val" / "dog").rename(photos / "val" / "eagle")
    found = look(photos)
    assert wrong(found) == [("train, val", "classes", "problem")]
    [finding] = found["train, val", "classes"].found
    assert finding.code == "data.unknown-classes"


def test_names_beside_bare_numbers(originals: Path, photos: Path, tmp_path: Path) -> None:
    """Training refuses them: nothing says whether class 0 is the cat."""
    shards = packed(originals, tmp_path / "shards", "webdataset")
    shutil.rmtree(photos / "val")
    (photos / "val").mkdir()
    shutil.copy(shards / "pets-val-000000.tar", photos / "val")
    found = look(photos)
    assert wrong(found) == [("train, val", "classes", "problem")]


def test_fewer_classes_in_val(originals: Path, tmp_path: Path) -> None:
    splits = {}
    for name in ("train", "val"):
        index = open_index(str(originals / name))
        ids = np.flatnonzero(index.label <= (name == "train"))
        splits[name] = Selection(index, ids, index.label[ids])
    options = PackOptions("webdataset", "pets", 100, None, None, 1)
    pack(splits, None, tmp_path / "shards", options, about={})
    found = look(tmp_path / "shards")
    assert wrong(found) == [("train, val", "classes", "note")]
    [finding] = found["train, val", "classes"].found
    assert (finding.code, "'1'" in finding.what) == ("verify.classes", True)


def test_balance(photos: Path) -> None:
    (photos / "train" / "empty").mkdir()
    (photos / "val" / "empty").mkdir()
    square(99).save(photos / "val" / "empty" / "1.jpg")
    for number in range(30):
        square(100 + number).save(photos / "train" / "cat" / f"more-{number}.jpg")
    for path in list((photos / "train" / "dog").iterdir())[3:]:
        path.unlink()
    check = look(photos)["train", "balance"]
    assert check.about == "0 to 38 images a class, median 3"
    assert check.result == "note"
    assert len(check.found) == 2


# --- images ---


@pytest.fixture
def damaged(photos: Path) -> Path:
    """With images that are bad, and others that are odd."""
    cat = photos / "train" / "cat"
    whole = (cat / "02.jpg").read_bytes()
    (cat / "truncated.jpg").write_bytes(whole[: len(whole) - 100])
    (cat / "header.jpg").write_bytes(whole[:20])
    (cat / "empty.jpg").write_bytes(b"")
    (cat / "text.jpg").write_text("404 not found\n")
    square(60).convert("CMYK").save(cat / "cmyk.jpg")
    square(61).save(cat / "disguised.JPEG", "PNG")
    Image.fromarray(np.arange(0, 63000, 70, dtype=np.uint16).reshape(30, 30)).save(cat / "deep.png")
    square(62).resize((40, 3)).save(cat / "tiny.png")
    Image.new("L", (8000, 6300)).save(cat / "huge.png")
    return photos


def test_bad_images_are_those_that_training_quarantines_and_odd_ones_are_noted(
    damaged: Path,
) -> None:
    found = look(damaged, deep=True)
    check = found["train", "images"]
    index = open_index(str(damaged / "train"))
    spec = LoaderSpec(
        plan=OnePassPlan(len(index), 8),
        crop=CentralCrop(SIDE, 1.0),
        image_size=SIDE,
        interpolation="bicubic",
        stop=-(-len(index) // 8),
        threads=1,
    )
    with Loader(index, spec) as loader:
        bad = {tuple(row) for batch in loader for row in batch.bad}
    assert {(f.sample, f.file, f.offset, f.what) for f in check.found} == bad
    assert {finding.code for finding in check.found} == {"verify.undecodable"}
    assert (check.result, check.count, len(bad)) == ("problem", 3, 3)
    names = {Path(finding.file).stem for finding in check.found}
    assert names == {"truncated", "header", "text"}
    [empty] = found["train", "left out"].found
    assert str(empty) == "1 empty file, such as cat/empty.jpg"
    assert found["val", "images"].result == "ok"
    check = found["train", "oddities"]
    assert check.result == "note"
    odd = {"cmyk.jpg", "disguised.JPEG", "deep.png", "tiny.png", "huge.png"}
    found_odd = {f"{finding.code}{Path(finding.file).suffix}" for finding in check.found}
    assert found_odd == {f"verify.{name}" for name in odd}
    assert {Path(finding.file).name for finding in check.found} == odd
    assert check.about == "16 JPEG RGB, 2 PNG RGB, 1 JPEG CMYK, 1 PNG I;16, 1 PNG L"


def test_a_photograph_of_a_phone_is_a_jpeg(photos: Path) -> None:
    """With a second picture, such as its depth, behind the first."""
    path = photos / "train" / "cat" / "phone.jpg"
    square(70).save(path, "MPO", save_all=True, append_images=[square(71)])
    assert look(photos, deep=True)["train", "oddities"].result == "ok"


def test_a_png_among_a_hundred_jpegs(photos: Path, tmp_path: Path) -> None:
    """In a shard no name tells; that it is the only one does."""
    cat = photos / "train" / "cat"
    for number in range(100):
        square(100 + number).save(cat / f"more-{number}.jpg")
    square(99).save(cat / "png.jpg", "PNG")
    shards = packed(photos, tmp_path / "shards", "webdataset")
    found = look(shards, deep=True)["train", "oddities"]
    assert [finding.code for finding in found.found] == ["verify.rare-type"]
    assert found.found[0].file.endswith(".tar")
    [sample] = [finding.sample for finding in found.found]
    index = open_index(find_splits(str(shards))["train"])
    path, offset, size = index.locate(sample or 0)
    assert Path(path).read_bytes()[offset : offset + size] == (cat / "png.jpg").read_bytes()


# --- duplicates ---


def test_duplicates_in_a_split_and_across(photos: Path) -> None:
    train, val = photos / "train", photos / "val"
    shutil.copy(train / "cat" / "02.jpg", train / "cat" / "again.jpg")
    shutil.copy(train / "cat" / "02.jpg", train / "dog" / "wrong.jpg")
    shutil.copy(val / "dog" / "17.jpg", val / "dog" / "again.jpg")
    found = look(photos, deep=True)
    assert wrong(found) == [("train", "duplicates", "note"), ("val", "duplicates", "note")]
    first = train / "cat" / "02.jpg"
    again, wrong_class = found["train", "duplicates"].found
    assert (again.file, wrong_class.file) == tuple(
        str(train / name) for name in ("cat/again.jpg", "dog/wrong.jpg")
    )
    assert again.code == wrong_class.code == "verify.same-bytes"
    assert str(first) in again.what and "'dog'" in wrong_class.what
    shutil.copy(train / "cat" / "04.jpg", val / "cat" / "leak.jpg")
    check = look(photos, deep=True)["train, val", "leakage"]
    assert (check.result, check.count) == ("problem", 1)
    assert check.found[0].file == str(val / "cat" / "leak.jpg")
    assert str(train / "cat" / "04.jpg") in check.found[0].what


@pytest.mark.parametrize(("seed", "most"), [(0, 0), *((seed, 7) for seed in range(5)), (0, 2**62)])
def test_same_bytes_against_the_plain_way(seed: int, most: int) -> None:
    """Few different words, so that halves of hashes agree where the whole does not."""
    hashes = np.random.default_rng(seed).integers(0, most + 1, (60, 2)).astype(np.uint64)
    rows, firsts = same_bytes(hashes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, pair in enumerate(hashes.tolist()):
        if any(pair):  # zeros are those that could not be read
            groups.setdefault(tuple(pair), []).append(row)
    plain = {row: group[0] for group in groups.values() if len(group) > 1 for row in group}
    assert dict(zip(rows.tolist(), firsts.tolist(), strict=True)) == plain
    assert len(rows) == len(plain)


# --- what is said ---


def test_a_flood_is_counted_and_not_listed() -> None:
    many = (Finding("verify.undecodable", "bad", sample=row) for row in range(10 * MAX_LISTED))
    check = checked("train", "images", "", many, count=10 * MAX_LISTED)
    assert (check.result, check.count, len(check.found)) == ("problem", 10**6, MAX_LISTED)
    assert next(many).sample == MAX_LISTED  # the rest was never made


# --- train and val, without a look at images ---


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["1.JPEG", "2.JPEG", "sample_submission.csv"], "data.no-class-folders"),
        (["a.mdb", "b.mdb"], "data.no-images"),
    ],
)
def test_a_folder_that_no_format_fits_is_refused_as_by_show(
    names: list[str], code: str, tmp_path: Path
) -> None:
    """Each of its files was opened as a data set, and called an unknown format."""
    place = write_files(tmp_path / "set", names)
    with raises(code, location=place):
        look(place)
    check(refused("data", "show", place), code, location=place)


def test_train_and_val_that_share_a_shard(originals: Path, tmp_path: Path) -> None:
    folder = packed(originals, tmp_path / "shards", "webdataset")
    (folder / "dataset.json").unlink()
    assert look(folder)["train, val", "overlap"].result == "ok"
    (folder / "pets-val-000007.tar").symlink_to("pets-train-000001.tar")
    found = look(folder)["train, val", "overlap"]
    assert (found.result, found.count) == ("problem", 8)
    place = ("verify.overlap", str(folder / "pets-val-000007.tar"), 1536)
    assert (found.found[0].code, *found.found[0][2:4]) == place
