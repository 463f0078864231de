"""Packs an index of any format into any writable format: parallel, resumable, bytes unchanged.

Each shard is a pure function of its rows and the options. It is written under a temporary name,
synced to disk and renamed; a journal at the destination lists finished shards. After a kill, the
same command resumes, and ends with the same bytes as an uninterrupted pack.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.data.index.outside import linked_outside
from trainyard.data.index.stamps import of_content
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.manifest import FILE_NAME, Manifest, Split, write_manifest
from trainyard.datasets.pack.files import remove_stale
from trainyard.datasets.pack.journal import (
    Identity,
    Journal,
    Part,
    Written,
    finished,
    locked,
    remove_journals,
)
from trainyard.datasets.pack.pool import Progress, write_shards
from trainyard.datasets.pack.shards import (
    PackOptions,
    Selection,
    ShardJob,
    brace_list,
    plan_jobs,
    written_as,
)
from trainyard.datasets.pack.worker import PackJob, PackSource, stem, storing
from trainyard.errors import DataError
from trainyard.files import in_words, why_unwritable
from trainyard.printable import print_line

_MARGIN = 16 << 20  # bytes that stay free
_ODD_LISTED = 1000  # of each kind
_NAMES, _THREADS = 1024, 32  # names that are read at once: each may wait for a file server


def pack(
    splits: dict[str, Selection],
    classes: tuple[str, ...] | None,
    destination: Path,
    options: PackOptions,
    *,
    about: dict[str, Any],
    part: Part | None = None,
    progress: Progress = lambda _: None,
) -> Manifest | None:
    """Writes samples in the order given, and a manifest that names classes, shards and checksums.

    `classes` are the names by label, sorted; None without names. With a `part`, writes its shards
    alone, and gives None: a pack without one writes what is left, and the manifest. Shards that an
    earlier attempt has written stay. DataError if the destination is in use or holds other data, if
    space is short, or a sample cannot be read.
    """
    storing(options)  # raises its error before any file is made
    folders = _class_folders(splits, classes, options)
    jobs = plan_jobs(splits, options)
    identity = _identity(splits, classes, options, about)
    _check_outside(destination, splits)
    _report_links(splits)
    sources = {split: _source(selection, options) for split, selection in splits.items()}
    work = PackJob(destination, options, classes, folders, sources)
    with _claimed(destination, part):
        manifest = finished(destination, identity)
        if manifest is None:
            journal = Journal(destination, identity, part)
            _write(work, splits, _shared(jobs, part), journal, progress=progress)
        if part is not None:
            return None
        if manifest is None:
            manifest = _manifest(jobs, work, journal.done, identity)
            if journal.is_resumed:  # a worker of the killed pack may have outlived it briefly
                remove_stale(destination, _shared(jobs, None), None)
            write_manifest(destination, manifest)
        remove_journals(destination)
    return manifest


def _source(selection: Selection, options: PackOptions) -> PackSource:
    index = selection.index
    keeps_names = options.format == "folder" and _has_own_names(selection)
    return PackSource(index.path, index.fingerprint, keeps_names)


@contextmanager
def _claimed(destination: Path, part: Part | None) -> Iterator[None]:
    """Inside, the destination exists and is locked; an error of its disk becomes a DataError.

    So does an error of a file of the source, by its own name.
    """
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with locked(destination, part):
            yield
    except OSError as error:
        name = os.fsdecode(error.filename or destination)
        if not Path(name).absolute().is_relative_to(destination.absolute()):
            raise DataError("file.unreadable", path=name, reason=error.strerror) from None
        reason = why_unwritable(error, destination)
        raise DataError("file.unwritable", path=destination, reason=reason) from None


def num_samples(splits: dict[str, Selection], options: PackOptions, part: Part | None) -> int:
    """The samples that a pack, or a part of it, writes."""
    return sum(len(job.ids) for job in _shared(plan_jobs(splits, options), part))


def _shared(jobs: dict[str, list[ShardJob]], part: Part | None) -> list[ShardJob]:
    """The shards of a part, or all."""
    every = [job for of_split in jobs.values() for job in of_split]
    return [job for number, job in enumerate(every) if part is None or part.owns(number)]


def _write(
    work: PackJob,
    splits: dict[str, Selection],
    jobs: list[ShardJob],
    journal: Journal,
    *,
    progress: Progress,
) -> None:
    """Writes the shards that an earlier attempt or another part has not."""
    if journal.is_resumed:
        remove_stale(work.destination, jobs, journal.part)
    left = [job for job in jobs if job.name not in journal.done]
    try:
        _check_space(work, splits, left)
    except DataError:
        if not journal.is_resumed:  # no shard exists yet
            journal.path.unlink()
        raise
    for split in splits if work.options.format == "folder" else ():
        for name in work.folders:  # also of empty classes, so that all keep their numbers
            (work.destination / split / name).mkdir(parents=True, exist_ok=True)
    before = sum(len(job.ids) for job in jobs if job.name in journal.done)
    write_shards(work, left, journal, lambda count: progress(before + count))


def _class_folders(
    splits: dict[str, Selection], classes: tuple[str, ...] | None, options: PackOptions
) -> tuple[str, ...]:
    """The folder names of the classes, in the order of the labels, which is sorted order."""
    highest = max((selection.highest() for selection in splits.values()), default=0)
    if classes is None:
        width = len(str(highest))
        return tuple(f"{number:0{width}d}" for number in range(highest + 1))
    if highest >= len(classes):
        raise DataError(
            "pack.label-beyond-classes",
            "label {label} is beyond the {num_classes} classes that are named",
            label=highest,
            num_classes=len(classes),
        )
    if list(classes) != sorted(set(classes)):
        raise DataError(
            "pack.unsorted-classes",
            "classes are numbered by their sorted names: sort them, each named once",
        )
    if options.format == "folder":
        for name in classes:
            if name.startswith(".") or "/" in name or "\0" in name or not name:
                raise DataError(
                    "pack.class-name-unusable",
                    "class {name!r} cannot be a folder; choose another format",
                    name=name,
                )
    return classes


def _identity(
    splits: dict[str, Selection],
    classes: tuple[str, ...] | None,
    options: PackOptions,
    about: dict[str, Any],
) -> Identity:
    recode = options.recode
    settings = about | {
        "format": options.format,
        "name": options.name,
        "shard_samples": options.shard_samples,
        "shard_bytes": options.shard_bytes,
        "recode": recode and {type(recode).__name__: dataclasses.asdict(recode)},
        "samples": {split: len(selection.ids) for split, selection in splits.items()},
    }
    if options.format == "packed":
        settings["pixels"] = options.pixels
    settings = json.loads(json.dumps(settings))  # as read back from a manifest
    digest = hashlib.sha256()
    for part in (classes, *(settings[key] for key in settings if key not in about)):
        digest.update(json.dumps(part).encode())
    for selection in splits.values():
        index = selection.index
        digest.update(json.dumps([index.fingerprint, _file_stamps(index)]).encode())
        digest.update(selection.ids.tobytes())
        digest.update(selection.labels.tobytes())
    return Identity(digest.hexdigest(), settings)


def _file_stamps(index: Index) -> dict[str, Any]:
    """The stamps of data files, without those of folders, which other files change, and of
    manifests, whose classes count anyway: one may be that of the destination.
    """
    return {
        name: stamp and of_content(stamp)
        for name, stamp in sorted(index.stamps.items())
        if os.path.basename(name) != FILE_NAME and not os.path.isdir(os.path.join(index.root, name))
    }


def _check_outside(destination: Path, splits: dict[str, Selection]) -> None:
    for selection in splits.values():
        index = selection.index
        if index.format == "folder" and destination.resolve().is_relative_to(
            Path(index.root).resolve()
        ):
            raise DataError(
                "pack.destination-inside-data",
                "{path}: lies inside {location}, where it would become a class of the data; "
                "choose a folder outside",
                path=destination,
                location=index.root,
            )


def _report_links(splits: dict[str, Selection]) -> None:
    """Print how many files, behind links out of the data, are about to be packed too."""
    for split, selection in splits.items():
        for name, path in (outside := linked_outside(selection.index))[:1]:
            count = f"{len(outside):,} of its files are" if outside[1:] else "one of its files is"
            print_line(f"{split}: {count} outside of the data, behind links: {name} is {path}")


def _has_own_names(selection: Selection) -> bool:
    """True if the source's files or members have distinct names within each class."""
    hashes = np.empty(len(selection.ids), np.int64)
    name_of = partial(stem, selection.index, Reader(selection.index))
    is_read = selection.index.format not in ("folder", "list")
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(hashes), _NAMES):
            part = slice(first, first + _NAMES)
            # A thread for each name of a million takes half a minute.
            names = (pool.map if is_read else map)(name_of, selection.ids[part].tolist())
            labels = selection.labels[part].tolist()
            for number, (name, label) in enumerate(zip(names, labels, strict=True), first):
                if not name or name.startswith("."):
                    return False
                hashes[number] = hash((label, name))
    return len(np.unique(hashes)) == len(hashes)


def _check_space(work: PackJob, splits: dict[str, Selection], jobs: list[ShardJob]) -> None:
    """DataError if the disk is too small. Only images that stay as they are have a known size."""
    is_packed = any(selection.index.format == "packed" for selection in splits.values())
    if is_packed or not storing(work.options).keeps_files:
        return
    stored = sum(int(splits[job.split].index.size[job.ids].sum()) for job in jobs)
    count = sum(len(job.ids) for job in jobs)
    needed = stored + count * written_as(work.options.format).overhead + _MARGIN
    free = shutil.disk_usage(work.destination).free
    if jobs and free < needed:
        raise DataError(
            "pack.disk-too-small",
            "{path}: {needed} are needed and {free} are free; free some space or choose another "
            "disk",
            path=work.destination,
            needed=in_words(needed),
            free=in_words(free),
        )


def _manifest(
    jobs: dict[str, list[ShardJob]], work: PackJob, done: dict[str, Written], identity: Identity
) -> Manifest:
    written = {split: [done[job.name] for job in part] for split, part in jobs.items()}
    odd: dict[str, list[str]] = {}
    for kind, name in (odd for part in written.values() for one in part for odd in one.odd):
        odd.setdefault(kind, []).append(name)
    listed = {kind: {"count": len(n), "files": n[:_ODD_LISTED]} for kind, n in odd.items()}
    return Manifest(
        format=work.options.format,
        # The folder alone would not show that an empty class exists.
        classes=work.folders if work.options.format == "folder" else work.classes,
        splits={
            split: Split(
                brace_list(work.options, split, len(part)), tuple(one.shard for one in part)
            )
            for split, part in written.items()
        },
        about=identity.settings
        | {
            "image_bytes": {s: sum(one.image_bytes for one in p) for s, p in written.items()},
            "odd": listed,
            "plan": identity.plan,
        },
    )
