"""An index made in parts: each scans some of the files, and reads their images for seek tables."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from trainyard.data.decode.seek_tables import SeekTable, build_seek, check_extension, seek_entries
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.scan import FileRows, FileScan, ReadFiles, Scan
from trainyard.data.index.build import (
    Progress,
    begin_scan,
    build_index,
    index_of_rows,
    path_beside,
    stamps_of,
)
from trainyard.data.index.table import Index
from trainyard.data.storage.ahead import map_ahead
from trainyard.datasets.parts import Codec, Identity, Journals, Part, Units

_SIZES = FileRows._fields.index("sizes")
_FILES_AT_ONCE = 4  # whose images are read: a short file alone would not occupy all cores


def index_journals(location: str) -> Journals:
    """The journals of an index in parts, beside the index."""
    path = path_beside(location, "index")
    return Journals(path.parent, path.name, noun="an index", doing="indexing it")


class IndexWork:
    """The scan of a location, and the seek table of its index, in units of a file."""

    def __init__(self, location: str, units: Units, part: Part | None, *, seek: bool) -> None:
        """DataError if the files cannot be scanned, or parts of other work have begun."""
        if seek:
            check_extension()
        self.location, self._units, self._part, self._seek = location, units, part, seek
        self._scan = begin_scan(location, self._via)
        self._progress: Progress = lambda *_: None
        units.begin(partial(_identity, self._scan, seek))

    def write_part(self, progress: Progress) -> int:
        """Scans the files of the part, and reads their images for the seek table.

        Returns the number of its samples.
        """
        self._progress = progress
        for _ in self._scan.rows:
            pass
        return sum(map(_num_samples, self._units.results() or ()))

    def index(self, progress: Progress) -> Index:
        """The index of all files, saved."""
        return build_index(self.location, progress, self._scan)

    def seek_table(self, index: Index, progress: Progress) -> SeekTable:
        """The seek table of that index, saved."""
        results = self._units.results()
        tables = None if results is None else map(_tables, results)
        return build_seek(index, progress, tables)

    def _via(self, read: ReadFiles, names: Sequence[str]) -> Iterator[FileScan]:
        do = read if self._part is None else partial(self._results, read)
        return self._units.run(do, names, Codec(lambda result: result, _file_scan))

    def _results(self, read: ReadFiles, names: Sequence[str]) -> Iterator[Any]:
        """The result of each file, as the journal stores it."""
        whole = (file._replace(rows=[*file.rows]) for file in read(names))
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            count = 0
            for result in map_ahead(pool, self._result, whole, most=_FILES_AT_ONCE):
                yield result
                count += _num_samples(result)
                self._progress(count)

    def _result(self, file: FileScan) -> dict[str, Any]:
        result = {
            "rows": [_as_lists(rows) for rows in file.rows],
            "about": file.about,
            "left_out": file.left_out.kinds,
        }
        index = index_of_rows(self._scan, file.rows) if self._seek else None
        if index is not None:
            tables = [table for some in seek_entries(index) for table in some]
            lengths = [len(table) for table in tables]
            result["seek"] = [lengths, base64.b64encode(b"".join(tables)).decode()]
        return result


def _identity(scan: Scan, seek: bool) -> Identity:
    settings = {"seek": seek, "format": scan.format}
    plan = json.dumps([settings, scan.place.split, stamps_of(scan)])
    return Identity(hashlib.sha256(plan.encode()).hexdigest(), settings)


def _as_lists(rows: FileRows) -> list[Any]:
    plain = (str, type(None))
    return [column if isinstance(column, plain) else list(column) for column in rows]


def _num_samples(result: dict[str, Any]) -> int:
    return sum(len(rows[_SIZES]) for rows in result["rows"])


def _file_scan(result: dict[str, Any]) -> FileScan:
    """The findings in a file, out of a journal. ValueError, say, for what no reader finds."""
    rows = [FileRows(*rows) for rows in result["rows"]]
    for one in rows:
        numbers = np.array([one.offsets, one.sizes], "<i8")
        labels = np.array(one.labels, "<i4")
        is_labelled = len(labels) == (len(one.sizes) if one.counts is None else sum(one.counts))
        if not is_labelled or min(numbers.min(initial=0), labels.min(initial=0)) < 0:
            raise ValueError(f"{one.path}: no rows of a file")
    return FileScan(rows, result["about"], LeftOut(result["left_out"]))


def _tables(result: dict[str, Any]) -> list[bytes]:
    """The seek entries of each sample of a file."""
    lengths, text = result.get("seek", ([], ""))
    content, ends = base64.b64decode(text), accumulate(lengths)
    return [content[end - length : end] for length, end in zip(lengths, ends, strict=True)]
