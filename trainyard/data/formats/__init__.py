"""Readers of container formats: each finds the samples of a place and their bytes.

A reader is a module with `recognises(place) -> bool` and `scan(place) -> Scan`, and, if one file
may hold several splits, `splits_inside(place) -> tuple of their names`. OPTIONS names the options
in a location that it takes.
"""

from types import ModuleType

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
from trainyard.data.formats.left_out import LOOSE
from trainyard.data.formats.remedies import remedy, remedy_beside
from trainyard.data.formats.scan import Scan
from trainyard.data.storage.location import ResolvedLocation
from trainyard.errors import DataError

# Tried in this order; a format recognises a place by its contents, not by its name.
FORMATS: dict[str, ModuleType] = {
    "list": listing,
    "packed": packed,
    "parquet": parquet,
    "webdataset": webdataset,
    "tfrecord": tfrecord,
    "hdf5": hdf5,
    "folder": folder,
    "tar": class_tar,
}


FITS_NONE = ("data.no-class-folders", "data.no-images")
"""Codes of the errors of a folder that no format recognises."""


def recognise(place: ResolvedLocation) -> str:
    """The name of the format of a place. DataError if no format recognises it."""
    for name, reader in FORMATS.items():
        if reader.recognises(place):
            _check_options(place, name)
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
    raise DataError(
        "data.unknown-format",
        "{location}: not a known format; expected a folder, tars, TFRecords, HDF5, Parquet, "
        "packed files, or a list of images (.csv, .tsv, .txt, .lst, .json, .jsonl){hint}",
        location=place.location,
        hint=remedy([place.location]),
    )


def _check_options(place: ResolvedLocation, name: str) -> None:
    """DataError for an option that the format's reader does not know."""
    known = getattr(FORMATS[name], "OPTIONS", ())
    if len(place.options) < place.option_text.count("#"):
        raise DataError(
            "data.option-twice",
            "{location}{options}: has an option twice",
            location=place.location,
            options=place.option_text,
        )
    wrong = [f"#{option}=" for option in place.options if option not in known]
    if wrong:
        taken = " and ".join(f"#{option}=" for option in known) or "none"
        raise DataError(
            "data.unknown-option",
            "{location}: {name} is no option of the format {format}, which takes {names}",
            location=place.location,
            name=wrong[0],
            format=name,
            names=taken,
        )


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a place of any format."""
    result: Scan = FORMATS[recognise(place)].scan(place)
    return result


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits in a single file; empty if its format cannot hold several."""
    reader = FORMATS[recognise(place)]
    found: tuple[str, ...] = reader.splits_inside(place) if hasattr(reader, "splits_inside") else ()
    return found
