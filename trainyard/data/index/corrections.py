"""Corrected labels: a list of images, each with the class that it has, or to be left out."""

import csv
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from trainyard.data.index.table import (
    Index,
    digest_of,
    into_cache,
    load_index,
    save_index,
)
from trainyard.errors import DataError
from trainyard.files import cache_folder
from trainyard.hints import did_you_mean
from trainyard.printable import from_csv


class Correction(NamedTuple):
    row: int
    """The line in the list, the first below its head being 2."""
    file: str
    key: int | None
    """Its image's number in the file, see `Index.keys_in_file`; None for all images in it."""
    name: str
    """The class, "" for an image to leave out."""


def read_corrections(path: str) -> list[Correction]:
    """The rows of a CSV with the columns file and class, maybe offset. DataError for another."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            return [
                Correction(
                    number,
                    from_csv(row["file"]),
                    int(row["offset"]) if row.get("offset") else None,
                    from_csv(row["class"]),
                )
                for number, row in enumerate(csv.DictReader(file), 2)
            ]
    except (OSError, csv.Error, KeyError, TypeError, ValueError, AttributeError) as error:
        is_key = isinstance(error, KeyError)
        reason = f"it has no column {error}" if is_key else getattr(error, "strerror", None)
        raise DataError(
            "data.corrections-unreadable",
            "data.corrections = {path!r}: {reason}: name the list that the page of trainyard "
            "suspects saves, a CSV with the columns file, class and maybe offset",
            path=path,
            reason=reason or str(error),
        ) from None


def corrected_samples(index: Index, corrections: list[Correction]) -> dict[int, Correction]:
    """The samples of an index that are in the list. The last row of a sample counts."""
    by_name = defaultdict(list)
    for one in corrections:
        for name in _names_in(index.root, one.file):
            by_name[name].append(one)
    files = {n: by_name[name] for n, name in enumerate(index.file_names) if name in by_name}
    keys, samples = index.keys_in_file, np.flatnonzero(np.isin(index.file, [*files]))
    return {
        sample: one
        for sample in samples.tolist()
        for one in files[int(index.file[sample])]
        if one.key in (None, int(keys[sample]))
    }


def _names_in(root: str, file: str) -> Iterator[str]:
    """What a file of the list may be called in an index; its folder may lie elsewhere now."""
    yield file
    if root:
        folder = f"/{os.path.basename(root.rstrip('/'))}/"
        parts = file.split(folder)
        yield from (folder.join(parts[n:]) for n in range(1, len(parts)))


def corrected(index: Index, path: str) -> Index:
    """The index with the classes of a list, without the images to leave out, in the cache.

    The index itself if the list has none of its images. DataError for a list of another kind, a
    class that the data lacks, or if no image remains.
    """
    found = corrected_samples(index, read_corrections(path))
    if not found:
        return index
    label = np.array(index.label)
    for sample, number in _numbers(index, found, path).items():
        label[sample] = number
    rows, changed = np.flatnonzero(label >= 0), np.flatnonzero(label != index.label)
    counts = (len(found), len(changed) - len(label) + len(rows), len(label) - len(rows))
    changes = [changed.tolist(), label[changed].tolist()]
    digest = digest_of([index.fingerprint, changes]) if changes[0] else index.fingerprint
    at = cache_folder() / f"corrected-{digest_of([os.path.realpath(index.path), digest])[:16]}"
    saved = load_index(at)
    wanted = (digest, index.stamps, counts)
    if saved is not None and (saved.fingerprint, saved.stamps, saved.corrected) == wanted:
        return saved
    parts = np.diff(np.searchsorted(rows, np.cumsum([0, *(index.parts or (len(index),))])))
    if not parts.all():
        raise DataError(
            "data.corrections-leave-none",
            "data.corrections = {path!r}: leaves no image of {location}",
            path=path,
            location=index.root or "a location",
        )
    row = np.arange(len(index)) if index.row is None else index.row
    columns = index.of_rows(rows) | {"label": label[rows], "row": row[rows]}
    header = index.header(fingerprint=digest, same_rows=index.scanned, corrected=counts)
    header |= {"numbers": index.numbers, "parts": parts.tolist() if index.parts else []}
    with into_cache(at, index.root):
        return save_index(at, header if index.root else header | {"root": None}, columns)


def _numbers(index: Index, found: Mapping[int, Correction], path: str) -> dict[int, int]:
    """The number of each sample's class, -1 for one to leave out."""
    if index.lists is not None:
        raise DataError(
            "data.corrections-of-lists",
            "data.corrections = {path!r}: is for images with one label each, and these have lists",
            path=path,
        )
    numbers = {name: number for number, name in enumerate(index.classes)} | {"": -1}
    for one in found.values():
        if one.name not in numbers:
            raise DataError(
                "data.corrections-unknown-class",
                "data.corrections = {path!r}: line {row}: the data has no class {name!r}{hint}",
                path=path,
                row=one.row,
                name=one.name,
                hint=did_you_mean(one.name, index.classes),
            )
    return {sample: numbers[one.name] for sample, one in found.items()}
