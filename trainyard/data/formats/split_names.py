"""The one rule for names of splits: whole words in the names of folders, shards and rows.

The words are those of Hugging Face's `datasets`: `dev` is validation data, `eval` test data.
"""

import os
import re
from collections.abc import Iterable, Sequence

from trainyard.errors import DataError

SPLITS = ("train", "val", "test")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WORDS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
JOINED = ("", "set", "data", "images")  # trainset, testdata
_SPLIT_OF = {
    word + end: split for split, words in _WORDS.items() for word in words for end in JOINED
}


def words_of(name: str) -> list[str]:
    """The words of a name in lower case: `cocoTrain2017-0.tar` has coco, train and tar."""
    return [word.lower() for word in _WORD.findall(name)]


def is_split_word(word: str) -> bool:
    """True for a word, in lower case, that names a split."""
    return word in _SPLIT_OF


def splits_named(name: str) -> set[str]:
    """The splits, of SPLITS, that a name holds as words: `retrieval-train` holds train."""
    return {_SPLIT_OF[word] for word in words_of(name) if word in _SPLIT_OF}


def split_named(name: str) -> str:
    """The split that a name stands for; "" if it names none, or several ("train-and-val")."""
    found = splits_named(name)
    return found.pop() if len(found) == 1 else ""


def rest_of(name: str) -> tuple[str, ...]:
    """The words of a name that name no split: val and valid have none, `id_val` has id."""
    return tuple(word for word in words_of(name) if word not in _SPLIT_OF)


def splits_among(names: Iterable[str]) -> list[str]:
    """The names of training data, and of validation or test data, that differ in this word alone.

    So `seg_train` and `seg_test` are splits of one data set, but `bullet_train` and `crash_test`
    may be classes. Empty without such a pair.
    """
    alike: dict[tuple[str, ...], dict[str, str]] = {}
    for name in names:
        if split := split_named(name):
            alike.setdefault(rest_of(name), {}).setdefault(split, name)
    pairs = [found for found in alike.values() if "train" in found and len(found) > 1]
    return sorted(pairs[0].values()) if pairs else []


def check_no_splits(
    location: str, classes: Sequence[str], folders: Iterable[str] = (), hint: str = ""
) -> None:
    """DataError if classes are splits, or hold splits.

    `folders`: all below the location. `hint`: the end of the message.
    """
    splits = splits_among(classes)
    if classes and all(map(split_named, classes)):
        splits = sorted(classes)
    if splits:
        raise DataError(
            "data.splits-as-classes",
            "{location}: {names} {what} by name, and no class: name each by --data.train and "
            "--data.val if it has a folder or a tar per class; without these its images have no "
            "labels{hint}",
            location=location,
            names=" and ".join(splits[:3]),
            what="are splits" if splits[1:] else "is a split",
            hint=hint,
        )
    inside: dict[str, list[str]] = {}
    for folder in folders:
        above, name = os.path.split(folder)
        inside.setdefault(above, []).append(name)
    for above, names in inside.items():
        if above and (splits := splits_among(names)):
            path = os.path.join(location, above)
            raise DataError(
                "data.class-holds-splits",
                "{path}: holds {names}, so it is no class: name it as the location if the classes "
                "lie in these ({path}), or move these above the classes",
                path=path,
                names=" and ".join(splits),
            )
