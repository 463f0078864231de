"""Parquet files of images, as `datasets` writes them for the Hub, and Arrow files of the same.

    image   struct<bytes: binary, path: string>, or binary     contents of image files
    label   integers from 0, texts, or lists of either         class numbers, or names

`datasets` keeps the names of numbered classes in the schema's metadata. Other usual names of these
columns, see `columns.py`, and Image and ClassLabel of `datasets` are known too. Images are read by
their offset in the file, from columns that are uncompressed or in Snappy; pyarrow is needed for the
scan only.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainyard.data.formats.arrow import MAGIC, ArrowFile
from trainyard.data.formats.arrow import SUFFIX as ARROW
from trainyard.data.formats.columns import Unread
from trainyard.data.formats.example import BufferedReader
from trainyard.data.formats.format import Format, Shards
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.parquet_layout import Layout, find_layout, metadata_of
from trainyard.data.formats.parquet_pages import Column, NotByOffset, NullValue, find_values
from trainyard.data.formats.scan import (
    MAX_CLASSES,
    EncodedSample,
    FileRows,
    Scan,
    in_threads,
    num_threads,
    scan_of_files,
)
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source, SourceStream, is_remote
from trainyard.errors import DataError
from trainyard.installation import needed

SUFFIX = ".parquet"
_MAGIC = b"PAR1"
_GROUP = 100  # rows written at a time, as `datasets` does
_REMOTE_THREADS, _REMOTE_READ = 16, 8 << 20  # files, bytes


def recognises(place: ResolvedLocation) -> bool:
    """True if the first file of a location begins like Parquet, or Arrow on a local disk."""
    names = _files(place)
    if not names:
        return False
    begin = MAGIC if _is_arrow(names[0]) else (_MAGIC,)
    with open_source(place.path(names[0])) as source:
        return source.read(0, min(source.size, len(MAGIC[1]))).startswith(begin)


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a location, file by file; DataError for an unknown layout."""
    names = _files(place)
    with _open(place.path(names[0])) as (file, source):
        layout = find_layout(file, source.name, place.options)
    threads = num_threads(place)
    if is_remote(place.root):  # each holds large ranges
        threads = min(threads, _REMOTE_THREADS)
    found = in_threads(threads, partial(_read_file, place, names[0], layout), names)
    classes: list[str] | None = [] if layout.is_text else layout.classes
    rows, left_out = _rows(place, found, classes, layout.unread), LeftOut()
    left_out.update(layout.unread.left_out)
    return scan_of_files(place, names, rows, format="parquet", classes=classes, left_out=left_out)


def write(path: Path, samples: Iterable[EncodedSample], classes: Sequence[str] | None) -> None:
    """Writes one file as `datasets` reads it, uncompressed; equal samples give equal bytes."""
    pa, pq = _pyarrow()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = iter(samples)
    group = list(islice(rows, _GROUP))
    has_lists = any(one.labels is not None for one in group)
    label = pa.list_(pa.int64()) if has_lists else pa.int64()
    schema = pa.schema([("image", kind), ("label", label)], metadata_of(classes, has_lists))
    settings = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    with open(path, "wb") as file, pq.ParquetWriter(file, schema, **settings) as writer:
        while group:
            images = [{"bytes": one.image, "path": f"{one.key}{one.suffix}"} for one in group]
            labels = [one.label if one.labels is None else one.labels for one in group]
            columns = [pa.array(images, kind), pa.array(labels, label)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=_GROUP)
            group = list(islice(rows, _GROUP))


def _files(place: ResolvedLocation) -> tuple[str, ...]:
    arrow = () if is_remote(place.root) else place.files(ARROW)
    return place.files(SUFFIX) or arrow or (() if place.is_folder else place.names)


def _is_arrow(name: str) -> bool:
    return name.endswith(ARROW)


def _pyarrow() -> tuple[Any, Any]:
    return needed("pyarrow", "parquet", "Parquet"), needed("pyarrow.parquet", "parquet", "Parquet")


@contextmanager
def _open(name: str) -> Iterator[tuple[Any, Source]]:
    """pyarrow's file and its source; DataError for a file that it cannot read."""
    pa, pq = _pyarrow()
    with open_source(name) as source:
        try:
            arrow = ArrowFile(name) if _is_arrow(name) else None
            yield arrow or pq.ParquetFile(SourceStream(source)), source
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                "data.malformed-file", path=name, format="Parquet", reason=reason
            ) from None


# --- reading ---


class _Group(NamedTuple):
    """A row group."""

    number: int
    first: int  # the number of its first row in the file


class _File(NamedTuple):
    """What a file holds."""

    rows: FileRows
    names: list[str]  # of the labels, if they are texts
    splits: set[str]  # in the column of splits
    watched: dict[str, set[str]]  # values of columns that may be splits by another name


def _rows(
    place: ResolvedLocation, files: Iterable[_File], classes: list[str] | None, unread: Unread
) -> Iterator[FileRows]:
    """The rows of all files; once exhausted, `classes` holds the labels that are texts."""
    known: dict[str, int] = {}
    splits: set[str] = set()
    for rows, names, splits_of, watched in files:
        numbers = [known.setdefault(name, len(known)) for name in names]
        splits |= splits_of
        if len(splits) > 1:
            raise DataError(
                "parquet.several-splits",
                "{path}: its rows or those of files before it are of several splits, {names}: "
                "write files of one split each",
                path=place.path(rows.path),
                names=", ".join(sorted(splits)),
            )
        for name, values in watched.items():
            unread.add(unread.names.index(name), values)
        if rows.sizes:
            yield rows._replace(labels=[numbers[n] for n in rows.labels]) if numbers else rows
    if known and classes is not None:
        classes.extend(known)
    if found := unread.divided():
        location = place.with_options
        raise DataError(
            "parquet.unread-split",
            "{path}: its column {column!r} looks like a split ({values}), and a file is of one "
            "split: write files of one split each; or '{location}#split=none' passes over it",
            path=place.location,
            column=found[0],
            values=found[1],
            location=location,
        )


def _read_file(place: ResolvedLocation, first: str, layout: Layout, name: str) -> _File:
    offsets, sizes, labels = array("q"), array("q"), array("i")
    starts, lengths, counts = array("i"), array("i"), array("i")
    numbers: dict[str, int] = {}  # of labels that are texts
    splits: set[str] = set()
    with _open(place.path(name)) as (file, source):
        own = find_layout(file, source.name, place.options)
        watched = {column: set[str]() for column in own.watched if column in layout.watched}
        if (own.label, own.is_text, own.classes) != (layout.label, layout.is_text, layout.classes):
            raise DataError(
                "data.files-differ-in-labels",
                "{path}: its labels or classes differ from those of {first}",
                path=source.name,
                first=first,
            )
        data = BufferedReader(source, _REMOTE_READ) if is_remote(name) else BufferedReader(source)
        for number in range(file.metadata.num_row_groups):
            group = _Group(number, len(sizes))
            found, lengths_of = _labels(file, own, group, source.name)
            labels.extend(numbers.setdefault(x, len(numbers)) if own.is_text else x for x in found)
            counts.extend(lengths_of)
            splits |= _values(file, own.split, group) if own.split else set()
            for column, values in watched.items():
                values |= _values(file, column, group) - {"None"}
            for page in _spans(file, own, group, data):
                for span in page:
                    offsets.append(span.offset)
                    sizes.append(span.size)
                    starts.append(span.start)
                    lengths.append(span.length)
    has_lists = counts if own.has_lists else None
    rows = FileRows(name, offsets, sizes, labels, "", starts, lengths, has_lists)
    return _File(rows, [*numbers], splits, watched)


def _pages(file: Any, layout: Layout, group: _Group, data: BufferedReader) -> Iterator[Any]:
    """The spans of the images of a row group, a page at a time. ValueError, as in parquet_pages."""
    if isinstance(file, ArrowFile):
        yield file.spans(group.number, layout.image)
        return
    pa, _ = _pyarrow()

    def decompress(content: bytes, size: int) -> bytes:
        return pa.decompress(content, size, "snappy", asbytes=True)  # type: ignore[no-any-return]

    rows = file.metadata.row_group(group.number)
    names = (layout.image, f"{layout.image}.bytes")
    leaf = next(n for n in range(len(file.schema)) if file.schema.column(n).path in names)
    about = rows.column(leaf)
    starts = (about.dictionary_page_offset, about.data_page_offset)
    column = Column(
        start=min(start for start in starts if start is not None),
        size=about.total_compressed_size,
        rows=about.num_values,
        codec=about.compression,
        most_level=file.schema.column(leaf).max_definition_level,
    )
    if column.rows != rows.num_rows:
        raise ValueError(f"its images have {column.rows:,} values for {rows.num_rows:,} rows")
    yield from find_values(data, column, decompress)


def _spans(file: Any, layout: Layout, group: _Group, data: BufferedReader) -> Iterator[Any]:
    """`_pages`; DataError for what is wrong with them."""
    count = 0
    try:
        for page in _pages(file, layout, group, data):
            count += len(page)
            yield page
    except NullValue as error:
        raise _no_image(file, layout, group, count + error.row, path=data.name) from None
    except NotByOffset as error:
        raise DataError(
            "parquet.images-encoded",
            "{path}: its images cannot be read by their offset, because {reason}; write the file "
            'anew without compression: python -c "import pyarrow.parquet as p; '
            "p.write_table(p.read_table('FILE'), 'NEW', compression='none', use_dictionary=False, "
            'row_group_size=100)"',
            path=data.name,
            reason=str(error),
        ) from None
    except ValueError as error:
        raise DataError(
            "parquet.damaged-row-group",
            "{path}: row group {group} is damaged: {reason}",
            path=data.name,
            group=group.number,
            reason=str(error),
        ) from None


def _no_image(file: Any, layout: Layout, group: _Group, row: int, *, path: str) -> DataError:
    """The error of a row of a group that has no image."""
    found = file.read_row_group(group.number, columns=[layout.image]).column(0)[row].as_py()
    image = found.get("path") if isinstance(found, dict) else None
    row += group.first
    if image:
        return DataError(
            "parquet.row-of-path",
            "{path}: row {row}: holds no image, but a path ({image}): its file holds paths, not "
            "images: embed the images in the file, as `push_to_hub` of datasets does, or name "
            "their folder, or a list (.csv) of the paths, as the data",
            path=path,
            row=row,
            image=image,
        )
    return DataError("parquet.no-image", "{path}: row {row}: has no image", path=path, row=row)


def _values(file: Any, name: str, group: _Group) -> set[str]:
    """The values in a column of texts, numbers or yes and no."""
    column = file.read_row_group(group.number, columns=[name]).column(0)
    return {str(value).strip() for value in column.unique().to_pylist()}


def _labels(file: Any, layout: Layout, group: _Group, name: str) -> tuple[list[Any], list[int]]:
    """The class numbers or names of a row group and, with lists, the number of each row's."""

    def check(is_wrong: Any, what: str) -> None:
        wrong = np.flatnonzero(is_wrong)
        if len(wrong):
            row = int(rows[wrong[0]])
            raise DataError(
                "parquet.no-label",
                "{path}: row {row}: {column} {reason}",
                path=name,
                row=row,
                column=layout.label,
                reason=what,
            )

    column = file.read_row_group(group.number, columns=[layout.label], use_threads=False).column(0)
    column, counts = column.combine_chunks(), []
    rows = group.first + np.arange(len(column))
    if layout.has_lists:
        check(column.is_null(), "is null")
        counts = column.value_lengths().to_pylist()
        rows, column = np.repeat(rows, counts), column.flatten()
    check(column.is_null(), "is null")
    if layout.is_text:
        texts = [text.strip() for text in column.to_pylist()]
        check([not text for text in texts], "is empty")
        return texts, counts
    numbers = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
    labels = numbers.to_numpy(zero_copy_only=False).astype(np.int64)
    limit = MAX_CLASSES if layout.classes is None else len(layout.classes)
    check(labels == -1, "is -1, which stands for no label")
    wrong = np.flatnonzero((labels < 0) | (labels >= limit))
    if len(wrong):
        row, value = int(rows[wrong[0]]), int(labels[wrong[0]])
        raise DataError(
            "parquet.not-a-class-number",
            "{path}: row {row}: {column} is {value}, which is no class number",
            path=name,
            row=row,
            column=layout.label,
            value=value,
        )
    if max(counts, default=0) > 2 and labels.max() < 2:
        raise DataError(
            "parquet.label-is-vector",
            "{path}: row {row}: {column} is a vector of 0 and 1: write the numbers of the classes",
            path=name,
            row=int(rows[0]),
            column=layout.label,
        )
    return labels.tolist(), counts


def _shard_name(_: str, split: str, count: int) -> tuple[str, int, str]:
    """The names by which `datasets` finds the splits."""
    split = "validation" if split == "val" else split
    return f"data/{split}-", 5, f"-of-{count:05d}{SUFFIX}"


FORMAT = Format(
    name="parquet",
    recognises=recognises,
    scan=scan,
    patterns=(f"*{SUFFIX}", f"*{ARROW}"),
    options=("label", "split"),
    shards=Shards(write=write, name=_shard_name, overhead=128, holds_lists=True),
)
