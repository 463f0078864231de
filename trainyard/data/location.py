"""A LOCATION as users write it: a folder, a file, a glob or a brace list of files."""

import glob
import os
import re
from pathlib import Path

from trainyard.errors import DataError

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand_braces(text: str) -> list[str]:
    """`a{08..10}` as `a08`, `a09`, `a10`; the width of the first number is kept."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    first, last = match.groups()
    names = [
        f"{text[: match.start()]}{number:0{len(first)}d}{text[match.end() :]}"
        for number in range(int(first), int(last) + 1)
    ]
    return [full for name in names for full in expand_braces(name)]


def is_file_list(location: str) -> bool:
    """True for a location that names files rather than one folder."""
    return bool(_BRACES.search(location)) or glob.has_magic(location) or os.path.isfile(location)


def list_files(location: str) -> list[Path]:
    """The files that a glob, a brace list or a single path names, each checked to exist."""
    if glob.has_magic(location) and not os.path.exists(location):
        paths = sorted(glob.glob(location))
        if not paths:
            raise DataError(f"{location}: no file matches")
        return [Path(path) for path in paths]
    names = expand_braces(location)
    if not names:
        raise DataError(f"{location}: no file matches; the first number is to be the smaller")
    missing = [name for name in names if not os.path.isfile(name)]
    if missing:
        more = f" ({len(missing)} of {len(names)} are missing)" if len(names) > 1 else ""
        raise DataError(f"{missing[0]}: no such file or folder{more}")
    return [Path(name) for name in names]


def location_root(location: str) -> Path:
    """The folder that holds everything a location names."""
    if os.path.isdir(location):
        return Path(location)
    return Path(os.path.commonpath([path.parent for path in list_files(location)]))


def train_and_val(location: str) -> dict[str, str]:
    """The locations of both splits of a data set."""
    splits = find_splits(location)
    missing = [split for split in ("train", "val") if split not in splits]
    if missing:
        raise DataError(
            f"{location}: has no {' and no '.join(missing)} data; expected folders train and val, "
            "or shards *train*.tar and *val*.tar; or name them by --data.train and --data.val"
        )
    return splits


def find_splits(location: str) -> dict[str, str]:
    """The locations of "train" and "val" inside one data set, as far as there are any."""
    folder = Path(location)
    if not folder.exists():
        raise DataError(f"{location}: no such file or folder")
    splits = {}
    for split in ("train", "val"):
        if (folder / split).is_dir():
            splits[split] = str(folder / split)
        elif folder.is_dir() and any(folder.glob(f"*{split}*.tar")):
            splits[split] = os.path.join(glob.escape(str(folder)), f"*{split}*.tar")
    return splits
