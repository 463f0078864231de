"""Finds split names as whole words in the names of files and folders."""

import re

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SPLIT_OF = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
}


def words_of(name: str) -> set[str]:
    """The words of a name in lower case: `cocoTrain2017-0.tar` has coco, train and tar."""
    return {word.lower() for word in _WORD.findall(name)}


def splits_named(name: str) -> set[str]:
    """The splits, "train" and "val", that a name holds as words: `retrieval-train` holds train."""
    return {_SPLIT_OF[word] for word in words_of(name) & _SPLIT_OF.keys()}
