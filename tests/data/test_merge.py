"""Several data sets as one."""

import dataclasses
import json
import os
import shlex
import shutil
import tracemalloc
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, run, shown
from tests.data.tars import Patch, counted_shards, named_shards, stored, write_files
from tests.errors import check, raises, refused
from trainyard.data.decode.seek_tables import seek_path
from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.index import merge
from trainyard.data.index.build import index_scan, open_index
from trainyard.data.index.merge import merged_splits, open_merged
from trainyard.data.index.table import load_index
from trainyard.data.storage.location import find_place

Files = dict[str, bytes]


@pytest.fixture
def pets(tmp_path: Path) -> str:
    return write_files(
        tmp_path / "pets", {"dog/1.jpg": b"d1", "cat/\udcff.jpg": b"c1", "cat/2.jpg": b"c22"}
    )


@pytest.fixture
def farm(tmp_path: Path) -> str:
    return write_files(
        tmp_path / "a" / "farm", {"cow/1.png": b"w1", "cat/1.png": b"f111", "ant/x.jpg": b"a"}
    )


# --- the table ---


def test_samples_lie_one_after_another_and_classes_are_united(
    pets: str, farm: str, cache: Path
) -> None:
    merged = open_merged([pets, farm], None)
    assert merged.classes == ("ant", "cat", "cow", "dog")
    assert merged.has_names
    assert merged.parts == (3, 3)
    again = load_index(merged.path)
    assert again is not None and again.path.parent == cache
    assert (again.classes, again.parts) == (merged.classes, merged.parts)
    assert stored(again) == stored(merged) and again.fingerprint == merged.fingerprint
    assert open_merged([pets, farm], None).path.stat().st_ino == merged.path.stat().st_ino  # reused
    assert open_merged([pets], None).path == open_index(pets).path  # one location is not merged
    assert stored(merged) == stored(open_index(pets)) + stored(open_index(farm))
    assert ("cat", b"c1") in stored(merged)
    assert ("cat", b"f111") in stored(merged)


def test_relative_locations(pets: str, farm: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    merged = open_merged(["pets", "a/farm"], None)
    monkeypatch.chdir("/")
    assert len(stored(merged)) == 6


def test_formats_may_differ(pets: str, tmp_path: Path) -> None:
    shards = named_shards(tmp_path / "shards", [2, 3], ("cat",))
    more = named_shards(tmp_path / "more", [1], ("cat",))
    merged = open_merged([shards, pets, more], None)
    assert merged.format == "folder and webdataset"
    first = stored(open_index(shards))
    assert stored(merged) == first + stored(open_index(pets)) + stored(open_index(more))
    assert first[4] == ("cat", b"image 4")


def test_urls_stay_whole(pets: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    rows = iter([FileRows("b/a.tar", [512], [5], [0])])
    scan = Scan(find_place(str(tmp_path / "here")), "webdataset", ["cat"], (), rows)
    here = index_scan(scan, tmp_path / "index")
    parts = [open_index(pets), dataclasses.replace(here, root="http://host:1/x")]
    merged = merge._save(tmp_path / "merged", parts, merge._header(parts, ["cat", "dog"]))
    assert merged.locate(3) == ("http://host:1/x/b/a.tar", 512, 5)
    assert merged.locate(0) == open_index(pets).locate(0)


@pytest.mark.night
def test_merging_holds_few_copies_of_the_columns(tmp_path: Path) -> None:
    """The names of 600,000 images took eight times their size to move, in indices of bytes."""
    (tmp_path / "big").mkdir()
    rows = (
        FileRows(f"class/some-image-of-a-long-name-{n}.jpg", [0], [5], [0]) for n in range(300_000)
    )
    scan = Scan(find_place(str(tmp_path / "big")), "folder", ["class"], (), rows)
    big = index_scan(scan, tmp_path / "big" / ".trainyard-index")
    tracemalloc.start()
    try:
        merged = merge._save(tmp_path / "merged", [big, big], merge._header([big, big], ["class"]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(merged) == 600_000
    assert merged.locate(599_999) == big.locate(299_999) == merged.locate(299_999)
    assert merged.locate(300_007)[0] == f"{tmp_path}/big/class/some-image-of-a-long-name-7.jpg"
    assert peak < 3 * merged.path.stat().st_size


# --- fingerprints ---


def test_fingerprints_are_of_the_data_not_of_the_place(
    pets: str, farm: str, tmp_path: Path
) -> None:
    copies = [shutil.copytree(place, tmp_path / "b" / Path(place).name) for place in (pets, farm)]
    here, there = open_merged([pets, farm], None), open_merged([str(c) for c in copies], None)
    assert here.path != there.path
    assert here.fingerprint == there.fingerprint
    assert open_merged([farm, pets], None).fingerprint != here.fingerprint
    assert open_merged([pets, farm, str(copies[1])], None).fingerprint != here.fingerprint
    assert open_index(pets).fingerprint != here.fingerprint


def test_a_changed_part_makes_another_index(pets: str, farm: str) -> None:
    before = open_merged([pets, farm], None)
    assert open_merged([pets, farm], None).fingerprint == before.fingerprint
    write_files(Path(farm), {"dog/new.jpg": b"new"})
    after = open_merged([pets, farm], None)
    assert after.fingerprint != before.fingerprint
    assert ("dog", b"new") in stored(after)


def test_a_touched_part_is_the_same_data_with_new_stamps(pets: str, tmp_path: Path) -> None:
    shards = named_shards(tmp_path / "shards", [2, 3], ("cat",))
    before = open_merged([pets, shards], None)
    shard = f"{shards}/train-001.tar"
    assert before.stamps[shard] == open_index(shards).stamps["train-001.tar"]
    os.utime(shard, ns=(1, 2))
    after = open_merged([pets, shards], None)
    assert after.fingerprint == before.fingerprint
    assert after.stamps[shard] == open_index(shards).stamps["train-001.tar"]
    assert after.stamps != before.stamps


# --- class names ---


def test_bare_numbers_are_not_matched_with_names(pets: str, tmp_path: Path) -> None:
    bare = counted_shards(tmp_path / "bare", [3])
    for places in ([pets, bare], [bare, pets]):
        with raises("data.unknown-classes", location=bare):
            open_merged(places, None)
    with raises("data.unknown-classes", location=bare):
        open_merged([bare], ("cat", "dog"))


def test_bare_numbers_are_united_among_themselves(tmp_path: Path) -> None:
    places = [counted_shards(tmp_path / name, [3]) for name in ("a", "b")]
    merged = open_merged(places, None)
    assert (merged.classes, merged.has_names, merged.parts) == (("0",), False, (3, 3))


def test_known_classes_number_the_labels(pets: str) -> None:
    index = open_merged([pets], ("ant", "cat", "cow", "dog"))
    assert index.classes == ("ant", "cat", "cow", "dog")
    assert stored(index) == stored(open_index(pets))
    with raises("data.unknown-classes", location=pets):
        open_merged([pets], ("ant", "cat"))


# --- which splits ---


def test_a_single_data_set_of_other_classes_stays_one(pets: str) -> None:
    """It was merged data without a folder: ReaL's labels and its seek table were lost."""
    alone, known = open_index(pets), ("ant", "cat", "dog")
    index = open_merged([pets], known)
    assert (index.root, index.parts, index.stamps) == (pets, (), alone.stamps)
    assert (index.classes, index.label.tolist()) == (known, [1, 1, 2])
    assert [*index.file_names] == [*alone.file_names]
    assert stored(index) == stored(alone)
    assert seek_path(index) == seek_path(alone)


def split_set(folder: Path, classes: str, val: bool) -> str:
    splits = ("train", "val") if val else ("train",)
    return write_files(folder, {f"{split}/{c}/1.png": b"" for split in splits for c in classes})


def test_train_parts_are_all_and_val_parts_those_there_are(tmp_path: Path) -> None:
    a, b = split_set(tmp_path / "a", "x", True), split_set(tmp_path / "b", "y", False)
    assert merged_splits([a]) == {"train": f"{a}/train", "val": f"{a}/val"}
    assert merged_splits([b, a]) == {"train": [f"{b}/train", f"{a}/train"], "val": [f"{a}/val"]}
    with raises("data.no-val-split", locations=f"{b}, {b}"):
        merged_splits([b, b])
    only_val = write_files(tmp_path / "c", {"val/x/1.png": b""})
    with raises("data.no-train-split", location=only_val):
        merged_splits([a, only_val])


# --- training ---


@pytest.fixture(scope="module")
def halves(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The digits 0 to 5 with validation data, and 4 to 9 without."""
    folder = tmp_path_factory.mktemp("halves")
    for name, numbers, splits in (
        ("low", "012345", ("train", "val")),
        ("high", "456789", ("train",)),
    ):
        for split in splits:
            for number in numbers:
                (folder / name / split).mkdir(parents=True, exist_ok=True)
                shutil.copytree(digits / split / number, folder / name / split / number)
    return [folder / "low", folder / "high"]


def of(halves: list[Path]) -> list[str]:
    return [word for half in halves for word in ("--data", str(half))]


def test_train_go_on_and_evaluate(halves: list[Path], tmp_path: Path, capsys: Capture) -> None:
    train = ("train", "debug", *of(halves), "--run", tmp_path / "run", *SHORT)
    once = ("--data.weights", "0.25,1", "--batch.size", "64")
    shown(capsys, *train, *once, "--json")
    low, high = (len(open_index(f"{half}/train")) for half in halves)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    (last,) = [line for line in lines if line["kind"] == "val"]
    assert last["samples"] == 128
    assert last["epoch"] == pytest.approx(128 / (round(0.25 * low) + high))
    result = json.loads(shown(capsys, "evaluate", tmp_path / "run", "--json"))
    assert result["samples"] == len(open_index(f"{halves[0]}/val"))
    assert result["top1"] == last["top1"]
    every = ("--all-classes", "--json")  # also those that have no validation data
    again = json.loads(shown(capsys, "evaluate", tmp_path / "run", *of(halves)[:2], *every))
    assert again == result
    both = json.loads(shown(capsys, "evaluate", tmp_path / "run", *of(halves), *every))
    assert both == result  # the other has train data only
    low_alone = json.loads(shown(capsys, "evaluate", tmp_path / "run", *of(halves), "--json"))
    assert (low_alone["classes"], low_alone["model_classes"]) == (6, 10)
    itself = ("--data", f"{halves[1]}/train")
    more = json.loads(shown(capsys, "evaluate", tmp_path / "run", *of(halves), *itself, "--json"))
    assert more["samples"] == result["samples"] + high
    error = refused("evaluate", tmp_path / "run", *of(halves)[2:])
    check(error, "data.only-train-split", locations=halves[1])
    for other in (
        ["--data.weights", "1,1"],
        ["--data.locality", "64"],
        ["--data.order", "resample"],
    ):
        error = refused(*train, *once, *other, "--quiet")
        check(error, "run.recipe-differs", path=f"{tmp_path}/run")
        assert f"{other[0][2:]}: " in str(error.fields["changes"])
    error = refused(*train[:2], *of(halves[::-1]), *train[6:], *once, "--quiet")
    check(error, "run.data-differs", split="train")
    recipe = tmp_path / "run" / "recipe.toml"
    shown(capsys, "train", recipe, "--run", tmp_path / "run")  # as it stands


def test_launch_hands_on_each_location(halves: list[Path], capsys: Capture) -> None:
    line = shown(capsys, "launch", "local", "debug", *of(halves), "--dry-run")
    assert shlex.join(of(halves)) in line


def test_weights_of_another_number(halves: list[Path], tmp_path: Path) -> None:
    """One error, and no run directory."""
    train = ("train", "debug", *of(halves), "--run", tmp_path / "run", *SHORT, "--quiet")
    check(refused(*train, "--data.weights", "1,2,3"), "recipe.wrong-weight-count", num_weights=3)
    assert not (tmp_path / "run").exists()


def test_keys_take_a_list(halves: list[Path], digits: Path, tmp_path: Path) -> None:
    train = json.dumps([f"{half}/train" for half in halves])
    keys = ("--data.train", train, "--data.val", f"{halves[0]}/val", "--data.order", "resample")
    assert run("train", "debug", *keys, "--run", tmp_path / "run", *SHORT, "--json") == 0
    train = json.dumps([f"{halves[0]}/train", f"{halves[0]}/val"])  # lacks classes of val
    lacking = ("--data.train", train, "--data.val", digits / "val")
    check(
        refused("train", "debug", *lacking, "--run", tmp_path / "other", *SHORT),
        "data.unknown-classes",
        location=f"{digits}/val",
    )


def test_an_unwritable_cache(pets: str, farm: str, monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "file"))
    with raises("index.unwritable"):
        open_merged([pets, farm], None)
