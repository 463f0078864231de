"""A list of image files: CSV with a header, or JSON lines, with `path`, `label` and maybe `split`.

Paths are relative to the list's folder and stay in it. Classes are the sorted labels, and samples
come in the list's order. Other columns are ignored.

`labels` instead of `label` has any number of labels for each image, also none: in CSV separated by
"|", in JSON a list.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from stat import S_ISREG
from typing import Any, NamedTuple

from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.scan import (
    FileRows,
    FileScan,
    Scan,
    Via,
    all_rows,
    directly,
    num_threads,
)
from trainyard.data.formats.split_names import split_named
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.manifest import is_inside
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError

_SUFFIXES = (".csv", ".jsonl")
_ONE, _SEVERAL = ("path", "label", "split"), ("path", "labels", "split")
_BETWEEN = "|"  # labels in a cell of CSV
_CHUNK = 4096  # files whose sizes are asked for at once


class _Row(NamedTuple):
    where: str  # file and line, for messages
    path: str  # relative to the list's folder
    labels: list[str]
    has_list: bool  # True for any number of labels
    split: str  # "" without a column of splits


def recognises(place: ResolvedLocation) -> bool:
    """True if a location is a single file with the suffix of a list."""
    return not place.is_folder and len(place.names) == 1 and place.names[0].endswith(_SUFFIXES)


def scan(place: ResolvedLocation, via: Via = directly) -> Scan:
    """The samples of a list. DataError for a wrong line, and for a missing image."""
    folders, labels, count = set(), set(), 0
    for row in _rows(place):
        count += 1
        folders.add(os.path.dirname(row.path) or ".")
        labels.update(row.labels)
    names = sorted(labels)
    numbers = {name: number for number, name in enumerate(names)}
    left_out = LeftOut()
    chunks = [str(number) for number in range(-(-count // _CHUNK))]
    return Scan(
        place=place,
        format="list",
        classes=names,
        watched=(*place.names, *sorted(folders)),  # an image that is replaced changes its folder
        rows=all_rows(via(partial(_read_chunks, place, numbers), chunks), left_out),
        left_out=left_out,
    )


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits that a list names; empty if it has no column of splits."""
    return tuple(dict.fromkeys(row.split for row in _rows(place) if row.split))


def _read_chunks(
    place: ResolvedLocation, label_of: dict[str, int], chunks: Sequence[str]
) -> Iterator[FileScan]:
    """Chunks of the list, by their numbers."""
    rows, at = _rows(place), 0
    with ThreadPoolExecutor(num_threads(place)) as pool:
        for number in map(int, chunks):
            chunk = list(islice(rows, (number - at) * _CHUNK, (number - at + 1) * _CHUNK))
            at = number + 1
            sizes = pool.map(partial(_size, place), chunk)
            yield FileScan(
                [_file_rows(row, size, label_of) for row, size in zip(chunk, sizes, strict=True)]
            )


def _file_rows(row: _Row, size: int, label_of: dict[str, int]) -> FileRows:
    labels = [label_of[label] for label in row.labels]
    counts = [len(labels)] if row.has_list else None
    return FileRows(row.path, [0], [size], labels, row.split, counts=counts)


def _size(place: ResolvedLocation, row: _Row) -> int:
    try:
        stat = os.stat(place.path(row.path))
    except OSError as error:
        raise DataError(f"{row.where}: {row.path}: {error.strerror}") from None
    if not S_ISREG(stat.st_mode):
        raise DataError(f"{row.where}: {row.path}: is not a file")
    return stat.st_size


# --- the lines ---


def _rows(place: ResolvedLocation) -> Iterator[_Row]:
    path = place.path(place.names[0])
    if is_remote(path):
        raise DataError(
            f"{path}: a list of images is read from a local file: download it with its images, or "
            "pack them (`trainyard data pack`) and serve the shards"
        )
    lines = _csv_rows(path) if path.endswith(".csv") else _json_rows(path)
    for where, fields in lines:
        yield _row(place, where, fields)


_Fields = dict[str, Any]
"""A line's values: texts; `labels` is a list of texts."""


def _row(place: ResolvedLocation, where: str, fields: _Fields) -> _Row:
    empty = [name for name in _ONE if not fields.get(name, "x")]
    if empty:
        raise DataError(f"{where}: its {empty[0]} is empty")
    path = fields["path"]
    if os.path.isabs(path):
        path = os.path.relpath(path, os.path.abspath(place.root))
    if not is_inside(path):
        raise DataError(
            f"{where}: {fields['path']!r} does not lie in the folder of the list: move the list to "
            "a folder that holds all its images"
        )
    split = fields.get("split", "")
    labels = fields["labels"] if "labels" in fields else [fields["label"]]
    if "" in labels:
        raise DataError(f"{where}: one of its labels is empty")
    return _Row(where, path, labels, "labels" in fields, split_named(split) or split)


def _text_lines(path: str) -> Iterator[str]:
    """The lines of a file with their ends; DataError names the first that is not UTF-8."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise DataError(
                        f"{path}, line {number}: is not UTF-8: save the list as UTF-8"
                    ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _names(given: Any) -> tuple[str, ...]:
    """The names of the values that are read."""
    return _SEVERAL if "labels" in given and "label" not in given else _ONE


def _csv_rows(path: str) -> Iterator[tuple[str, _Fields]]:
    reader = csv.reader(_text_lines(path), strict=True)
    try:
        header = next(reader, [])
        names = _names(header)
        missing = [name for name in names[:2] if name not in header]
        if missing:
            raise DataError(
                f"{path}, line 1: has no column {missing[0]!r}: write a header, "
                "path,label or path,label,split; or labels, for any number"
            )
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if len(cells) == len(header):
                found = dict(zip(header, cells, strict=True))
                fields: _Fields = {name: found[name] for name in names if name in found}
                if "labels" in fields:
                    parts = fields["labels"].split(_BETWEEN) if fields["labels"].strip() else []
                    fields["labels"] = [part.strip() for part in parts]
                yield where, fields
            elif cells:
                raise DataError(
                    f"{where}: has {len(cells)} cells, and the header {len(header)}: put quotes "
                    "around a text with a comma"
                )
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: is not CSV ({error})") from None


def _json_rows(path: str) -> Iterator[tuple[str, _Fields]]:
    splits = has_lists = None  # whether the lines have a split, and labels
    for number, line in enumerate(_text_lines(path), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        fields = _json_fields(where, line)
        if splits is None:
            splits = "split" in fields
        if splits != ("split" in fields):
            raise DataError(f"{where}: some lines have a split and some none: write it in all")
        if has_lists is None:
            has_lists = "labels" in fields
        if has_lists != ("labels" in fields):
            raise DataError(f"{where}: some lines have label and some labels: write one of them")
        yield where, fields


def _json_fields(where: str, line: str) -> _Fields:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    names = _names(found) if isinstance(found, dict) else _ONE
    if not isinstance(found, dict) or not all(name in found for name in names[:2]):
        raise DataError(f'{where}: is not a JSON object with "path" and "label" or "labels"')
    fields = {name: found[name] for name in names if name in found}
    if "label" in fields:
        fields["label"] = _text(fields["label"])
    labels = fields.get("labels", [])
    if not isinstance(labels, list):
        raise DataError(f"{where}: its labels are not a list: {json.dumps(labels)}")
    if labels:
        fields["labels"] = [_text(label) for label in labels]
    for name, value in fields.items():
        for part in value if name == "labels" else [value]:
            if not isinstance(part, str):
                hint = ": write several as labels" if isinstance(part, list) else ""
                raise DataError(f"{where}: its {name} is not a text: {json.dumps(part)}{hint}")
    return fields


def _text(label: Any) -> Any:
    """A whole number as text; other values as they are."""
    return str(label) if isinstance(label, int) and not isinstance(label, bool) else label
