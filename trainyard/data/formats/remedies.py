"""What to do with files that no reader opens: archives, arrays, and tables beside images."""

import os
import re
import shlex
from collections.abc import Iterable

from trainyard.data.formats.left_out import HIDDEN, LeftOut
from trainyard.data.formats.scan import is_hidden
from trainyard.data.formats.split_names import split_named
from trainyard.data.storage.source import is_remote

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
"""Endings of tars that nothing reads."""
_UNPACK = {
    ".zip": "unzip {path} -d {folder}",
    ".7z": "7z x {path} -o{folder}",
    ".rar": "unrar x {path} {folder}/",
    **dict.fromkeys(COMPRESSED, "mkdir {folder} && tar xf {path} -C {folder}"),
}
_ARRAYS = (
    *(".arrow", ".mdb", ".npz", ".mat", ".h5", ".hdf5", ".pkl", ".pickle", ".bin"),
    *("-ubyte", "-ubyte.gz"),
)
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".lst")  # lists that are read; a .txt is a text
_SHEETS = (".xlsx", ".xls", ".ods")
ARRAYS = "trainyard.write_images makes a data set of arrays: docs/arrays.md has the lines"


def remedy(paths: Iterable[str]) -> str:
    """The end of an error message, for the first file with a remedy; "" without any.

    Archives come first, then tables of training data; those to submit results in come last.
    """
    for path in sorted(paths, key=_rank):
        name = os.path.basename(path).lower()
        suffix = next((suffix for suffix in _UNPACK if name.endswith(suffix)), "")
        if match := re.search(r"cifar-(100?)-(?:python|binary|batches)", path):
            return f"; `trainyard data prepare cifar{match[1]}` reads CIFAR-{match[1]}"
        if suffix and not is_remote(path) and not os.path.isdir(path[: -len(suffix)]):
            quoted = {"path": shlex.quote(path), "folder": shlex.quote(path[: -len(suffix)])}
            return f"; unpack it and name the folder: {_UNPACK[suffix].format(**quoted)}"
        if re.match("(train|t10k)-(images|labels).idx", name):
            return "; `trainyard data prepare mnist` reads the files of MNIST"
        if name.endswith(_ARRAYS):
            return f"; {path} may hold arrays: {ARRAYS}"
        if name.endswith(_SHEETS):
            return f"; if {path} lists the images, save it as a .csv file and name that"
        if name.endswith(_TABLES):
            return f"; if {path} lists the images, name it (docs/arrays.md, if it holds pixels)"
    return ""


def remedy_beside(root: str, left_out: LeftOut) -> str:
    """`remedy` for the examples of what a scan leaves out in a folder, or the tables above it."""
    kinds = left_out.kinds.items()
    paths = [os.path.join(root, name) for kind, (_, name) in kinds if kind != HIDDEN]
    for folder in (root, os.path.normpath(os.path.join(root, ".."))):
        names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
        some = _TABLES if folder != root else (*_UNPACK, *_TABLES, *_SHEETS)
        shown = (name for name in names if name.lower().endswith(some) and not is_hidden(name))
        paths += [os.path.join(folder, name) for name in shown]
    return remedy(paths)


def _rank(path: str) -> tuple[bool, bool, bool, bool]:
    name = os.path.basename(path).lower()
    split = split_named(os.path.basename(path))
    is_other = name.endswith(_TABLES) and (split == "test" or "submission" in name)
    is_sheet = name.endswith(_SHEETS)
    return not name.endswith((*_UNPACK,)), is_other, is_sheet, split != "train"
