"""A list of image files: CSV with a header, with `path`, `label` and maybe `split`.

Columns may have other usual names, see `columns.py`; further ones are told. Paths are relative
to the list's folder, or to FOLDER in `LIST#root=FOLDER`, and stay in it, links followed. Classes
are the sorted labels, and samples come in the list's order.

`labels` instead of `label` has any number of labels for each image, also none, separated by "|".
"""

import csv
import os
import re
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain, islice
from stat import S_ISREG
from typing import NamedTuple

from trainyard.data.formats.columns import (
    LISTS,
    Unread,
    find_column,
    find_split,
    missing,
    plain,
    split_of_cell,
)
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.scan import FileRows, Scan, num_threads, several
from trainyard.data.formats.split_names import rest_of
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.manifest import is_inside
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError
from trainyard.hints import did_you_mean

OPTIONS = ("label", "root", "split")
SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t"  # the one that the header has most often outside of quotes; else the comma
_QUOTED = re.compile('"[^"]*"')
_BETWEEN = "|"  # labels in a cell
_HEADER = ", line 1, the header"
_CHUNK = 4096  # files whose sizes are asked for at once
_DUPLICATE = "rows of an image that has a row already"


class _Row(NamedTuple):
    line: int
    path: str  # relative to the list's folder
    labels: list[str]
    has_list: bool  # True for any number of labels
    split: str | None  # None without a column of splits, "" for a cell that names none
    cell: str  # of the column of splits


def recognises(place: ResolvedLocation) -> bool:
    """True if a location is a single file with the suffix of a list."""
    return not place.is_folder and len(place.names) == 1 and _suffix(place) in SUFFIXES


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a list. DataError for a wrong line, and for a missing image."""
    folders, labels, hashes, left_out = set(), set(), array("q"), LeftOut()
    for row in _rows(place, left_out):
        hashes.append(hash(row.path))
        folders.add(os.path.dirname(row.path) or ".")
        labels.update(row.labels)
    names = sorted(labels)
    numbers = {name: number for number, name in enumerate(names)}
    again = _duplicates(place, hashes)
    for row in again.values():
        left_out.add(_DUPLICATE, f"{_list_path(place)}, line {row.line}")
    return Scan(
        place=place,
        format="list",
        classes=names,
        watched=(*place.names, *sorted(folders)),  # an image that is replaced changes its folder
        rows=_file_rows(place, numbers, again.keys()),
        left_out=left_out,
    )


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits that a list names; empty if it has no column of splits."""
    return tuple(dict.fromkeys(row.split for row in _rows(place) if row.split))


def _duplicates(place: ResolvedLocation, hashes: "array[int]") -> dict[int, _Row]:
    """The rows, by number, that repeat an earlier one. DataError if they contradict it.

    Hashes of all paths find the few candidates, so that a long list needs no table of its paths.
    """
    twice = several(hashes)
    first: dict[str, _Row] = {}
    again = {}
    for number, row in enumerate(_rows(place) if twice else ()):
        known = first.setdefault(row.path, row) if hash(row.path) in twice else row
        if known is row:
            continue
        if ({*known.labels}, known.split) != ({*row.labels}, row.split):
            hint = "" if row.has_list else f"; several labels go into a column {LISTS}, as in a|b"
            raise DataError(
                "list.image-contradicted",
                "{path}, line {line}: {image}: is {value} here and {other} in line {other_line}: "
                "leave one out{hint}",
                path=_list_path(place),
                line=row.line,
                image=row.path,
                value=_about(row),
                other=_about(known),
                other_line=known.line,
                hint=hint,
            )
        again[number] = row
    return again


def _list_path(place: ResolvedLocation) -> str:
    return place.path(place.names[0])


def _about(row: _Row) -> str:
    split = f" of {row.split}" if row.split else ""
    return repr(_BETWEEN.join(sorted({*row.labels}))) + split


def _file_rows(
    place: ResolvedLocation, label_of: dict[str, int], left_out: Container[int]
) -> Iterator[FileRows]:
    """The images of the list, without the rows that are left out."""
    rows = (row for number, row in enumerate(_rows(place)) if number not in left_out)
    size_of = partial(_size, place, cache(os.path.realpath))
    with ThreadPoolExecutor(num_threads(place)) as pool:
        while chunk := list(islice(rows, _CHUNK)):
            for row, size in zip(chunk, pool.map(size_of, chunk), strict=True):
                labels = [label_of[label] for label in row.labels]
                counts = [len(labels)] if row.has_list else None
                yield FileRows(row.path, [0], [size], labels, row.split or "", counts=counts)


def _size(place: ResolvedLocation, real_path: Callable[[str], str], row: _Row) -> int:
    """Bytes of an image. DataError if it is no file, or a link leads out of the folder."""
    path = place.path(row.path)
    try:
        stat = os.stat(path)
        is_link = os.path.islink(path)
    except OSError as error:
        shown = os.path.abspath(path) if row.path.startswith("..") else row.path
        hint = "; write / for \\" if "\\" in row.path else ""
        raise DataError(
            "list.unreadable-image",
            "{path}, line {line}: {image}: {reason}{hint}",
            path=_list_path(place),
            line=row.line,
            image=shown,
            reason=error.strerror,
            hint=hint,
        ) from None
    if not S_ISREG(stat.st_mode):
        raise DataError(
            "list.image-not-a-file",
            "{path}, line {line}: {image}: is not a file",
            path=_list_path(place),
            line=row.line,
            image=row.path,
        )
    folder = real_path(_root(place))
    real = os.path.realpath(path) if is_link else real_path(os.path.dirname(path))
    if not os.path.join(real, "").startswith(os.path.join(folder, "")):
        raise DataError(
            "list.link-leaves-folder",
            "{path}, line {line}: {image}: links lead to {target}, outside of {folder}: name a "
            "folder that holds all images, and that relative paths start from: "
            "{location}#root=FOLDER",
            path=_list_path(place),
            line=row.line,
            image=row.path,
            target=real,
            folder=_root(place),
            location=place.location,
        )
    return stat.st_size


# --- the lines ---


def _suffix(place: ResolvedLocation) -> str:
    return os.path.splitext(place.names[0])[1].lower()


def _root(place: ResolvedLocation) -> str:
    """The absolute path of the folder that holds the images; the option is relative to the list."""
    return os.path.abspath(os.path.join(place.root, place.options.get("root", "")))


class _Columns(NamedTuple):
    """The positions of the columns that are read."""

    path: int
    label: int
    split: int | None
    has_list: bool

    @property
    def read(self) -> tuple[int | None, ...]:
        return self.path, self.label, self.split


def _columns(names: Sequence[str], place: ResolvedLocation) -> _Columns:
    """DataError if several columns can be meant, or none."""
    list_path, options = _list_path(place), place.options
    find = partial(find_column, names=names, path=list_path, header=_HEADER)
    path, label = find("path"), find("label", wanted=options.get("label"))
    split = find_split(names, list_path, header=_HEADER, wanted=options.get("split"))
    if path is None or label is None:
        raise missing("path" if path is None else "label", names, list_path, _HEADER)
    return _Columns(path, label, split, plain(names[label]) == LISTS)


def _rows(place: ResolvedLocation, left_out: LeftOut | None = None) -> Iterator[_Row]:
    """The rows, checked one by one; adds to `left_out` the columns that are not read."""
    path = _list_path(place)
    if is_remote(path):
        raise DataError(
            "list.not-local",
            "{path}: a list of images is read from a local file: download it with its images, or "
            "pack them (`trainyard data pack`) and serve the shards",
            path=path,
        )
    inside = os.path.join(_root(place), "")
    here = os.path.join(os.path.abspath(place.root), "")
    real_here = os.path.realpath(here)  # `..` is the folder above this one, whatever links to it
    kinds: dict[str, str] = {}
    for row in _csv_rows(place, left_out):
        if not row.path or "" in row.labels or (row.split == "" and not row.cell):
            label = "one of its labels" if row.has_list else "its label"
            empty = "its path" if not row.path else label if "" in row.labels else "its split"
            raise DataError(
                "list.empty-cell",
                "{path}, line {line}: {name} is empty",
                path=path,
                line=row.line,
                name=empty,
            )
        full = os.path.normpath(os.path.join(inside, row.path))
        if "://" in row.path:
            raise DataError(
                "list.image-is-url",
                "{path}, line {line}: {image!r} is a URL: download the images",
                path=path,
                line=row.line,
                image=row.path,
            )
        if not is_inside(full.removeprefix(inside)):
            raise DataError(
                "list.image-outside-folder",
                "{path}, line {line}: {image!r} lies outside of {folder}: name a folder that "
                "holds all images, and that relative paths start from: {location}#root=FOLDER",
                path=path,
                line=row.line,
                image=row.path,
                folder=_root(place),
                location=place.location,
            )
        is_here = full.startswith(here)
        name = full[len(here) :] if is_here else os.path.relpath(full, real_here)
        if row.split is not None:
            _check_split(path, row, kinds)
        yield row._replace(path=name)


def _check_split(path: str, row: _Row, kinds: dict[str, str]) -> None:
    """DataError for a cell that names no split, or one that another kind of cell names too.

    `kinds`: the first cell of each split.
    """
    if not row.split:
        hint = did_you_mean(row.cell, ("train", "val", "test", "training", "validation"))
        raise DataError(
            "list.unknown-split",
            "{path}, line {line}: its split is {split!r}, none of train, val and test{hint}",
            path=path,
            line=row.line,
            split=row.cell,
            hint=hint,
        )
    first = kinds.setdefault(row.split, row.cell)
    if rest_of(first) != rest_of(row.cell):
        raise DataError(
            "list.split-of-two-kinds",
            "{path}, line {line}: its split is {value!r}, and {other!r} before it is {split} too: "
            "give one of them another name, or leave its rows out",
            path=path,
            line=row.line,
            value=row.cell,
            other=first,
            split=row.split,
        )


def _text_lines(path: str) -> Iterator[str]:
    """The lines of a file with their ends; DataError names the first that is not UTF-8."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise DataError(
                        "list.not-utf8",
                        "{path}, line {line}: is not UTF-8: save the list as UTF-8",
                        path=path,
                        line=number,
                    ) from None
    except OSError as error:
        raise DataError("file.unreadable", path=path, reason=error.strerror) from None


def _csv_rows(place: ResolvedLocation, left_out: LeftOut | None) -> Iterator[_Row]:
    path = _list_path(place)
    lines = _text_lines(path)
    first = next(lines, "")
    delimiter = max(_DELIMITERS, key=_QUOTED.sub("", first).count)
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        columns = _columns(names, place)
        unread = Unread(names, columns.read)
        if left_out is not None:
            left_out.update(unread.left_out)
        is_divided = columns.split is not None or "split" in place.options
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue  # a blank line, or the empty row of a spreadsheet
            if len(cells) != len(names):
                raise DataError(
                    "list.wrong-cell-count",
                    "{path}, line {line}: has {num_cells} cells, and the header {num_columns}: "
                    "put quotes around a text with {delimiter!r} in it",
                    path=path,
                    line=reader.line_num,
                    num_cells=len(cells),
                    num_columns=len(names),
                    delimiter=reader.dialect.delimiter,
                )
            if not is_divided:
                unread.see(cells)
            yield _row(reader.line_num, columns, cells, names)
    except csv.Error as error:
        raise DataError(
            "list.not-csv",
            "{path}, line {line}: is not CSV ({reason})",
            path=path,
            line=reader.line_num,
            reason=str(error),
        ) from None
    if not is_divided and (found := unread.divided()):
        location = place.location + place.option_text
        raise DataError(
            "list.unread-split",
            "{path}: its column {column!r} looks like a split ({values}): "
            "'{location}#split={column}' takes it as one, '{location}#split=none' passes over it",
            path=path,
            column=found[0],
            values=found[1],
            location=location,
        )


def _row(line: int, columns: _Columns, cells: Sequence[str], names: Sequence[str]) -> _Row:
    label, split, cell = cells[columns.label].strip(), None, ""
    labels = [label]
    if columns.has_list:
        labels = [part.strip() for part in label.split(_BETWEEN)] if label else []
    if columns.split is not None:
        cell = cells[columns.split].strip()
        split = split_of_cell(names[columns.split], cell)
    return _Row(line, cells[columns.path].strip(), labels, columns.has_list, split, cell)
