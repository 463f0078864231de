"""Which class of one data set is which class of another."""

import unicodedata
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import Capture, run
from tests.data.tars import named_shards, stored, write_files, write_shard
from tests.errors import raises
from trainyard.data.config import DataConfig
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.label_space import match_classes, name_remarks
from trainyard.data.index.merge import open_merged
from trainyard.data.open_datasets import open_datasets
from trainyard.errors import DataError
from trainyard.world import World

WNIDS = sorted((files("trainyard.data.formats") / "ilsvrc2012.txt").read_text().split())
NUMBERS = [str(number) for number in range(1000)]
ELEVEN = "0 1 10 2 3 4 5 6 7 8 9"  # folders in the order of texts


@pytest.mark.parametrize(
    ("known", "found", "numbers"),
    [
        ("cat dog eel", "cat dog eel", [0, 1, 2]),
        ("cat dog eel", "cat eel", [0, 2]),  # a part, as ImageNet-A and -R are
        ("cat dog eel", "eel cat", [2, 0]),
        (ELEVEN, ELEVEN, [*range(11)]),
        (ELEVEN, "0 1 2", [0, 1, 3]),  # number 2 is the folder called 2, not the third one
        ("0 1 2", "2", [2]),
    ],
)
def test_classes_are_matched_by_name(known: str, found: str, numbers: list[int]) -> None:
    match = match_classes(known.split(), found.split(), "it", has_names=True)
    assert (match.numbers, match.remark) == (numbers, "")


def test_bare_numbers_are_names_and_that_is_printed() -> None:
    match = match_classes(ELEVEN.split(), ["0", "1", "2"], "it", has_names=False)
    assert match.numbers == [0, 1, 3]
    assert match.remark == "it: names no classes: label 2 is taken for the class called '2'"


@pytest.mark.parametrize("has_names", [True, False])
def test_imagenet_has_its_numbers_by_the_order_of_wordnet_ids(has_names: bool) -> None:
    """Folders 0 to 999 of ImageNet-V2 sort as texts: 2 is not the third one."""
    found = sorted(NUMBERS) if has_names else NUMBERS
    match = match_classes(WNIDS, found, "v2", has_names=has_names)
    assert match.numbers == [int(name) for name in found]
    assert match.remark == "v2: classes 0 to 999 are ImageNet's, in the order of their WordNet ids"
    back = match_classes(sorted(NUMBERS), WNIDS, "folder", has_names=True)
    assert [sorted(NUMBERS)[number] for number in back.numbers] == NUMBERS
    for other in (WNIDS[:999], [*WNIDS[:999], "n99999999"]):  # another set of as many classes
        with raises("data.unknown-classes"):
            match_classes(other, NUMBERS, "v2", has_names=False)


@pytest.mark.parametrize(
    ("known", "found", "has_names", "words"),
    [
        ("cat dog", "cat dog eel", True, "'eel' is new"),
        ("cat dog", "cat eel", True, "'eel' is new, 'dog' is missing"),
        ("cat dog eel", "0 1 2", True, "'0' is new"),
        ("cat dog eel", "0 1 2", False, "'0' is new"),
        ("0 1 2", "cat dog eel", True, "'cat' is new"),
        ("0 1", "0 1 2", False, "'2' is new"),
        ("cat dog", "00 01", True, "'00' is new"),
        ("0 1 2", "0 1 two", True, "'two' is new, '2' is missing"),
        ("cat dog", "images", True, "'images' is new"),
        ("cat dog", "Cat dog", True, "'Cat' is new, 'cat' is missing"),
    ],
)
def test_classes_that_do_not_fit(known: str, found: str, has_names: bool, words: str) -> None:
    with raises("data.unknown-classes", location="it") as caught:
        match_classes(known.split(), found.split(), "it", has_names=has_names)
    assert words in str(caught.value.fields["differences"])


# --- in one form ---


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def test_names_in_two_forms_of_unicode_are_one_class(tmp_path: Path) -> None:
    """A zip of macOS decomposes names; train and val would have different classes."""
    train = write_files(tmp_path / "train", {"café/1.jpg": b"1", "bar /2.jpg": b"2"})
    val = write_files(tmp_path / "val", {nfd("café/3.jpg"): b"3", "bar/4.jpg": b"4"})
    known = open_index(train).classes
    assert known == ("bar", "café")
    assert stored(open_merged([val], known)) == [("bar", b"4"), ("café", b"3")]


@pytest.mark.parametrize("names", [("café", nfd("café")), ("cat", "cat ")])
def test_two_folders_of_one_name_are_an_error_that_names_both(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    place = write_files(tmp_path, [f"{name}/1.jpg" for name in names])
    with pytest.raises(DataError) as error:
        build_index(place)
    assert all(ascii(name) in str(error.value) for name in names)


@pytest.mark.parametrize(
    "other",
    [
        "a\u00a0cat",
        "a cat\u200b",
        "a c\u00adat",
        "\ufeffa cat",
        "a  cat",
        "a cat\u200e",
        "a cat\ufe0f",
    ],
)
def test_classes_that_look_the_same_are_an_error(tmp_path: Path, other: str) -> None:
    """Word processors and web pages put such characters in: half of a class was another one."""
    place = write_files(tmp_path / "one", ["a cat/1.jpg", "dog/1.jpg", f"{other}/1.jpg"])
    with raises("data.classes-look-alike", location=place):
        build_index(place)
    known, twin = (
        write_files(tmp_path / f"of {n}", [f"{n}/1.jpg", "dog/1.jpg"]) for n in ("a cat", other)
    )
    with raises("data.classes-look-alike", location=f"{known} and {twin}"):
        open_merged([known, twin], None)
    with raises("data.unknown-classes", location=twin) as caught:
        open_merged([twin], open_index(known).classes)
    assert "'a cat'" in str(caught.value.fields["hint"])
    assert open_index(twin).classes == tuple(sorted((other.strip(), "dog")))  # names stay


@pytest.mark.parametrize(
    ("classes", "named"),
    [
        (["Cat", "cat", "dog"], ["'Cat' and 'cat'"]),
        (["a", "A", "\uff21"], ["'a' and 'A' and '\\uff21'"]),
        (["scab", "leaf_spot", "scab leaf_spot"], ["'scab leaf_spot'"]),
        (["haze", "clear", "haze, clear", "clear|haze"], ["'haze, clear', 'clear|haze'"]),
        (["cat", "dog", "cat_dog"], ["'cat_dog'"]),
        (["black", "white", "black and white", "-white", "dog "], []),
        (["147 616", "147 813"], ["'147 616', '147 813'"]),
        (["1", "10", "-1", "3/4", "20-30"], []),
    ],
)
def test_names_of_classes_that_may_be_others_are_remarked(
    classes: list[str], named: list[str]
) -> None:
    remarks = name_remarks(classes)
    assert len(remarks) == len(named)
    assert all(text in remark for text, remark in zip(named, remarks, strict=True))


def test_show_and_verify_tell_of_classes_that_look_alike(tmp_path: Path, capsys: Capture) -> None:
    place = write_files(tmp_path / "pets", ["Cat/1.jpg", "cat/2.jpg", "dog/3.jpg"])
    assert run("data", "show", place) == 0
    assert "'Cat' and 'cat'" in capsys.readouterr().err
    assert run("data", "verify", place) == 0
    assert "'Cat' and 'cat'" in capsys.readouterr().out


# --- one rule for all commands ---


def opened(train: str | tuple[str, ...], val: str) -> list[int]:
    """The labels of the validation data, in a run."""
    data = open_datasets(DataConfig(train=train, val=val), World(), lambda *_: None)
    return [int(label) for label in data.val.label]


def test_validation_data_may_lack_a_class_and_is_numbered_by_the_training_data(
    tmp_path: Path,
) -> None:
    train = write_files(tmp_path / "t", ["ant/1.jpg", "cat/1.jpg", "dog/1.jpg"])
    val = write_files(tmp_path / "v", ["cat/2.jpg", "dog/2.jpg"])
    assert opened(train, val) == [1, 2]
    named = named_shards(tmp_path / "named", [2, 1], ("cat", "dog"))
    assert set(opened(train, named)) == {1}
    with raises("data.unknown-classes", location=train, differences="'ant' is new"):
        opened(val, train)


def test_bare_numbers_fit_folders_of_the_same_names_alone(tmp_path: Path, capsys: Capture) -> None:
    folders = write_files(tmp_path / "t", [f"{name}/1.jpg" for name in ELEVEN.split()])
    shard = write_shard(tmp_path / "v.tar", [(b"2", 2), (b"10", 10)])
    assert opened(folders, str(shard)) == [3, 2]
    assert "v.tar: names no classes: label 10 is taken for the class called '10'" in (
        capsys.readouterr().err
    )
    pets = write_files(tmp_path / "pets", ["cat/1.jpg", "dog/1.jpg", "eel/1.jpg"])
    for train in (pets, (pets, folders)):
        with raises("data.unknown-classes", location=f"{tmp_path}/w.tar"):
            opened(train, str(write_shard(tmp_path / "w.tar", [(b"2", 11)])))


def test_merged_data_match_numbers_as_validation_data_do(tmp_path: Path) -> None:
    folders = write_files(tmp_path / "t", [f"{name}/1.jpg" for name in ELEVEN.split()])
    shard = str(write_shard(tmp_path / "v.tar", [(b"2", 2), (b"10", 10)]))
    both = open_merged([shard, folders], None)
    assert both.classes == tuple(ELEVEN.split())
    assert np.asarray(both.label[:2]).tolist() == [3, 2]
