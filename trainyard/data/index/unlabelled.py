"""Unlabelled images that a user names: files, folders, globs, URLs and data sets."""

import glob
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainyard.data import formats
from trainyard.data.formats.folder import entries_of, has_image_suffix, is_folder, why_left_out
from trainyard.data.formats.left_out import BROKEN_LINK, EMPTY, HIDDEN, LOOP, LeftOut
from trainyard.data.formats.remedies import COMPRESSED
from trainyard.data.formats.scan import FileRows, Scan, is_metadata
from trainyard.data.index.build import Progress, index_scan, open_index
from trainyard.data.index.table import Index
from trainyard.data.storage.location import (
    ResolvedLocation,
    expand_braces,
    find_place,
    split_of,
    take_secrets,
)
from trainyard.data.storage.remote.http import fetch_image
from trainyard.data.storage.source import is_remote, reason_of
from trainyard.errors import DataError

_DOWNLOADS = 8  # at a time


@dataclass(frozen=True)
class Images:
    """The images of one index."""

    index: Index
    names: Sequence[str] | None
    """The names as the user wrote them; None for samples of a data set."""
    missing: dict[int, str]
    """Reasons for images that could not be fetched, by number."""

    def name(self, number: int) -> str:
        if self.names is not None:
            return self.names[number]
        path, offset, _ = self.index.locate(number)
        return f"{path} at byte {offset}"


def open_images(wanted: Sequence[str], folder: Path, progress: Progress) -> list[Images]:
    """The `wanted` images, in that order.

    Downloads go into `folder`, which must be empty. Folders are searched at every depth. A folder
    without images and a file of another type are data sets, whose samples are all taken. DataError
    for a name that does not exist.
    """
    found: list[Images] = []
    files: list[str] = []
    left_out = LeftOut()

    def close_files() -> None:
        nonlocal left_out
        if files:
            found.append(_indexed(files, folder / str(len(found)), left_out, progress))
            files.clear()
            left_out = LeftOut()

    for one in (name for word in wanted for name in _expanded(word)):
        others = LeftOut()
        if _is_image(one):
            files.append(one)
        elif os.path.isdir(one) and (inside := list(_walk(one, frozenset(), others))):
            files += inside
            left_out.update(others)
        else:
            close_files()
            found.append(Images(open_index(one, progress), None, {}))
    close_files()
    return found


def _expanded(word: str) -> list[str]:
    """The paths and URLs of a glob or a brace list; a plain name gives itself."""
    if is_remote(word):
        return expand_braces(take_secrets(word))
    if os.path.exists(split_of(word)[0]):
        return [word]
    if not word:
        raise DataError("data.empty-location")
    names = [name for text in expand_braces(word) for name in _matches(text)]
    for name in names:
        if not os.path.exists(split_of(name)[0]):
            raise DataError("data.not-found", path=name, hint="")
    if not names:
        raise DataError("data.no-match", location=word)
    return names


def _matches(text: str) -> list[str]:
    return sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else [text]


def _is_image(name: str) -> bool:
    """True if a name counts as an image: a URL or a file that is not recognised as a data set."""
    if is_remote(name):
        path = name.partition("?")[0].lower()
        is_shard = path.endswith(COMPRESSED) or formats.shards_among([path])
        return name.lower().startswith(("http://", "https://")) and not is_shard
    if os.path.isdir(name) or not os.path.exists(name):
        return False
    if not os.path.isfile(name):
        raise DataError("image.not-a-file", "{path}: not a regular file", path=name)
    if has_image_suffix(name):
        return True
    place = find_place(name)
    return not any(each.recognises(place) for each in formats.all_formats().values())


def _walk(folder: str, above: frozenset[str], left_out: LeftOut) -> Iterator[str]:
    """The images in a folder at any depth, sorted by name; counts what is left out."""
    here = os.path.realpath(folder)
    if here in above:
        left_out.add(LOOP, folder)
        return
    for entry in entries_of(folder):
        kind = why_left_out(entry)
        if is_folder(entry) and kind != HIDDEN:
            yield from _walk(entry.path, above | {here}, left_out)
        # The loader reports an image that is empty, or a broken link.
        elif kind is None or (kind in (EMPTY, BROKEN_LINK) and has_image_suffix(entry.name)):
            yield entry.path
        elif not is_metadata(entry.name):
            left_out.add(kind, entry.path)


def _indexed(files: Sequence[str], path: Path, left_out: LeftOut, progress: Progress) -> Images:
    """The index of files and URLs, saved at `path`; downloads are put beside it."""
    names = [*files]
    missing: dict[int, str] = {}
    here = [os.path.abspath(file) for file in files]  # absolute, since the index lies elsewhere
    urls = [number for number, file in enumerate(files) if is_remote(file)]
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        fetched = pool.map(lambda number: _fetch(files[number]), urls)
        for number, content in zip(urls, fetched, strict=True):
            if isinstance(content, str):
                missing[number], content = content, b""
            here[number] = f"{path}-{number}"
            Path(here[number]).write_bytes(content)
    place = ResolvedLocation("the images", None, "", (), is_folder=False, can_gain=False)
    scan = Scan(place, "images", None, watched=(), rows=_rows(here), left_out=left_out)
    return Images(index_scan(scan, path, progress), names, missing)


def _fetch(url: str) -> bytes | str:
    """The content of a URL, or the reason that it cannot be fetched."""
    try:
        return fetch_image(url)
    except DataError as error:
        return reason_of(error, url)


def _rows(files: Sequence[str]) -> Iterator[FileRows]:
    for file in files:
        try:
            yield FileRows(file, [0], [os.path.getsize(file)], [0])
        except OSError:  # a broken link, or deleted since: the loader reports it
            yield FileRows(file, [0], [0], [0])
