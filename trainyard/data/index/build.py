"""Opens the index of a location: the saved one if it is up to date, else a new one by a scan."""

import hashlib
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainyard.data import formats
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.remedies import remedy_beside
from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.index.label_lists import joined
from trainyard.data.index.label_space import plain_names
from trainyard.data.index.names_beside import files_beside, names_beside
from trainyard.data.index.outside import names_stay_inside
from trainyard.data.index.stamps import (
    IMAGES,
    Stamps,
    check_present,
    images_stamp,
    is_stale,
    stamps,
)
from trainyard.data.index.table import (
    DTYPES,
    Columns,
    Index,
    StringColumn,
    into_cache,
    load_index,
    report_damage,
    save_index,
)
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.data.storage.manifest import FILE_NAME, Manifest, manifest_of, shards_listed
from trainyard.data.storage.source import is_remote, real_path
from trainyard.errors import DataError
from trainyard.files import cache_folder
from trainyard.hints import closest
from trainyard.printable import print_line

Header = dict[str, Any]


class Progress(Protocol):
    def __call__(self, count: int, files: tuple[int, int] | None = None, /) -> None:
        """Called now and then with the number of samples found so far.

        `files`: the number of shards done, and of all; None unless there are several.
        """


def open_index(location: str | os.PathLike[str], progress: Progress = lambda *_: None) -> Index:
    """The index of a location: the saved one if the data has not changed since, else a new one."""
    location = os.fspath(location)
    for index in _saved(find_place(location)):
        if not is_stale(index):
            _tell_untagged(location, index.stamps)
            return index
    return build_index(location, progress)


def saved_index(location: str) -> Index | None:
    """The saved index, even if the data has changed since; None if there is none."""
    return min(_saved(find_place(location)), key=is_stale, default=None)


def build_index(
    location: str, progress: Progress = lambda *_: None, *, beside: bool = False
) -> Index:
    """Scans a location and saves its index: of shards beside them, of single images in the cache.

    `beside`: of single images beside them too, where machines share the data. A place that is
    read-only gives way to the other one. For a file of several splits, one scan finds and saves
    the indices of all. DataError for a missing file.
    """
    place = find_place(location)
    if is_remote(place.root):
        check_present(place)
    scan = formats.scan(place)
    headers, tables = _collect(scan, progress)
    beside = beside or scan.files > 0
    saved = {
        split: _save(replace(place, split=split or None), headers[split], table, beside)
        for split, table in tables.items()
    }
    return saved[place.split or ""]


def index_scan(scan: Scan, path: Path, progress: Progress = lambda *_: None) -> Index:
    """The index of a scan that the caller made, saved at `path`."""
    headers, tables = _collect(scan, progress)
    split = scan.place.split or ""
    return save_index(path, headers[split] | {"root": scan.place.root}, tables[split].columns())


def _collect(scan: Scan, progress: Progress) -> tuple[dict[str, Header], dict[str, "_Table"]]:
    """The header and the table of each split in a scan. DataError without the place's own split."""
    # Before the rows: a change during the scan must make this index stale.
    watched = _stamps_of(scan)
    _tell_untagged(scan.place.location, watched)
    tables = _tables(scan, progress)
    if (scan.place.split or "") not in tables:
        raise _no_table(scan, [split for split in tables if split])
    classes, numbers = _name_classes(scan, tables, watched)
    if not classes and not any(table.label for table in tables.values()):
        raise DataError("data.no-labels", location=scan.place.location)
    common = {
        "format": scan.format,
        "has_names": classes is not None,
        "numbers": numbers,
    }
    headers = {
        split: common
        | {
            "classes": classes or table.numbers(),
            "stamps": watched | _stamp_of_images(scan, table),
            "left_out": _left_out(scan, tables, split).kinds,
        }
        for split, table in tables.items()
    }
    return headers, tables


def _stamps_of(scan: Scan) -> Stamps:
    """The stamps of the files and folders whose change makes an index stale."""
    root = scan.place.root
    # A manifest may name the classes; the server's is read with the splits at each start.
    manifests = () if is_remote(root) else (FILE_NAME, os.path.join("..", FILE_NAME))
    shards = frozenset(scan.watched if scan.files else ())
    beside = files_beside(root) if _is_numbered(scan) else ()
    return stamps(root, (*scan.watched, *manifests, *beside), shards)


def _tell_untagged(location: str, watched: Stamps) -> None:
    """Print that a change of a file may be missed, at each opening of such a location."""
    if any(stamp is not None and stamp[0] == "" for stamp in watched.values()):
        remark = "its server sends neither ETag nor Last-Modified: a change that keeps the size of "
        print_line(f"{location}: {remark}a file is missed")


def _left_out(scan: Scan, tables: dict[str, "_Table"], split: str) -> LeftOut:
    """The account of a scan for one split: also the rows of further splits, such as test."""
    found = LeftOut(scan.left_out.kinds)
    used = {split, "train", "val" if "val" in tables else "test"}  # as find_splits chooses
    for other in tables.keys() - used:
        found.add(f"rows of split {other}", f"{scan.place.location}#{other}", len(tables[other]))
    return found


def _stamp_of_images(scan: Scan, table: "_Table") -> Stamps:
    """The stamp of local files of one image each; nothing for shards, which have their own."""
    names = table.file_names
    if is_remote(scan.place.root) or not scan.watched or names[0] in scan.watched:
        return {}
    sizes = np.zeros(len(names), np.int64)
    sizes[np.asarray(table.file)] = table.size
    times = np.frombuffer(table.times, np.int64) if table.times else None
    return {IMAGES: images_stamp(scan.place.root, names, sizes, times)}


def _no_table(scan: Scan, found: list[str]) -> DataError:
    """The error of a scan without samples of the place's split; `found`: the splits with some."""
    place = scan.place
    if not found and place.split:
        return DataError(
            "data.no-splits",
            "{location}: holds no splits; leave #{split} away",
            location=place.location,
            split=place.split,
        )
    if not found:
        hint = f"; left out: {scan.left_out}" if scan.left_out else ""
        hint += remedy_beside(place.root, scan.left_out)
        return DataError(
            "data.all-left-out",
            "{location}: no images found in it{hint}",
            location=place.location,
            hint=hint,
        )
    meant = closest(place.split or "", found) or found
    choices = " or ".join(f"{place.with_options}#{split}" for split in meant)
    return DataError(
        "data.several-splits",
        "{location}: holds {num_splits} splits; write {names}",
        location=place.location,
        num_splits=len(found),
        names=choices,
    )


# --- the rows, as they are found ---


class _Table:
    """The columns of an index that is being built, by their names there."""

    def __init__(self) -> None:
        self.file, self.offset, self.size = array("i"), array("q"), array("q")
        self.label, self.count = array("i"), array("i")
        self.has_lists: bool | None = None  # None before the first row
        self.snappy_start, self.snappy_length = array("i"), array("i")
        self.file_name_text, self.file_name_ends = bytearray(), array("q")
        self.times = array("q")
        """Of all files, or of none."""
        self._last: str | None = None

    def __len__(self) -> int:
        return len(self.size)

    def add(self, rows: FileRows) -> None:
        has_lists = rows.counts is not None if len(rows.sizes) else self.has_lists
        if self.has_lists not in (None, has_lists):
            raise DataError(
                "data.mixed-labels",
                "{path}: has {kind}, and the files before it {other}: write lists everywhere, or "
                "nowhere",
                path=rows.path,
                kind=_kind(has_lists),
                other=_kind(not has_lists),
            )
        self.has_lists = has_lists
        if rows.path != self._last:
            self.file_name_text += os.fsencode(rows.path)
            self.file_name_ends.append(len(self.file_name_text))
            self._last = rows.path
            if rows.time is not None:
                self.times.append(rows.time)
        self.file.extend((len(self.file_name_ends) - 1,) * len(rows.sizes))
        self.offset.extend(rows.offsets)
        self.size.extend(rows.sizes)
        self.label.extend(rows.labels)
        if rows.counts:
            self.count.extend(rows.counts)
        if rows.snappy_length or self.snappy_length:
            for column, own in (
                (self.snappy_start, rows.snappy_start),
                (self.snappy_length, rows.snappy_length),
            ):
                column.frombytes(bytes(column.itemsize * (len(self) - len(own) - len(column))))
                column.extend(own)

    @property
    def highest(self) -> int:
        """The highest label, -1 without any; in C, as there may be 14 million."""
        return int(np.frombuffer(self.label, "<i4").max(initial=-1))

    def numbers(self) -> list[str]:
        return [str(number) for number in range(self.highest + 1)]

    def columns(self) -> Columns:
        names = vars(self).keys() & DTYPES.keys()
        if not any(self.snappy_length):
            names -= {"snappy_start", "snappy_length"}
        columns: Columns = {n: np.frombuffer(getattr(self, n), DTYPES[n]) for n in names}
        if self.has_lists:
            ends, values = joined(np.frombuffer(self.count, "<i4"), columns["label"])
            label = np.arange(len(self), dtype="<i4")
            columns |= {"label": label, "list_ends": ends, "list_values": values}
        return columns

    @property
    def file_names(self) -> StringColumn:
        text = np.frombuffer(self.file_name_text, "u1")
        return StringColumn(text, np.frombuffer(self.file_name_ends, "<i8"))


def _kind(has_lists: bool | None) -> str:
    return "lists of labels" if has_lists else "one label for each image"


def _tables(scan: Scan, progress: Progress) -> dict[str, _Table]:
    """A table for each split; under "" where the files hold no splits."""
    tables = defaultdict[str, _Table](_Table)
    count, done = 0, []
    for rows in scan.rows:
        tables[rows.split].add(rows)
        count += len(rows.sizes)
        if scan.files > 1:
            ended = sum(len(table.file_name_ends) for table in tables.values())
            done = [(min(ended, scan.files), scan.files)]
        progress(count, *done)
    return {split: table for split, table in tables.items() if len(table)}


def _name_classes(
    scan: Scan, tables: dict[str, _Table], watched: Stamps
) -> tuple[list[str] | None, list[int]]:
    """The names of the classes, or None, and the numbers that names beside them replace.

    Relabels the tables to number the classes in sorted order.
    """
    place = scan.place
    manifest = manifest_of(place.root, place.names, warns=True)
    known = plain_names((manifest and manifest.classes) or (), place.location)
    labels, names, stored = _names_of_labels(scan, tables, is_described=bool(known))
    # Records of TFRecord name their classes; without any record only the manifest does.
    if not names or (known and known[: len(names)] == names):
        if manifest and known:
            _check_described(scan, manifest, tables, watched)
        return known or None, []
    return _relabelled(tables, labels, names), stored


def _names_of_labels(
    scan: Scan, tables: dict[str, _Table], *, is_described: bool
) -> tuple[list[int], list[str], list[int]]:
    """The labels in the tables, the name of each, and the numbers that names beside them replace.

    `is_described`: names beside the labels or the data do not count, as a manifest has the names.
    """
    where = scan.place.location
    names = plain_names(scan.classes or (), where)
    labels = [*range(len(names) or _highest(tables) + 1)]
    numbers = [*map(int, names)] if _is_numbered(scan) and names else labels
    named = dict[int, str]()
    if not is_described and (named := _names_inside(scan)):
        labels = numbers = sorted(named)
    elif not is_described and _is_numbered(scan):
        named = names_beside(scan.place.root, numbers)
    if not named:
        return labels, names, []
    names = plain_names([named[number] for number in numbers], where)
    return labels, names, [number for _, number in sorted(zip(names, numbers, strict=True))]


def _highest(tables: dict[str, _Table]) -> int:
    return max([0, *(table.highest for table in tables.values())])


def _relabelled(tables: dict[str, _Table], labels: list[int], names: list[str]) -> list[str]:
    """The sorted `names` of labels, by whose numbers there the tables have them afterwards."""
    classes = sorted(names)
    number_of = {name: number for number, name in enumerate(classes)}
    numbers = np.zeros(labels[-1] + 1, "<i4")
    numbers[labels] = [number_of[name] for name in names]
    if classes != names or len(numbers) > len(names):
        for table in tables.values():
            stored = np.frombuffer(table.label, "<i4")
            stored[:] = numbers[stored]
    return classes


def _names_inside(scan: Scan) -> dict[int, str]:
    """The names that the data have beside their labels; empty where they do not fit, as told."""
    if not any(scan.beside.values()):
        return {}
    names = list(scan.beside.values())
    is_one_to_one = all(names) and len({*names}) == len(names)
    what = "names the labels" if is_one_to_one else "has no name for each label: it is not used"
    print_line(f"{scan.place.location}: class_name beside the labels {what}")
    return scan.beside if is_one_to_one else {}


def _is_numbered(scan: Scan) -> bool:
    """True for data without names of classes, and for a list whose labels are numbers."""
    names = scan.classes or ()
    is_number = all(name.isdecimal() and name == f"{int(name)}" for name in names)
    return is_number and (scan.format == "list" or not names)


def _check_described(
    scan: Scan, manifest: Manifest, tables: dict[str, _Table], watched: Stamps
) -> None:
    """DataError if the manifest describes other files than these, or too few classes."""
    place, samples = scan.place, Counter[str]()
    for table in tables.values():
        names = table.file_names
        counts = np.bincount(np.asarray(table.file), minlength=len(names)).tolist()
        samples.update(dict(zip(names, counts, strict=True)))
    for name, shard in shards_listed(manifest, place.root, samples).items():
        stamp = watched.get(name)
        found = samples[name], stamp[1] if stamp else shard.bytes
        if found != (shard.samples, shard.bytes):
            raise DataError(
                "manifest.other-shard",
                "{path}: has {samples:,} samples in {bytes:,} bytes, but dataset.json describes "
                "{listed_samples:,} in {listed_bytes:,}, so the class names there may be wrong "
                "for it; fetch the shard again, or remove dataset.json",
                path=place.path(name),
                samples=found[0],
                bytes=found[1],
                listed_samples=shard.samples,
                listed_bytes=shard.bytes,
            )
    num_classes, highest = len(manifest.classes or ()), _highest(tables)
    if highest >= num_classes:
        raise DataError(
            "manifest.label-beyond-classes",
            "{location}: holds label {label}, but the manifest beside it names {num_classes} "
            "classes only",
            location=place.location,
            label=highest,
            num_classes=num_classes,
        )


# --- paths of saved indices ---


def _saved_paths(place: ResolvedLocation) -> list[Path]:
    """The possible paths of a place's index: beside the data, then in the cache."""
    if is_remote(place.root):
        # With the names: those of a glob on the Hub may change, and no folder there has a stamp.
        return [_cached_path("\n".join((place.location, *place.names)), place)]
    beside = Path(place.root) / _name_beside(place)
    return [beside, _cached_path(os.path.realpath(place.location), place)]


def _saved(place: ResolvedLocation) -> Iterator[Index]:
    """The saved indices of a place. One that comes with the data must not lead out of it."""
    for path in _saved_paths(place):
        index = load_index(path)
        if index is None:
            continue
        is_beside = path.parent != cache_folder()
        if is_beside and (index.root != str(path.parent) or not names_stay_inside(index, place)):
            report_damage(path, "an index", "it names files outside of the data")
        else:
            yield index


def _cached_path(location: str, place: ResolvedLocation) -> Path:
    return cache_folder() / f"index-{_short_hash(location + _suffix(place))}"


def _name_beside(place: ResolvedLocation) -> str:
    name = os.path.relpath(place.location, place.root) + _suffix(place)
    # Releases before gave a folder of Parquet this name, whatever its options.
    if name == "." and not place.files(".parquet"):
        return ".trainyard-index"
    return f".trainyard-index-{_short_hash(name)}"


def _suffix(place: ResolvedLocation) -> str:
    return place.option_text + (f"#{place.split}" if place.split else "")


def _save(place: ResolvedLocation, header: Header, table: _Table, beside: bool) -> Index:
    columns = table.columns()
    *near, cached = _saved_paths(place)
    # Without a root it is valid after a move of the data.
    roots = dict.fromkeys(near, "") | {cached: real_path(place.root)}
    # Other programs list the folders of single images: a new file there may end them.
    prefers_cache = not beside and not any(path.exists() for path in near)
    for path in sorted(roots, key=cached.__eq__, reverse=prefers_cache):
        try:
            with into_cache(path, place.location):
                return save_index(path, header | {"root": roots[path]}, columns)
        except DataError as error:  # read-only or full
            problem = error
    raise problem


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
