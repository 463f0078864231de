"""The names of numbered classes in a file beside the data, as other tools and authors write it.

`label.labels.txt` of TFDS, `classnames.txt` of CLIP benchmark, `class_to_idx.json` of torchvision
and the like have a name a line, `NUMBER NAME` a line, or a JSON object from one to the other. They
count only if they name exactly the numbers that the data has.
"""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from trainyard.data.formats.split_names import split_named
from trainyard.data.storage.source import is_remote
from trainyard.printable import print_line

_FILES = (
    *("*.labels.txt", "classes.txt", "classnames.txt", "class_names.txt", "loc_synset_mapping.txt"),
    *("class_to_idx.json", "label_map.json", "label_num_to_*.json"),
)
_ENDS = (".txt", ".json")
_NUMBERED = re.compile(r"(\d+)[\s,:]+(.+)")
_WORDNET = re.compile(r"(n\d{8})\s.*")
_MAX_BYTES = 1 << 24


def files_beside(root: str) -> list[str]:
    """The files that may name classes, relative to a folder of data; above that of a split too."""
    if not root or is_remote(root):
        return []
    is_split = split_named(os.path.basename(os.path.abspath(root)))
    found = []
    for folder in ("", "..") if is_split else ("",):
        with suppress(OSError):  # the folder above may be closed
            texts = (n for n in os.listdir(os.path.join(root, folder)) if n.endswith(_ENDS))
            names = (n for n in texts if any(fnmatchcase(n.lower(), kind) for kind in _FILES))
            found += [os.path.join(folder, name) for name in sorted(names)]
    return found


def names_beside(root: str, numbers: Sequence[int]) -> dict[int, str]:
    """The names of all numbers up to the highest that the data have; empty without a file.

    Prints which file is taken, and those that do not fit.
    """
    found: dict[str, dict[int, str]] = {}
    for file in files_beside(root):
        path = os.path.normpath(os.path.join(root, file))
        names = _read(path)
        if not names or len({*names.values()}) < len(names):
            print_line(f"{path}: holds no list of distinct class names: it is not used")
        elif (min(names), max(names)) != (min(numbers), max(numbers)):
            which = f"{min(names)} to {max(names)}, and the labels are {min(numbers)} to"
            print_line(f"{path}: names classes {which} {max(numbers)}: it is not used")
        else:
            found[path] = names
    if len({tuple(sorted(names.items())) for names in found.values()}) > 1:
        print_line(f"{' and '.join(found)}: name the classes differently: none is used")
    elif found:
        path, names = next(iter(found.items()))
        low, high = min(names), max(names)
        shown = f"class {low} is {names[low]!r}, … class {high} is {names[high]!r}"
        print_line(f"{path}: names the classes: {shown}")
        return names
    return {}


def _read(path: str) -> dict[int, str]:
    """The names by number in a file; empty for another content."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8-sig")
        return _of_json(json.loads(text)) if path.endswith(".json") else _of_lines(text)
    except (OSError, ValueError, RecursionError):
        return {}


def _of_lines(text: str) -> dict[int, str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    numbered = [match for line in lines if (match := _NUMBERED.fullmatch(line))]
    if lines and len(numbered) == len(lines):
        names = {int(match[1]): match[2] for match in numbered}
        is_whole = len(names) == len(lines) == max(names) - min(names) + 1
        return names if is_whole else {}
    ids = [match[1] for line in lines if (match := _WORDNET.fullmatch(line))]
    return dict(enumerate(ids if len(ids) == len(lines) else lines))


def _of_json(tree: object) -> dict[int, str]:
    if isinstance(tree, list):
        tree = {str(number): name for number, name in enumerate(tree)}
    if not isinstance(tree, dict):
        return {}
    if all(type(value) is int for value in tree.values()):
        tree = {str(value): key for key, value in tree.items()}
    if not all(key.isdecimal() and isinstance(value, str) for key, value in tree.items()):
        return {}
    names = {int(key): str(value) for key, value in tree.items()}
    is_whole = names and len(names) == max(names) - min(names) + 1
    return names if is_whole else {}
