"""Parquet files of images, as `datasets` writes them for the Hub.

    image   struct<bytes: binary, path: string>, or binary     contents of image files
    label   integers from 0, or lists of them                  class numbers

`datasets` keeps the names of the classes in the schema's metadata. Images are read by their offset
in the file, from columns that are uncompressed or in Snappy; pyarrow is needed for the scan only.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.data.formats.example import BufferedReader
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.parquet_layout import Layout, find_layout, metadata_of
from trainyard.data.formats.parquet_pages import Column, NotByOffset, find_values
from trainyard.data.formats.sample import EncodedSample
from trainyard.data.formats.scan import (
    MAX_CLASSES,
    FileRows,
    FileScan,
    Scan,
    Via,
    all_rows,
    directly,
    in_threads,
    num_threads,
    scan_of_files,
)
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source, is_remote
from trainyard.data.storage.stream import SourceStream
from trainyard.errors import DataError
from trainyard.installation import install_hint

SUFFIX = ".parquet"
_MAGIC = b"PAR1"
_GROUP = 100  # rows written at a time, as `datasets` does
_REMOTE_THREADS, _REMOTE_READ = 16, 8 << 20  # files, bytes


def recognises(place: ResolvedLocation) -> bool:
    """True if the first file of a location begins like Parquet."""
    names = _files(place)
    if not names:
        return False
    with closing(open_source(place.path(names[0]))) as source:
        return source.size >= len(_MAGIC) and source.read(0, len(_MAGIC)) == _MAGIC


def scan(place: ResolvedLocation, via: Via = directly) -> Scan:
    """The samples of a location, file by file; DataError for an unknown layout."""
    names = _files(place)
    with _open(place.path(names[0])) as (file, source):
        classes = find_layout(file, source.name).classes
    threads = num_threads(place)
    if is_remote(place.root):  # each holds large ranges
        threads = min(threads, _REMOTE_THREADS)
    read = in_threads(threads, partial(_read_file, place, names[0], classes))
    left_out = LeftOut()
    rows = all_rows(via(read, names), left_out)
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
    return place.files(SUFFIX) or (() if place.is_folder else place.names)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"Parquet needs pyarrow: {install_hint('parquet')}") from None
    return pyarrow, pyarrow.parquet


@contextmanager
def _open(name: str) -> Iterator[tuple[Any, Source]]:
    """pyarrow's file and its source; DataError for a file that it cannot read."""
    pa, pq = _pyarrow()
    with closing(open_source(name)) as source:
        try:
            yield pq.ParquetFile(SourceStream(source)), source
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name}: not a readable Parquet file ({reason})") from None


# --- reading ---


def _read_file(
    place: ResolvedLocation, first: str, classes: Sequence[str] | None, name: str
) -> FileScan:
    offsets, sizes, labels = array("q"), array("q"), array("i")
    starts, lengths, counts = array("i"), array("i"), array("i")
    with _open(place.path(name)) as (file, source):
        layout = find_layout(file, source.name)
        if layout.classes != classes:
            raise DataError(f"{source.name}: its classes differ from those of {first}")
        data = BufferedReader(source, _REMOTE_READ) if is_remote(name) else BufferedReader(source)
        for group in range(file.metadata.num_row_groups):
            found, lengths_of = _labels(file, layout, group, source.name)
            labels.extend(found)
            counts.extend(lengths_of)
            for page in _spans(file, layout, group, data):
                for span in page:
                    offsets.append(span.offset)
                    sizes.append(span.size)
                    starts.append(span.start)
                    lengths.append(span.length)
    has_lists = counts if layout.has_lists else None
    rows = FileRows(name, offsets, sizes, labels, "", starts, lengths, has_lists)
    return FileScan([rows] if sizes else [])


def _spans(file: Any, layout: Layout, group: int, data: BufferedReader) -> Iterator[Any]:
    """The spans of the images of a row group, a page at a time."""
    pa, _ = _pyarrow()

    def decompress(content: bytes, size: int) -> bytes:
        return pa.decompress(content, size, "snappy", asbytes=True)  # type: ignore[no-any-return]

    about = file.metadata.row_group(group).column(layout.image)
    starts = (about.dictionary_page_offset, about.data_page_offset)
    column = Column(
        start=min(start for start in starts if start is not None),
        size=about.total_compressed_size,
        rows=about.num_values,
        codec=about.compression,
        most_level=file.schema.column(layout.image).max_definition_level,
    )
    if column.rows != file.metadata.row_group(group).num_rows:
        raise DataError(f"{data.name}: row group {group} is damaged")
    try:
        yield from find_values(data, column, decompress)
    except NotByOffset as error:
        raise DataError(
            f"{data.name}: its images cannot be read by their offset, because {error}; write the "
            'file anew without compression: python -c "import pyarrow.parquet as p; '
            "p.write_table(p.read_table('FILE'), 'NEW', compression='none', use_dictionary=False, "
            'row_group_size=100)"'
        ) from None
    except ValueError as error:
        raise DataError(f"{data.name}: row group {group} is damaged: {error}") from None


def _labels(file: Any, layout: Layout, group: int, name: str) -> tuple[list[int], list[int]]:
    """The class numbers of a row group and, with lists, the number of each row's; else []."""
    column = file.read_row_group(group, columns=[layout.label], use_threads=False).column(0)
    counts: list[int] = []
    is_null = column.null_count
    if layout.has_lists and not is_null:
        column = column.combine_chunks()
        counts, column = column.value_lengths().to_pylist(), column.flatten()
    if is_null or column.null_count:
        raise DataError(f"{name}: row group {group}: {layout.label} is null for some images")
    labels = column.to_numpy().astype(np.int64)
    limit = MAX_CLASSES if layout.classes is None else len(layout.classes)
    wrong = labels[(labels < 0) | (labels >= limit)]
    if len(wrong) and (wrong == -1).all():
        raise DataError(f"{name}: these images have no labels: {layout.label} is -1")
    if len(wrong):
        raise DataError(
            f"{name}: row group {group}: {layout.label} is {wrong[0]}, which is no class number"
        )
    return labels.tolist(), counts
