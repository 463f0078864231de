"""The columns of a table that hold the image, its labels and its split, known by their names.

Columns that are not read are told. One of them that divides the rows into splits is an error: rows
to test on would be trained on.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache

from trainyard.data.formats.left_out import COLUMNS, LeftOut
from trainyard.data.formats.split_names import is_split_word, split_named, splits_named
from trainyard.errors import DataError
from trainyard.hints import did_you_mean

# The first name of each kind has precedence; of the others a table may have one.
_NAMES = {
    "path": (
        "path file filename file_name filepath file_path image image_path img img_path source_ref"
    ),
    "image": "image img jpg jpeg png webp picture photo",
    "label": "label labels fine_label coarse_label label_name class class_name category target",
    "split": "split subset partition",
}
LISTS = "labels"
"""The name of a column of lists of labels, in a list."""
_YES, _NO = {"1", "true", "yes"}, {"0", "false", "no"}
_LIKELY = {"data_set", "dataset", "fold", "mode", "phase", "set", "stage", "usage"}
NUMBERED = {"0": "train", "1": "val", "2": "test"}
"""The splits by number, as CelebA has them, for a column that the user names."""
_FEW = 12  # values of a column of splits; one of paths has more, that name a split too


def split_of_cell(column: str, cell: str) -> str:
    """The split that a cell of a column stands for; "" if it names none.

    A word says it, or yes or no (1, True, …) in a column such as `is_valid`.
    """
    named, word = split_named(column), cell.strip().lower()
    if word in _YES:
        return named
    if word in _NO:
        return named and ("test" if named == "train" else "train")
    return split_named(cell)


@lru_cache(maxsize=64)
def flag_of_cell(cell: str) -> bool | None:
    """True for a cell that says yes or 1, False for no, 0, -1 and a blank; None for another."""
    word = cell.strip().lower()
    if word in _YES or word in _NO or not word:
        return word in _YES
    with suppress(ValueError):
        return {1.0: True, 0.0: False, -1.0: False}.get(float(word))
    return None


def may_be_split(column: str) -> bool:
    """True for a name that a column of splits may have."""
    return plain(column) in _LIKELY or bool(splits_named(column))


def find_split(
    names: Sequence[str], path: str, *, header: str = "", wanted: str | None = None
) -> int | None:
    """`find_column` of the splits; `wanted`: "none" stands for no column."""
    if wanted == "none":
        return None
    return find_column("split", names, path, header=header, wanted=wanted)


def likely_split(names: Sequence[str], head: Sequence[Sequence[str]]) -> int | None:
    """The only column of a likely name with words for splits alone in the first rows; else None."""
    found = []
    for at, name in enumerate(names):
        words = {row[at].strip().lower() for row in head}
        is_likely = plain(name) in _LIKELY or name.isdigit()  # a number stands for no name
        is_split = is_likely and all(map(is_split_word, words))
        if is_split and len(set(map(split_named, words))) > 1:
            found.append(at)
    return found[0] if len(found) == 1 else None


class Unread:
    """The columns of a table that are not read: their names, and the values of likely splits."""

    def __init__(self, names: Sequence[str], read: Collection[int | None]) -> None:
        self.names = names
        self.values = {at: set[str]() for at in range(len(names)) if at not in read}
        self.left_out = LeftOut()
        if self.values:
            shown = ", ".join(repr(names[at]) for at in self.values)
            self.left_out.add(COLUMNS, shown, len(self.values))

    def see(self, cells: Sequence[str]) -> None:
        """Notes the cells of a row; a column with another value is forgotten."""
        for at in [*self.values]:
            if cells[at] not in self.values[at]:
                self.add(at, [cells[at]])

    def add(self, at: int, cells: Iterable[str]) -> None:
        """Notes cells of a column."""
        known = self.values.get(at, set())
        known.update(cell.strip() for cell in cells if cell.strip())
        if len(known) > _FEW or not all(split_of_cell(self.names[at], one) for one in known):
            self.values.pop(at, None)

    def divided(self) -> tuple[str, str] | None:
        """The name of a column that divides the rows into splits, and its values; None without."""
        for at, values in self.values.items():
            if len({split_of_cell(self.names[at], value) for value in values}) > 1:
                return self.names[at], " and ".join(map(repr, sorted(values)[:3]))
        return None


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
        raise several_columns(kind, [names[at] for at in found], path, header)
    if wanted is not None and not found:
        hint = did_you_mean(wanted, names)
        raise DataError(
            "data.unknown-column",
            "{path}{header}: has no column {column!r}, but {names}{hint}",
            path=path,
            header=header,
            column=wanted,
            names=_listed(names),
            hint=hint,
        )
    return found[0] if found else None


def has_column(kind: str, names: Sequence[str]) -> bool:
    """True if a name is a usual one of a kind of column."""
    return any(plain(name) in _NAMES[kind].split() for name in names)


def several_columns(kind: str, names: Sequence[str], path: str, header: str = "") -> DataError:
    """The error of a table in which several columns can be the one of a kind."""
    return DataError(
        "data.several-columns",
        "{path}{header}: {names} can each be the {kind}: {hint}",
        path=path,
        header=header,
        names=" and ".join(map(repr, names)),
        kind=kind,
        hint=_hint(kind) or f"rename one to {_NAMES[kind].split()[0]}",
    )


def likely_label(
    names: Sequence[str], head: Sequence[Sequence[str]], taken: Collection[int | None]
) -> str:
    """The column, or the columns of a class each, that may hold the labels; "" if none is likely.

    Labels come again in the first rows, and are not all alike. `taken`: columns of something else.
    """
    cells = {
        name.strip(): [row[at] for row in head] for at, name in enumerate(names) if at not in taken
    }
    flags = [name for name in cells if {*map(flag_of_cell, cells[name])} == {True, False}]
    if flags[1:]:
        return ",".join(flags)
    return next((name for name in cells if 1 < len({*cells[name]}) < len(head)), "")


def _hint(kind: str) -> str:
    return f"name one: LOCATION#{kind}=COLUMN" if kind in ("label", "path") else ""


def missing(
    kind: str, names: Sequence[str], path: str, header: str = "", *, example: str = ""
) -> DataError:
    """The error of a table without a kind of column; it names the usual ones, and those there.

    `example`: the location with an option that may name the column.
    """
    *usual, last = _NAMES[kind].split()
    hint = f"name one: {example}" if example else _hint(kind)
    return DataError(
        "data.no-column",
        "{path}{header}: has no column of the {kind} ({usual} or {last}), but {names}{hint}",
        path=path,
        header=header,
        kind=kind,
        usual=", ".join(usual),
        last=last,
        names=_listed(names),
        hint=hint and f"; or {hint}",
    )


def plain(name: str) -> str:
    """A name of a column, in lower case and without spaces: `Image Path` as image_path."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
