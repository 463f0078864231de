"""A list of image files: a row for each image, with its path, its label and maybe its split.

A header names the columns, see `columns.py`; without one they have numbers, from 1, and the cells
tell which of them names the images. A cell is a path relative to the list's folder, or to FOLDER in
`LIST#root=FOLDER`, or stands for the image below it whose path ends so, see `cells.py`. Images stay
in the folder, links followed. Classes are the sorted labels, or the folders of the images where a
list has no labels. Samples come in the list's order.

`FOLDER#train=LIST#val=LIST` are the images of a folder, or the rows of a list, whose images each
list names.

`labels` instead of `label` has any number of labels for each image, also none, separated by "|".
"""

import os
from array import array
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from stat import S_ISREG

from trainyard.data.formats.cells import Images, parts_of
from trainyard.data.formats.columns import LISTS, has_column
from trainyard.data.formats.format import Format
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.list_json import SUFFIXES as JSON
from trainyard.data.formats.list_rows import (
    BETWEEN,
    ListRows,
    Row,
    find_divider,
    has_split_list,
    named_splits,
    open_table,
    split_by,
)
from trainyard.data.formats.list_splits import read_splits
from trainyard.data.formats.list_text import TEXTS
from trainyard.data.formats.scan import FileRows, Scan, num_threads, reading_pool, several
from trainyard.data.formats.split_names import SPLITS, is_split_word
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError

SUFFIXES = (*TEXTS, *JSON)
_CHUNK = 256  # images that a thread looks at in a row
_DUPLICATE = "rows of an image that has a row already"


def recognises(place: ResolvedLocation) -> bool:
    """True for a single file with the suffix of a list, and for a folder with a list of a split."""
    if place.is_folder:
        return bool(named_splits(place)) and not is_remote(place.root)
    return len(place.names) == 1 and place.names[0].lower().endswith(SUFFIXES)


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a list. DataError for a wrong line, and for a missing image."""
    lists = _lists(place)
    surveys = [one.survey() for one in lists]
    left_out, hashes = LeftOut(), array("q")
    for one, survey in zip(lists, surveys, strict=True):
        one.tell(survey)
        one.has_list |= any(survey.several for survey in surveys)
        left_out.update(survey.left_out)
        hashes.extend(survey.hashes)
    again = _duplicates(lists, hashes)
    for one, row in again.values():
        left_out.add(_DUPLICATE, f"{one.path}, line {row.line}")
    labels = {*chain.from_iterable(survey.labels for survey in surveys)}
    name_of = lists[0].class_names(labels, surveys[0].names)
    classes = sorted({*name_of.values()})
    number_of = {name: number for number, name in enumerate(classes)}
    paths = [path for one in lists for path in (one.path, *one.beside)]
    names = [os.path.relpath(path, place.root) for path in paths]
    # An image that is replaced changes its folder.
    folders = {*chain.from_iterable(survey.folders for survey in surveys)}
    return Scan(
        place=place,
        format="list",
        classes=classes,
        watched=(*names, *sorted(folders)),
        rows=_file_rows(lists, {key: number_of[name_of[key]] for key in name_of}, again.keys()),
        left_out=left_out,
    )


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits that a list names; empty if it has no column of splits."""
    if named := named_splits(place):
        return named
    if has_split_list(place):
        return tuple(dict.fromkeys(read_splits(_beside(place, "split")).values()))
    path, wanted = _list_path(place), place.options.get("split")
    table = open_table(path, partial(_has_split, wanted))
    at = find_divider(table, wanted)
    if at is None:
        return ()
    cells = dict.fromkeys(row[at].strip() for _, row in table.rows())
    splits = (split_by(table.names[at], cell, wanted) for cell in cells)
    return tuple(dict.fromkeys(split for split in splits if split))


def cells(place: ResolvedLocation, column: str) -> dict[str, str] | None:
    """The cell of a column for each image of a list; None without such a column."""
    lists, found = _lists(place), dict[str, str]()
    for one in lists:
        names = [name.strip() for name in one.table.names]
        if column not in names:
            return None
        one.survey()
        found |= {row.path: row.cells[names.index(column)].strip() for row in one.rows()}
    return found


def _has_split(wanted: str | None, cells: Sequence[str]) -> bool:
    """True for a row, and False for a header, as far as the column of the splits needs it."""
    is_header = has_column("path", cells) or wanted in cells
    is_numbered = wanted is not None and wanted.isdigit()
    return not is_header and (is_numbered or any(map(is_split_word, map(str.lower, cells))))


def _lists(place: ResolvedLocation) -> list[ListRows]:
    """The list of a location, or the one of each split."""
    images = Images(os.path.abspath(place.path(place.options.get("root", ""))))
    # The columns that options name are those of the list itself, where there is one.
    shared = {name: place.options[name] for name in ("root", *SPLITS) if name in place.options}
    text = "".join(f"#{name}={value}" for name, value in shared.items())
    own = place if place.is_folder else replace(place, option_text=text)
    parts = [ListRows(own, _beside(place, split), images, split) for split in named_splits(place)]
    if place.is_folder:
        _check_alike(parts)
        return parts
    rows = ListRows(place, _list_path(place), images)
    if has_split_list(place):
        rows.join(_beside(place, "split"))
        return [rows]
    members = dict[str, str]()
    for part in parts:
        part.survey()
        rows.members, rows.beside = members, [one.path for one in parts]
        for row in part.rows():
            if (split := members.setdefault(row.path, part.split or "")) != part.split:
                raise DataError(
                    "list.image-of-two-splits",
                    "{path}, line {line}: {image}: is in the list of {split} too: leave one out",
                    path=part.path,
                    line=row.line,
                    image=row.path,
                    split=split,
                )
    return [rows]


def _check_alike(parts: Sequence[ListRows]) -> None:
    """DataError if some lists have labels, and others leave the classes to the folders."""
    labelled = [part.path for part in parts if part.labels]
    if labelled and len(labelled) < len(parts):
        raise DataError(
            "list.labels-in-some",
            "{path}: has labels, and {other} has none: give both lists labels, or neither",
            path=labelled[0],
            other=next(part.path for part in parts if not part.labels),
        )


def _beside(place: ResolvedLocation, split: str) -> str:
    """The path of the list of a split: in the folder of the images, or in the one above it."""
    name = place.options[split]
    paths = [os.path.abspath(place.path(path)) for path in (name, os.path.join("..", name))]
    for path in paths:
        if os.path.isfile(path):
            return path
    raise DataError(
        "list.no-list-of-split",
        "{location}: there is no list {name!r} for {split}, neither {path} nor {other}",
        location=place.location,
        name=name,
        split=split,
        path=paths[0],
        other=paths[1],
    )


def _duplicates(lists: Sequence[ListRows], hashes: "array[int]") -> dict[int, tuple[ListRows, Row]]:
    """The rows, by number, that repeat an earlier one. DataError if they contradict it.

    Hashes of all paths find the few candidates, so that a long list needs no table of its paths.
    """
    twice = several(hashes)
    first: dict[str, tuple[ListRows, Row]] = {}
    again = {}
    rows = ((one, row) for one in lists for row in one.rows())
    for number, (one, row) in enumerate(rows if twice else ()):
        if hash(row.path) not in twice:
            continue
        other, known = first.setdefault(row.path, (one, row))
        if known is row:
            continue
        _check_repeated(one, row, other, known)
        again[number] = one, row
    return again


def _check_repeated(one: ListRows, row: Row, other: ListRows, known: Row) -> None:
    """DataError if a row contradicts an earlier one of its image."""
    other_line = f"{known.line}" if other is one else f"{known.line} of {other.path}"
    contradiction = partial(
        DataError, path=one.path, line=row.line, image=row.path, other_line=other_line
    )
    if one.images.is_searched and parts_of(row.cell) != parts_of(known.cell):
        raise contradiction(
            "list.cells-of-one-image",
            "{path}, line {line}: {cell!r} stands for {image}, as {other!r} does in line "
            "{other_line}: fetch the missing image, or write the paths of both",
            cell=row.cell,
            other=known.cell,
        )
    if ({*known.labels}, known.split) != ({*row.labels}, row.split):
        hint = f"; several labels go into a column {LISTS}, as in a|b"
        raise contradiction(
            "list.image-contradicted",
            "{path}, line {line}: {image}: is {value} here and {other} in line {other_line}: "
            "leave one out{hint}",
            value=_about(row),
            other=_about(known),
            hint="" if one.has_list or known.split != row.split else hint,
        )


def _list_path(place: ResolvedLocation) -> str:
    path = place.path(place.names[0])
    if is_remote(path):
        raise DataError(
            "list.not-local",
            "{path}: a list of images is read from a local file: download it with its images, or "
            "pack them (`trainyard data pack`) and serve the shards",
            path=path,
        )
    return path


def _about(row: Row) -> str:
    split = f" of {row.split}" if row.split else ""
    return repr(BETWEEN.join(sorted({*row.labels}))) + split


def _file_rows(
    lists: Sequence[ListRows], label_of: dict[str, int], left_out: Container[int]
) -> Iterator[FileRows]:
    """The images of the lists, without the rows that are left out."""
    number, threads, start = count(), num_threads(lists[0].place), [0]
    with reading_pool(threads) as pool:
        for one in lists:
            kept = (row for row in one.rows() if next(number) not in left_out)
            looks_of = partial(_look, one, set[str]())
            while some := list(islice(kept, threads * _CHUNK)):
                chunks = [some[first : first + _CHUNK] for first in range(0, len(some), _CHUNK)]
                looks = chain.from_iterable(pool.map(looks_of, chunks))
                for row, (size, time) in zip(some, looks, strict=True):
                    labels = [label_of[label] for label in row.labels]
                    counts = [len(labels)] if one.has_list else None
                    split = row.split or ""
                    yield FileRows(row.path, start, [size], labels, split, counts=counts, time=time)


def _look(rows: ListRows, inside: set[str], some: Sequence[Row]) -> list[tuple[int, int]]:
    """Bytes and times of images. `inside`: folders that are in the root, links followed."""
    prefix, found = os.path.join(rows.place.root, ""), []
    for row in some:
        folder, stat = row.path.rpartition("/")[0], None
        with suppress(OSError):
            stat = os.lstat(prefix + row.path)
        if stat is None or folder not in inside or not S_ISREG(stat.st_mode):
            if stat is not None and S_ISREG(stat.st_mode):
                inside.add(folder)
            stat = _look_at(rows, row)
        found.append((stat.st_size, stat.st_mtime_ns))
    return found


def _look_at(rows: ListRows, row: Row) -> os.stat_result:
    """The state of an image's file. DataError if it is none, or a link leads out of the folder."""
    path = rows.place.path(row.path)
    wrong = partial(DataError, path=rows.path, line=row.line)
    try:
        stat = os.stat(path)
    except OSError as error:
        raise wrong(
            "list.unreadable-image",
            "{path}, line {line}: {image}: {reason}{hint}",
            image=os.path.abspath(path) if row.path.startswith("..") else row.path,
            reason=error.strerror,
            hint=rows.hint(row.cell),
        ) from None
    if not S_ISREG(stat.st_mode):
        raise wrong(
            "list.image-not-a-file",
            "{path}, line {line}: {image}: is not a file",
            image=row.path,
        )
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(os.path.realpath(rows.root), "")):
        raise wrong(
            "list.link-leaves-folder",
            "{path}, line {line}: {image}: links lead to {target}, outside of {folder}: name a "
            "folder that holds all images, and that relative paths start from: "
            "{location}#root=FOLDER",
            image=row.path,
            target=real,
            folder=rows.root,
            location=rows.place.location,
        )
    return stat


FORMAT = Format(
    name="list",
    recognises=recognises,
    scan=scan,
    kind="image",
    options=("path", "label", "between", "unlabelled", "root", "split", *SPLITS),
    splits_inside=splits_inside,
    cells=cells,
)
