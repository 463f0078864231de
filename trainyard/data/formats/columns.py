"""The columns of a table that hold the image, its labels and its split, known by their names."""

import re
from collections.abc import Sequence

from trainyard.errors import DataError
from trainyard.hints import did_you_mean

# The first name of each kind has precedence; of the others a table may have one.
_NAMES = {
    "path": "path file filename file_name filepath file_path image image_path img img_path",
    "image": "image img jpg jpeg png webp picture photo",
    "label": "label labels fine_label coarse_label label_name class class_name category target",
    "split": "split subset partition",
}
LISTS = "labels"
"""The name of a column of lists of labels, in a list."""


def find_column(
    kind: str,
    names: Sequence[str],
    path: str,
    *,
    header: str = "",
    wanted: str | None = None,
    also: Sequence[str] = (),
) -> int | None:
    """The position of a kind of column among the names of a table; None if it has none.

    `header`: the place of the names in the file. `wanted`: the name that the user gives. `also`:
    names that count besides the usual ones.
    DataError if several columns can be meant, or the wanted one is not there.
    """
    first, *others = _NAMES[kind].split()
    if wanted is not None:
        found = [at for at, name in enumerate(names) if name.strip() == wanted]
    else:
        found = [at for at, name in enumerate(names) if plain(name) == first] or [
            at for at, name in enumerate(names) if plain(name) in others or name in also
        ]
    if len(found) > 1:
        hint = "name one: LOCATION#label=COLUMN" if kind == "label" else "rename one to " + first
        either = " and ".join(repr(names[at]) for at in found)
        raise DataError(
            "data.several-columns", path=path, header=header, names=either, kind=kind, hint=hint
        )
    if wanted is not None and not found:
        hint = did_you_mean(wanted, names)
        raise DataError(
            "data.unknown-column",
            path=path,
            header=header,
            column=wanted,
            names=_listed(names),
            hint=hint,
        )
    return found[0] if found else None


def missing(kind: str, names: Sequence[str], path: str, header: str = "") -> DataError:
    """The error of a table without a kind of column; it names the usual ones, and those there."""
    *usual, last = _NAMES[kind].split()
    hint = "; or name one: LOCATION#label=COLUMN" if kind == "label" else ""
    return DataError(
        "data.no-column",
        path=path,
        header=header,
        kind=kind,
        usual=", ".join(usual),
        last=last,
        names=_listed(names),
        hint=hint,
    )


def plain(name: str) -> str:
    """A name of a column, in lower case and without spaces: `Image Path` as image_path."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
