"""HDF5 files of encoded images: fuel's `ilsvrc2012.hdf5`, and a plain layout of Trainyard's.

    encoded_images  (n,) variable-length bytes      contents of image files
    targets         (n,) or (n, 1) integers         fuel has none for the test rows, which come last
    class_names     strings by target               Trainyard's; fuel's order: ILSVRC2012_ID less 1
    split           attribute of the root           fuel's table of the rows of each split

Images are read by their offset in the file; h5py is needed for the scan only.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.data.formats.format import Format, Shards
from trainyard.data.formats.hdf5_layout import (
    FILES,
    IMAGES,
    NAMES,
    TARGETS,
    Rows,
    SplitRows,
    check_inside,
    find_classes,
    find_splits,
    left_out_of,
    read_targets,
)
from trainyard.data.formats.heap import check_readable_by_offset, find_elements
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.remedies import ARRAYS
from trainyard.data.formats.scan import (
    EncodedSample,
    FileRows,
    FileScan,
    Scan,
    all_rows,
    as_array,
    num_threads,
    reading_pool,
    scan_of_files,
)
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source, SourceStream
from trainyard.errors import DataError
from trainyard.installation import needed

# Errors that h5py raises for damage, depending on its place.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError)
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SCAN_ROWS = 1 << 16  # looked up and yielded at a time
_WRITE_IMAGES, _WRITE_BYTES = 64, 1 << 24  # written at a time
_CHUNK = 1024  # rows


def recognises(place: ResolvedLocation) -> bool:
    """True if the first file of a location has the signature of HDF5."""
    names = _hdf5_files(place)
    if not names:
        return False
    with open_source(place.path(names[0])) as source:
        starts = [0, *(512 << n for n in range(16))]  # after the user block, if there is one
        return any(
            source.read(start, 8) == _SIGNATURE for start in starts if start + 8 <= source.size
        )


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a location, file by file; DataError for an unknown layout."""
    names = _hdf5_files(place)
    with _open(place.path(names[0])) as (file, source):
        classes = find_classes(file, source.name)
        for split in find_splits(file, source.name):
            if split.name == place.split and split.labels is None:
                raise DataError("data.no-labels", location=f"{place.location}#{split.name}")
    left_out = LeftOut()
    rows = all_rows(_read_files(place, names, classes), left_out)
    return scan_of_files(place, names, rows, format="hdf5", classes=classes, left_out=left_out)


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """Names of the splits inside an HDF5 file; empty if it has none."""
    names = _hdf5_files(place)
    if len(names) > 1:
        return ()
    with _open(place.path(names[0])) as (file, source):
        splits = find_splits(file, source.name)
    return tuple(split.name for split in splits if split.name and split.labels is not None)


def write(path: Path, samples: Iterable[EncodedSample], classes: Sequence[str] | None) -> None:
    """Writes one file in the plain layout; equal samples give equal bytes."""
    h5py = _h5py()
    with h5py.File(path, "w", track_order=False) as file:
        if classes is not None:
            names = [name.encode(errors="surrogateescape") for name in classes]
            longest = max(1, *map(len, names))  # of fixed length: no heap that could be damaged
            file.create_dataset(NAMES, data=names, dtype=h5py.string_dtype(length=longest))
        kind = h5py.vlen_dtype(np.uint8)
        growing = {"shape": (0,), "maxshape": (None,), "chunks": (_CHUNK,)}
        images = file.create_dataset(IMAGES, dtype=kind, **growing)
        targets = file.create_dataset(TARGETS, dtype="<i4", **growing)
        kind = h5py.h5t.py_create(kind)
        for batch in _batches(samples):
            start, stop = len(images), len(images) + len(batch)
            images.resize((stop,))
            targets.resize((stop,))
            targets[start:] = [sample.label for sample in batch]
            content = np.empty(len(batch), object)
            for row, sample in enumerate(batch):
                content[row] = np.frombuffer(sample.image, np.uint8)
            # The call behind h5py's indexing, but without its copy of the images.
            space = images.id.get_space()
            space.select_hyperslab((start,), (len(batch),))
            images.id.write(h5py.h5s.create_simple((len(batch),)), space, content, kind)


def _batches(samples: Iterable[EncodedSample]) -> Iterator[list[EncodedSample]]:
    batch: list[EncodedSample] = []
    size = 0
    for sample in samples:
        batch.append(sample)
        size += len(sample.image)
        if len(batch) == _WRITE_IMAGES or size >= _WRITE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- opening ---


def _hdf5_files(place: ResolvedLocation) -> tuple[str, ...]:
    return place.files(".h5", ".hdf5") or (() if place.is_folder else place.names)


@contextmanager
def _open(name: str) -> Iterator[tuple[Any, Source]]:
    """The h5py file and its source; DataError if the layout is unknown."""
    h5py = _h5py()
    with (
        open_source(name) as source,
        _damage_named(name),
        # A Source reads from any location, without HDF5's locks, which some servers lack.
        h5py.File(SourceStream(source), "r") as file,
    ):
        _check(file, name)
        yield file, source


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """h5py's errors as DataError."""
    try:
        yield
    except _DAMAGE as error:
        raise DataError(
            "data.malformed-file", path=name, format="HDF5", reason=str(error)
        ) from None


def _check(file: Any, name: str) -> None:
    kind = _h5py().Dataset
    missing = [key for key in (IMAGES, TARGETS) if not isinstance(file.get(key), kind)]
    if missing:
        raise DataError(
            "hdf5.no-dataset",
            "{path}: has no dataset {dataset}; expected encoded_images and targets; {hint}",
            path=name,
            dataset=missing[0],
            hint=ARRAYS,
        )
    for key in {IMAGES, TARGETS, NAMES, FILES} & {*file}:  # links that lead nowhere too
        check_inside(file, key, name)
    check_readable_by_offset(file[IMAGES], name)


def _h5py() -> Any:
    return needed("h5py", "hdf5", "HDF5")


# --- reading ---


def _read_files(
    place: ResolvedLocation, names: Sequence[str], classes: Sequence[str] | None
) -> Iterator[FileScan]:
    with reading_pool(num_threads(place)) as pool:
        for name in names:
            with _open(place.path(name)) as (file, source):
                if find_classes(file, source.name) != classes:
                    raise DataError(
                        "data.files-differ-in-classes", path=source.name, first=names[0]
                    )
                splits = find_splits(file, source.name)
                left_out = left_out_of(splits, len(file[IMAGES]), source.name)
                rows = _file_rows(file, source, name, classes, splits=splits, pool=pool)
                yield FileScan(rows, left_out)


def _file_rows(
    file: Any,
    source: Source,
    name: str,
    classes: Sequence[str] | None,
    *,
    splits: list[SplitRows],
    pool: ThreadPoolExecutor,
) -> Iterator[FileRows]:
    """The rows of an open file, which are to be taken before it is closed."""
    with _damage_named(source.name):
        targets = read_targets(file, classes, source.name)
        for split, images, labels in _parts(splits):
            offsets, sizes = find_elements(file[IMAGES], images, source, pool)
            own = as_array("i", targets[labels])
            yield FileRows(name, as_array("q", offsets), as_array("q", sizes), own, split)


def _parts(splits: list[SplitRows]) -> Iterator[tuple[str, Rows, Rows]]:
    """The rows of images and labels of each labelled split, in chunks."""
    for name, images, labels in splits:
        if labels is not None:
            for start in range(0, len(images), _SCAN_ROWS):
                part = slice(start, start + _SCAN_ROWS)
                yield name, images[part], labels[part]


def _shard_name(name: str, split: str, count: int) -> tuple[str, int, str]:
    """One file of all samples, or parts."""
    return (f"{name}-{split}.h5", 0, "") if count == 1 else (f"{name}-{split}-", 5, ".h5")


FORMAT = Format(
    name="hdf5",
    recognises=recognises,
    scan=scan,
    patterns=("*.h5", "*.hdf5"),
    splits_inside=splits_inside,
    shards=Shards(write=write, name=_shard_name, overhead=128),
)
