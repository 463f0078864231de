"""A LOCATION as users write it: a folder, a file, a glob or a brace list, local or remote.

`FILE#train` and `FILE#val` name the splits of a file that holds several. Before the split may come
options for the reader: `FILE#label=COLUMN` and `FILE#root=FOLDER`.
"""

import glob
import os
import re
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from trainyard.data.storage.ahead import look_at
from trainyard.data.storage.credentials import PIPE, check_url, keep, public_name, without_secrets
from trainyard.data.storage.hub import files_like, is_on_hub
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError

_BRACES = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
_MAX_NAMES = 1_000_000  # of a brace list; no data set has more shards
_SPLIT = re.compile(r"(.+)#(\w+)")
_OPTIONS = re.compile(r"(.+?)((?:#[a-z]+=[^#]+)+)", re.DOTALL)


@dataclass(frozen=True)
class ResolvedLocation:
    """The files that a location names."""

    location: str
    """The location as written, without the split and the options."""
    split: str | None
    root: str
    """The folder or its URL; names are relative to it."""
    names: tuple[str, ...]
    """The files in order; for a folder, the ones directly in it, sorted, without hidden ones."""
    is_folder: bool
    can_gain: bool
    """True for a folder or a glob: files that appear there later belong to it."""
    option_text: str = ""
    """The options as written, such as `#label=species#root=/images`."""

    @property
    def with_options(self) -> str:
        """The location as written, with its options and without the split."""
        return self.location + self.option_text

    @property
    def options(self) -> dict[str, str]:
        """The values of the options, by name."""
        parts = self.option_text.split("#")[1:]
        return {name: value for name, _, value in (part.partition("=") for part in parts)}

    def files(self, *suffixes: str) -> tuple[str, ...]:
        """The names with one of the suffixes, which a URL may have before or in its query."""
        if not is_remote(self.root):
            return tuple(name for name in self.names if name.endswith(suffixes))
        parts = {name: re.split("[?&]", name) for name in self.names}
        return tuple(name for name in self.names if any(p.endswith(suffixes) for p in parts[name]))

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def watched(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names whose change makes an index of these files stale."""
        folders = {str(above) for name in names for above in Path(name).parents}
        return (*sorted(folders if self.can_gain else ()), *names)


def take_secrets(location: str) -> str:
    """A location without its signature, which is stored for requests.

    DataError for a URL with a login, or with a signature where there can be none.
    """
    if not is_remote(location):
        return location
    check_url(location)
    name = public_name(location)
    scheme = location.partition("://")[0].lower()
    if scheme in ("s3", "gs") and "?" in location:
        raise DataError(
            "storage.query-in-store-url",
            "{url}: {scheme}:// takes no query; credentials come from the environment and from "
            "the files of the store's own tools",
            url=name.partition("?")[0],
            scheme=scheme,
        )
    if name != location:
        is_command = name.startswith(PIPE)
        clean, given = (text if is_command else split_of(text)[0] for text in (name, location))
        clean_ones, given_ones = expand_braces(clean), expand_braces(given)
        if len(clean_ones) != len(given_ones):
            raise DataError(
                "storage.braces-outside-path",
                "{url}: write the brace list in the path of the URL",
                url=name,
            )
        for one in zip(clean_ones, given_ones, strict=True):
            keep(*one)
    return name


def find_place(location: str) -> ResolvedLocation:
    """The files that a location names. DataError if a local one does not exist."""
    location = take_secrets(location)
    options = options_of(location)
    location, split = split_of(location)
    if not is_remote(location) and os.path.isdir(location):
        names = tuple(_files_in(location))
        return ResolvedLocation(
            location, split, location, names, is_folder=True, can_gain=True, option_text=options
        )
    paths = _list_files(location)
    folders = [os.path.dirname(path) or "." for path in paths]
    root = _common_url(paths) if is_remote(location) else os.path.commonpath(folders) or "."
    prefix = os.path.join(root, "")
    names = tuple(
        path[len(prefix) :] if path.startswith(prefix) else os.path.relpath(path, root)
        for path in paths
    )
    can_gain = not is_remote(location) and glob.has_magic(location)
    return ResolvedLocation(
        location, split, root, names, is_folder=False, can_gain=can_gain, option_text=options
    )


def split_of(location: str) -> tuple[str, str | None]:
    """`FILE#train` as FILE and "train", without options.

    The name of an existing file with a # stays whole.
    """
    bare, split = _split_last(location)
    match = _OPTIONS.fullmatch(bare)
    return (bare if match is None or os.path.exists(bare) else match[1]), split


def options_of(location: str) -> str:
    """The options in a location, as text: `#label=species` of `FILE#label=species#train`."""
    return _split_last(location)[0].removeprefix(split_of(location)[0])


def _split_last(location: str) -> tuple[str, str | None]:
    match = _SPLIT.fullmatch(location)
    if match is None or os.path.exists(location):
        return location, None
    return match[1], match[2]


def expand_braces(text: str) -> list[str]:
    """`a{08..10}` as `a08`, `a09`, `a10`, padded to the width of the first number.

    Empty if a range is empty, as in `{3..1}`. DataError for more than a million names: no data set
    has so many.
    """
    ranges = [(int(first), int(last)) for first, last in _BRACES.findall(text)]
    count = prod(max(0, last - first + 1) for first, last in ranges)
    if count > _MAX_NAMES:
        raise DataError(
            "data.too-many-names",
            "{location}: a brace list of {num_names:,} names; {most:,} are the most",
            location=without_secrets(text),
            num_names=count,
            most=_MAX_NAMES,
        )
    return _expanded(text) if count else []  # an empty range does not bound the others


def _expanded(text: str) -> list[str]:
    before, *parts = _BRACES.split(text)
    choices = [
        [f"{number:0{len(first)}d}{after}" for number in range(int(first), int(last) + 1)]
        for first, last, after in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]
    return ["".join(words) for words in product([before], *choices)]


def _list_files(location: str) -> list[str]:
    """The files that a glob, a brace list or a single path or URL names."""
    if is_on_hub(location) and glob.has_magic(location):
        names = files_like(location)
    elif is_remote(location):
        names = [_with_path(url) for url in expand_braces(location)]
    elif os.path.exists(location):  # its name may have any characters
        names = [location]
    else:
        names = _matches(location) or [
            p for n in expand_braces(location) for p in _matches(n) or [n]
        ]
    if not location:
        raise DataError("data.empty-location")
    if not names:
        raise DataError("data.no-match", location=location)
    here = [name for name in names if not is_remote(name)]
    are_files = look_at(os.path.isfile, here)
    missing = [name for name, is_file in zip(here, are_files, strict=True) if not is_file]
    if missing:
        more = f" ({len(missing)} of {len(names)} are missing)" if len(names) > 1 else ""
        raise DataError("data.not-found", path=missing[0], hint=more)
    return names


def _with_path(url: str) -> str:
    """A URL; a / is appended to that of a bare server."""
    path, mark, query = url.partition("?")
    return url if "/" in path.partition("://")[2] else f"{path}/{mark}{query}"


def _matches(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern)) if glob.has_magic(pattern) else []


def _common_url(urls: list[str]) -> str:
    """The common folder of URLs; double slashes stay, since keys of S3 may have them."""
    first, last = min(urls), max(urls)
    root = first[: first.rfind("/") + 1]
    while not last.startswith(root):
        root = root[: root.rfind("/", 0, -1) + 1]
    root = root if root.endswith("//") else root.removesuffix("/")
    if not root or root.endswith("://") or any(url.startswith(f"{root}//") for url in urls):
        raise DataError(
            "data.no-common-folder",
            "{first} and {last}: have no common folder: write them as several locations",
            first=urls[0],
            last=urls[-1],
        )
    return root


def _files_in(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and _is_file(e))


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False
