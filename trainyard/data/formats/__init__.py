"""The formats of data sets: each finds the samples of a location and their bytes."""

import os
from collections.abc import Sequence
from fnmatch import filter as matching
from functools import cache
from importlib.metadata import entry_points

from trainyard.data.formats import (
    class_tar,
    folder,
    hdf5,
    listing,
    packed,
    parquet,
    tfrecord,
    webdataset,
)
from trainyard.data.formats.format import Format
from trainyard.data.formats.left_out import LOOSE
from trainyard.data.formats.remedies import remedy, remedy_beside
from trainyard.data.formats.scan import Scan
from trainyard.data.storage.location import ResolvedLocation
from trainyard.errors import DataError

# Tried in this order, those of other packages first.
_OURS = (listing, packed, parquet, webdataset, tfrecord, hdf5, folder, class_tar)


@cache
def all_formats() -> dict[str, Format]:
    """All formats by name, in the order in which they are tried."""
    found: list[Format] = [entry.load() for entry in entry_points(group="trainyard.formats")]
    return {each.name: each for each in (*found, *(module.FORMAT for module in _OURS))}


FITS_NONE = ("data.no-class-folders", "data.no-images")
"""Codes of the errors of a folder that no format recognises."""


def recognise(place: ResolvedLocation) -> str:
    """The name of the format of a place. DataError if no format recognises it."""
    for name, each in all_formats().items():
        if each.recognises(place):
            _check_options(place, each)
            return name
    if place.is_folder:
        left_out = folder.files_left_out(place.root)
        loose, _ = left_out.kinds.get(LOOSE, (0, ""))
        way_out = remedy_beside(place.root, left_out)
        if loose:
            raise DataError(
                "data.no-class-folders",
                "{location}: holds {num_images:,} images, but no folder of a class; expected one "
                "folder per class (CLASS/*.jpg), or tars, TFRecords, HDF5, Parquet or packed "
                "files in it{hint}",
                location=place.location,
                num_images=loose,
                hint=way_out,
            )
        hint = (f"; left out: {left_out}" if left_out else "") + way_out
        raise DataError(
            "data.no-images",
            "{location}: no images found; expected one folder per class (CLASS/*.jpg), or tars, "
            "TFRecords, HDF5, Parquet or packed files in it{hint}",
            location=place.location,
            hint=hint,
        )
    unpacked = os.path.splitext(place.location)[0]
    beside = f"; did you mean {unpacked}?" if os.path.isdir(unpacked) else ""
    raise DataError(
        "data.unknown-format",
        "{location}: not a known format; expected a folder, tars, TFRecords, HDF5, Parquet, "
        "packed files, or a list of images (.csv, .tsv, .txt, .lst, .json, .jsonl){hint}",
        location=place.location,
        hint=remedy([place.location]) or beside,
    )


def _check_options(place: ResolvedLocation, recognised: Format) -> None:
    """DataError for an option that the format's reader does not know."""
    if len(place.options) < place.option_text.count("#"):
        raise DataError(
            "data.option-twice",
            "{location}{options}: has an option twice",
            location=place.location,
            options=place.option_text,
        )
    wrong = [f"#{option}=" for option in place.options if option not in recognised.options]
    if wrong:
        taken = " and ".join(f"#{option}=" for option in recognised.options) or "none"
        raise DataError(
            "data.unknown-option",
            "{location}: {name} is no option of the format {format}, which takes {names}",
            location=place.location,
            name=wrong[0],
            format=recognised.name,
            names=taken,
        )


def patterns() -> list[str]:
    """The names of shards, as globs, of all formats; one name may fit several."""
    return [pattern for each in all_formats().values() for pattern in each.patterns]


def shards_among(names: Sequence[str]) -> set[str]:
    """The names that are those of shards."""
    return {name for pattern in patterns() for name in matching(names, pattern)}


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a place of any format."""
    return all_formats()[recognise(place)].scan(place)


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits in a single file; empty if its format cannot hold several."""
    return all_formats()[recognise(place)].splits_inside(place)
