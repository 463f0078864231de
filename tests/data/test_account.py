"""The account of a scan: found = read + left out, on random trees of every format.

A writer makes a random tree from a seed and returns what it has written: the number of samples, and
of things that are none by kind. Each format has one in WRITERS. TRAINYARD_TREES sets the number of
trees of a format.
"""

import os
import random
import string
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.tars import write_tar
from trainyard.data.formats import packed
from trainyard.data.formats.left_out import (
    BESIDE,
    BROKEN_LINK,
    DOTTED,
    EMPTY,
    FEATURES,
    HIDDEN,
    LOOP,
    LOOSE,
    NO_IMAGE,
    NO_SPLIT,
    RESERVED,
    SPECIAL,
)
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.index.build import build_index
from trainyard.files import part_of

TREES = int(os.environ.get("TRAINYARD_TREES", "30"))
IMAGES = (".jpg", ".JPEG", ".jfif", ".jpe", ".png", ".webp", ".gif", ".avif", ".jp2", ".tiff")
OTHERS = (".txt", ".JSON", ".mp4", ".xcf", ".zip", ".eps", "")
HIDDEN_NAMES = (".DS_Store", "._a.jpg", ".x.png", ".ipynb_checkpoints")


class Written:
    """What a writer has made: its samples, and the rest by kind."""

    def __init__(self, location: Path) -> None:
        self.location, self.samples, self.others = location, 0, Counter[str]()
        """By the kind in an account."""


def kind_of(suffix: str) -> str:
    return f"files ending in {suffix.lower()}" if suffix else "files without an ending"


def names(rng: random.Random) -> Iterator[str]:
    """Different names, in no order."""
    for number in range(1000):
        letters = "".join(rng.choices(f"{string.ascii_letters}é日 -_", k=rng.randint(0, 6)))
        yield f"{rng.randint(0, 9)}{letters}{number}"


# --- folders ---


def write_folder(folder: Path, rng: random.Random) -> Written:
    written, name = Written(folder), names(rng)
    for number in range(rng.randint(1, 4)):
        home = folder / f"class {number}"
        home.mkdir(parents=True)
        if number and rng.random() < 0.2:
            written.others[NO_IMAGE] += 1
            fill_folder(home, rng, name, written, images=0)
            continue
        homes = [home, home / "deep", home / "deep" / "er.jpg"][: rng.randint(1, 3)]
        homes[-1].mkdir(parents=True, exist_ok=True)
        for one in homes:
            fill_folder(one, rng, name, written, images=rng.randint(1, 4))
        if rng.random() < 0.3:
            (homes[-1] / "loop").symlink_to(home.absolute())
            written.others[LOOP] += 1
    for suffix in rng.choices((*IMAGES, *OTHERS), k=rng.randint(0, 4)):
        (folder / (next(name) + suffix)).write_bytes(b"x")
        written.others[LOOSE if suffix in IMAGES else kind_of(suffix)] += 1
    for own in rng.sample(("dataset.json", ".trainyard-index-0", ".git"), rng.randint(0, 3)):
        (folder / own).write_bytes(b"{}")
        written.others[HIDDEN] += own == ".git"
    return written


def fill_folder(
    home: Path, rng: random.Random, name: Iterator[str], written: Written, *, images: int
) -> None:
    for suffix in rng.choices(IMAGES, k=images):
        (home / (next(name) + suffix)).write_bytes(rng.randbytes(rng.randint(1, 9)))
    written.samples += images
    for suffix in rng.choices(OTHERS, k=rng.randint(0, 3)):
        (home / (next(name) + suffix)).write_bytes(b"x" * rng.randint(0, 1))
        written.others[kind_of(suffix)] += 1
    if images and rng.random() < 0.3:
        (home / "features.npy").write_bytes(b"x")
        written.others[FEATURES] += 1
    for junk in rng.sample((*HIDDEN_NAMES, "@eaDir"), rng.randint(0, 3)):
        if rng.random() < 0.5:
            (home / junk).write_bytes(b"x")
        else:
            (home / junk).mkdir()
            (home / junk / "1.jpg").write_bytes(b"x")
        written.others[HIDDEN] += 1
    if rng.random() < 0.4:
        (home / (next(name) + ".jpg")).touch()
        written.others[EMPTY] += 1
    if rng.random() < 0.4:
        (home / (next(name) + rng.choice(("", ".jpg", ".txt")))).symlink_to("absent")
        written.others[BROKEN_LINK] += 1
    if rng.random() < 0.3:
        os.mkfifo(home / (next(name) + ".jpg"))
        written.others[SPECIAL] += 1


# --- tars ---


Members = list[tuple[str, bytes]]


def junk_members(rng: random.Random, above: str, name: Iterator[str], written: Written) -> Members:
    """Members of a tar that are none of a sample."""
    made = []
    for suffix in rng.choices([each for each in OTHERS if each != ".JSON"], k=rng.randint(0, 4)):
        made.append((f"{above}{next(name)}{suffix}", b"x"))
        written.others[kind_of(suffix)] += 1
    for hidden in rng.sample(HIDDEN_NAMES, rng.randint(0, 2)):
        made.append((f"{above}{hidden}", b"x"))
        written.others[HIDDEN] += 1
    return made


def image_members(
    rng: random.Random, above: str, name: Iterator[str], written: Written, *, count: int
) -> Members:
    made = [(f"{above}{next(name)}{rng.choice(IMAGES)}", b"x") for _ in range(count)]
    written.samples += count
    return made


def write_class_folders(folder: Path, rng: random.Random) -> Written:
    """A tar with class folders, with splits in it or not."""
    written, name, members = Written(folder / "a.tar"), names(rng), Members()
    has_splits = rng.random() < 0.5
    for split in ("train/", "val/") if has_splits else ("",):
        for number in range(rng.randint(1, 3)):
            above = f"all/{split}n{number}/"
            members += image_members(rng, above, name, written, count=rng.randint(1, 5))
            members += junk_members(rng, above, name, written)
            if rng.random() < 0.3:
                members.append((f"{above}{next(name)}.jpg", b""))
                written.others[EMPTY] += 1
    for _ in range(rng.randint(0, 2) if has_splits else 0):
        members.append((f"all/other/n0/{next(name)}.jpg", b"x"))
        written.others[NO_SPLIT] += 1
    rng.shuffle(members)
    write_tar(written.location, members)
    if rng.random() < 0.3:
        add_link(written, "all/README")
    if has_splits:
        written.location = folder / "a.tar#train"
    return written


def add_link(written: Written, name: str) -> None:
    with tarfile.open(written.location, "a") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
        tar.addfile(info)
    written.others[kind_of("")] += 1


def write_tar_of_tars(folder: Path, rng: random.Random) -> Written:
    written, name = Written(folder / "a.tar"), names(rng)
    members = junk_members(rng, "", name, written)
    for number in range(rng.randint(1, 4)):
        inner = image_members(rng, f"n{number}_", name, written, count=rng.randint(1, 5))
        inner += junk_members(rng, "", name, written)
        path = write_tar(folder / "inner", rng.sample(inner, len(inner)))
        members.append((f"n{number}.tar", path.read_bytes()))
        path.unlink()
    write_tar(written.location, rng.sample(members, len(members)))
    return written


def write_class_tars(folder: Path, rng: random.Random) -> Written:
    """A folder of tars, and what lies beside them."""
    written, name = Written(folder), names(rng)
    for number in range(rng.randint(2, 4)):
        inner = image_members(rng, f"n{number}_", name, written, count=rng.randint(1, 5))
        inner += junk_members(rng, "", name, written)
        write_tar(folder / f"n{number}.tar", inner)
    add_beside(written, rng)
    return written


def add_beside(written: Written, rng: random.Random) -> None:
    folder = written.location
    for suffix in rng.choices((".txt", ".jpg", ".md"), k=rng.randint(0, 3)):
        path = folder / f"beside {written.others.total()}{suffix}"
        path.write_bytes(b"x")
        written.others[kind_of(suffix)] += 1
    if rng.random() < 0.5:
        (folder / "notes").mkdir()
        (folder / "notes" / "a.txt").write_bytes(b"x")
        written.others[BESIDE] += 1
    if rng.random() < 0.3:
        (folder / ".DS_Store").write_bytes(b"x")
        written.others[HIDDEN] += 1
    (folder / "dataset.json").write_bytes(b"{}")


def write_webdataset(folder: Path, rng: random.Random) -> Written:
    written, name = Written(folder), names(rng)
    for shard in range(rng.randint(1, 3)):
        groups = [webdataset_sample(rng, next(name)) for _ in range(rng.randint(1, 6))]
        written.samples += len(groups)
        for junk in junk_members(rng, "", name, written):
            groups.insert(rng.randint(1, len(groups)), [junk])
        if rng.random() < 0.3:
            stem = f"{next(name)}.0001"
            groups.append([(f"{stem}.jpg", b"x"), (f"{stem}.cls", b"1")])
            written.others[DOTTED] += 1
        if rng.random() < 0.3:
            groups.append([("__about__", b"x")])
            written.others[RESERVED] += 1
        if rng.random() < 0.3:
            groups.append([(f"{next(name)}.json", b'{"text": 1}')])
            written.others[kind_of(".json")] += 1
        write_tar(folder / f"{shard}.tar", [member for group in groups for member in group])
    add_beside(written, rng)
    return written


def webdataset_sample(rng: random.Random, key: str) -> Members:
    """An image, a label and other fields of the sample."""
    label = rng.choice([("cls", b"1"), ("json", b'{"label": 1}')])
    fields = rng.sample([("txt", b"x"), ("seg.png", b"x"), ("npy", b"x")], rng.randint(0, 3))
    members = [(rng.choice(IMAGES)[1:], b"x"), label, *fields]
    return [(f"{key}.{field}", content) for field, content in rng.sample(members, len(members))]


def write_packed(folder: Path, rng: random.Random) -> Written:
    written = Written(folder)
    folder.mkdir(exist_ok=True)
    for shard in range(rng.randint(1, 3)):
        count = rng.randint(1, 6)
        samples = [EncodedSample(b"x" * n, ".jpg", n % 2, str(n)) for n in range(count)]
        packed.write(folder / f"{shard}.packed", samples, ("a", "b"))
        written.samples += count
    add_beside(written, rng)
    return written


WRITERS: dict[str, Callable[[Path, random.Random], Written]] = {
    "folder": write_folder,
    "class folders in a tar": write_class_folders,
    "tar of tars": write_tar_of_tars,
    "class tars": write_class_tars,
    "webdataset": write_webdataset,
    "packed": write_packed,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_found_is_read_and_left_out(tmp_path: Path, kind: str) -> None:
    """A file or a member is passed over in silence, counted twice, or as another kind."""
    for seed in range(TREES):
        written = WRITERS[kind](tmp_path / str(seed), random.Random(seed))
        index = build_index(str(written.location))
        read = len(index)
        if str(written.location).endswith("#train"):  # one scan accounts for both splits
            read += len(build_index(str(written.location).replace("#train", "#val")))
        found = {name: count for name, (count, _) in index.left_out.kinds.items()}
        assert (read, found) == (written.samples, dict(+written.others)), seed


def test_an_index_that_is_being_written_is_none_of_the_data(tmp_path: Path) -> None:
    """Another command may write it at this moment, or may have been killed at it."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.jpg").write_bytes(b"x")
    part_of(tmp_path / ".trainyard-index").write_bytes(b"TY")
    assert not build_index(str(tmp_path)).left_out
