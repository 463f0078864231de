"""Reassessed labels of a validation set: all right classes of each image, possibly none.

ReaL (Beyer et al. 2020, "Are we done with ImageNet?"): `real.json` has a list of class numbers for
each of the 50,000 validation images of ILSVRC2012, in the order of their file names. Images with
an empty list are not counted; a prediction is right if it is in the list.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.index.table import Index
from trainyard.data.storage.manifest import Manifest, manifest_of
from trainyard.errors import DataError

Labels = list[list[int]]
"""The right classes of each sample, by sample number."""

_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.")


def read_labels(path: Path, index: Index) -> Labels:
    """The labels in a file for the samples of an index; DataError if they do not match."""
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError("file.unreadable", path=path, reason=reason) from None
    _check(tree, path, len(index.classes))
    numbers = _numbers(index)
    if numbers is None:
        raise DataError(
            "labels.unknown-image-numbers",
            "{path}: its labels go by the numbers in names such as ILSVRC2012_val_00000001.JPEG, "
            "which {location} does not tell: evaluate on one folder of files with these names, or "
            "on what `trainyard data prepare imagenet-1k` made",
            path=path,
            location=index.root or "merged data",
        )
    if len(numbers) and int(numbers.max()) > len(tree):
        raise DataError(
            "labels.too-few",
            "{path}: has labels for {num_labels:,} images, but {location} has image {number:,}",
            path=path,
            num_labels=len(tree),
            location=index.root,
            number=int(numbers.max()),
        )
    return [tree[number - 1] for number in numbers.tolist()]


def _check(tree: Any, path: Path, num_classes: int) -> None:
    if not isinstance(tree, list):
        raise DataError(
            "labels.not-a-list",
            "{path}: expected a JSON list with a list of class numbers for each image",
            path=path,
        )
    for number, labels in enumerate(tree, start=1):
        if not isinstance(labels, list) or not all(
            type(label) is int and 0 <= label < num_classes for label in labels
        ):
            raise DataError(
                "labels.not-class-numbers",
                "{path}: image {number:,} has {value} instead of a list of class numbers from 0 "
                "to {largest}",
                path=path,
                number=number,
                value=json.dumps(labels)[:60],
                largest=num_classes - 1,
            )


def _numbers(index: Index) -> NDArray[np.int64] | None:
    """The number in the official name of each sample, from 1; None if it is not known."""
    if index.format == "folder" and not index.parts:
        names = [os.path.basename(index.file_names[file]) for file in index.file.tolist()]
        matches = [_VAL_NAME.match(name) for name in names]
        return np.array([int(m[1]) for m in matches if m]) if all(matches) else None
    names = [*index.file_names]
    manifest = None if index.parts else manifest_of(index.root, tuple(names))
    if manifest is not None and _is_official_val(manifest, names, len(index)):
        return np.arange(1, len(index) + 1)
    return None


def _is_official_val(manifest: Manifest, names: list[str], samples: int) -> bool:
    """True for all shards that `data prepare` makes of it, in the order of official names."""
    facts, val = manifest.about, manifest.splits.get("val")
    return (
        facts.get("source") == "ILSVRC2012"
        and facts.get("val_left_out") == 0
        and val is not None
        and val.samples == samples
        and {os.path.basename(shard.name) for shard in val.shards}
        == set(map(os.path.basename, names))
    )
