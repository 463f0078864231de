"""The rows of a list, checked: the columns that are read, and what is in them.

The columns are decided when a list is opened, by its options, by their names, or by their cells.
"""

import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from trainyard.data.formats.cells import Images, folder_in, parts_of
from trainyard.data.formats.columns import (
    LISTS,
    NUMBERED,
    Unread,
    find_column,
    find_split,
    flag_of_cell,
    has_column,
    likely_label,
    likely_split,
    missing,
    plain,
    several_columns,
    split_of_cell,
)
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.list_json import END, JsonTable
from trainyard.data.formats.list_json import SUFFIXES as JSON
from trainyard.data.formats.list_splits import are_splits, names_splits, read_splits
from trainyard.data.formats.list_text import HEAD, TEXTS, Table
from trainyard.data.formats.split_names import SPLITS, rest_of, split_named
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.manifest import is_inside
from trainyard.errors import DataError
from trainyard.hints import did_you_mean
from trainyard.printable import print_line

BETWEEN = "|"
"""What stands between the labels in a cell."""
_SURE, _EACH = 100, 64  # the first rows, and each n-th one, are looked up before all others
_ODD = re.compile(r"^[/.]|//|/\.|[:\0]|/$")  # of a cell that may be no plain path
_WHOLE = re.compile(r"\.0+$")  # the end of a whole number, as MXNet writes labels
_ID = re.compile(r"\d+|(?=.*\d)[\da-fA-F]+(-[\da-fA-F]+)+")  # a number, or an UUID
_NAMES_OF_LABELS = ("label_name", "class_name")  # columns beside numbers
_NAMED = 3  # images that a message names
_UNLABELLED = "rows without a label"
_UNLISTED = "images in no list of a split"


class Row(NamedTuple):
    line: int
    path: str  # relative to the list's folder
    labels: list[str]
    split: str | None  # None without a column of splits
    cell: str  # of the image
    cells: list[str]


def named_splits(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits that options name lists for."""
    return tuple(split for split in SPLITS if split in place.options)


def has_split_list(place: ResolvedLocation) -> bool:
    """True if the option of the splits names a list of them, and no column."""
    return place.options.get("split", "").lower().endswith(TEXTS)


def open_table(
    path: str,
    is_row: Callable[[Sequence[str]], bool],
    is_image: Callable[[str], bool] = lambda _: False,
) -> Table:
    """The rows of a file of any of the SUFFIXES."""
    is_json = path.lower().endswith(JSON)
    return JsonTable(path) if is_json else Table(path, is_row, is_image)


def find_divider(table: Table, wanted: str | None) -> int | None:
    """The column of the splits, also one that its cells tell.

    `wanted`: its name, or "none" for no column. DataError if several can be meant.
    """
    at = find_split(table.names, table.path, header=table.header, wanted=wanted)
    if at is None and wanted is None:
        return likely_split(table.names, [cells for _, cells in islice(table.rows(), HEAD)])
    return at


def split_by(column: str, cell: str, wanted: str | None) -> str:
    """The split that a cell of a column stands for; by number only in a wanted column."""
    split = split_of_cell(column, cell)
    return split or (NUMBERED.get(cell, "") if wanted else "")


class Survey:
    """What one pass over the rows tells of all of them."""

    def __init__(self, unread: Unread) -> None:
        self.unread, self.left_out = unread, LeftOut()
        self.left_out.update(unread.left_out)
        self.hashes = array("q")
        self.folders, self.labels = set[str](), set[str]()
        self.searched: Row | None = None
        """The first row whose cell stands for an image of another path."""
        self.cells: dict[tuple[str, bool], Row] = {}
        """A row of each folder with images: one whose cell has the folder's name, and another."""
        self.names: dict[str, str] = {}
        """The name beside each label, of a list with a column of names."""
        self.several: Row | None = None
        self.none: Row | None = None
        """The first row with several labels, and the first without any."""

    def add(self, row: Row) -> None:
        self.hashes.append(hash(row.path))
        self.folders.add(row.path.rpartition("/")[0] or ".")
        self.labels.update(row.labels)
        if len(row.labels) != 1:
            self.several = self.several or (row if row.labels else None)
            self.none = self.none or (None if row.labels else row)


class ListRows:
    """The columns of a list, its rows, and the images that its cells name."""

    is_plain = False
    """True once all cells are known as plain paths."""

    def __init__(
        self, place: ResolvedLocation, path: str, images: Images, split: str | None = None
    ) -> None:
        self.place, self.path, self.images, self.split = place, path, images, split
        self.root = images.root
        self.found = list[Sequence[str]]()
        """The paths for the cell of each row so far, once images are searched."""
        self.members: Mapping[str, str] | None = None
        """The split of each image by the lists of the splits; None without these."""
        self.key: int | None = None
        """The column that tells the member; None for the path."""
        self.beside = list[str]()
        """The paths of the lists of the splits."""
        self.is_lst = path.lower().endswith(".lst")
        self.table = open_table(path, self._is_row, images.has_end)
        names, header, options = self.table.names, self.table.header, place.options
        find = partial(find_column, names=names, path=self.path, header=header)
        is_beside = bool(named_splits(place)) or has_split_list(place)
        self.wanted_split = "none" if is_beside else options.get("split")
        self.divider = find_divider(self.table, self.wanted_split)
        label, image = options.get("label"), find("path", wanted=options.get("path"))
        is_one_hot = label is not None and "," in label and label not in names
        wanted: list[str | None] = [*label.split(",")] if label and is_one_hot else [label]
        labels = [find("label", wanted=name) for name in wanted]
        self.labels = [at for at in labels if at is not None]
        self.is_guessed = image is None
        self.image = self._column_of_images() if image is None else image
        self.labels = self.labels or self._other_columns()
        """The column of the labels, or one for each class; none if the folder is the class."""
        is_json_list = any(names[at] in self.table.lists for at in self.labels)
        self.between = END if is_json_list else options.get("between", BETWEEN)
        is_list = is_json_list or any(plain(names[at]) == LISTS for at in self.labels)
        self.has_list = not is_one_hot and (is_list or "between" in options)
        if is_one_hot and "between" in options:
            raise DataError(
                "list.between-of-columns",
                "{location}: #between= is for several labels in a cell, and #label= names a column "
                "for each class: leave one of them out",
                location=place.with_options,
            )
        named = (at for at, name in enumerate(names) if plain(name) in _NAMES_OF_LABELS)
        is_single = len(self.labels) == 1 and not self.has_list
        self.name = next((at for at in named if is_single and at not in self.labels), None)
        """The column of a name for each label."""
        self.unlabelled = options.get("unlabelled", "")
        self.leaves_out = self.unlabelled == "none"

    def _is_row(self, cells: Sequence[str]) -> bool:
        """True if cells name an image, and are no header."""
        options = self.place.options
        wanted = {options[name] for name in ("path", "label", "split") if name in options}
        is_header = has_column("path", cells) or not all(map(str.isdigit, wanted & {*cells}))
        return not is_header and any(map(self._is_image_or_path_of_folder, map(str.strip, cells)))

    def _is_image_or_path_of_folder(self, cell: str) -> bool:
        return self._is_image(cell) or ("/" in cell and self._is_folder(cell))

    def _is_image(self, cell: str) -> bool:
        return self.images.is_path(cell) or bool(self.images.named(cell))

    def _is_folder(self, cell: str) -> bool:
        return bool(self.images.folders_named(cell))

    def _column_of_images(self) -> int:
        """The column whose cells are images, else that of their folders.

        DataError if none is, or several are.
        """
        names, head = self.table.names, self._head()
        columns = partial(self._columns_where, head)
        found = columns(self._is_image) or columns(self._is_folder)
        if found[1:]:  # numbers of the rows may be names too
            named = [at for at in found if not all(row[at].strip().isdigit() for row in head)]
            found = named or found
        if len(found) == 1:
            return found[0]
        if found:
            either = [names[at] for at in found]
            raise several_columns("path", either, self.path, self.table.header)
        if not head:
            raise missing("path", names, self.path, self.table.header)
        raise self._names_no_images(head)

    def _columns_where(
        self, head: Sequence[Sequence[str]], is_wanted: Callable[[str], bool]
    ) -> list[int]:
        """The columns whose cells, each another, all are wanted."""
        found = list[int]()
        for at in range(len(self.table.names) if head else 0):
            cells = [row[at].strip() for row in head]
            is_free = at not in (*self.labels, self.divider)
            if is_free and len({*cells}) == len(cells) and all(map(is_wanted, cells)):
                found.append(at)
        return found

    def _names_no_images(self, head: Sequence[Sequence[str]]) -> DataError:
        """The error of a list whose cells are no images; it names the nearest column."""

        def nearness(at: int) -> tuple[int, int]:
            cells = [row[at].strip() for row in head]
            images = sum(1 for _ in takewhile(self._is_image, cells))
            return images, len({*cells})

        at = max(range(len(self.table.names)), key=nearness)
        location = self.place.with_options
        example = self.images.example() or "no image"
        return DataError(
            "list.no-images-named",
            "{path}{header}: no column names images in {folder}, which holds {example}; {column!r} "
            "with {cell!r} is nearest: '{location}#root=FOLDER' names another folder, and "
            "'{location}#path={column}' tells which cell has no image",
            path=self.path,
            header=self.table.header,
            folder=self.root,
            example=example,
            column=self.table.names[at],
            cell=head[0][at],
            location=location,
        )

    def _head(self) -> list[list[str]]:
        return [cells for _, cells in islice(self.table.rows(), HEAD)]

    def _other_columns(self) -> list[int]:
        """The column of the labels in a list without a header, if it has a further one.

        Whole numbers or ids in the first column, each another, are those of the rows.
        """
        names, header = self.table.names, self.table.header
        if self.table.has_header and self.split:
            return []
        if self.table.has_header:
            likely = likely_label(names, self._head(), (self.image, self.divider))
            example = f"{self.place.with_options}#label={likely}"
            raise missing("label", names, self.path, header, example=example if likely else "")
        others = [at for at in range(len(names)) if at not in (self.image, self.divider)]
        cells = [row[0].strip() for row in self._head()]
        if self.image and len({*cells}) == len(cells) > 1 and all(map(_ID.fullmatch, cells)):
            others.remove(0)
        if others[1:]:
            raise several_columns("label", [names[at] for at in others], self.path, header)
        values = sorted({row[at].strip() for at in others for row in self._head()})
        if others and names_splits(self.path) and are_splits(values):
            raise DataError(
                "list.splits-for-labels",
                "{path}: gives images a split ({values}), and no label: 'LIST#split={name}' takes "
                "it as the splits of a list with labels; '{location}#label={column}' takes it for "
                "the labels",
                path=self.path,
                values=" and ".join(values),
                name=os.path.basename(self.path),
                location=self.place.with_options,
                column=names[others[0]],
            )
        return others

    def join(self, path: str) -> None:
        """Take the splits of rows from a list of splits. DataError if it has none of these rows."""
        self.members, self.beside = read_splits(path), [path]
        head = self._head()
        hits = [sum(row[at].strip() in self.members for row in head) for at in range(len(head[0]))]
        self.key = max((self.image, *range(len(hits))), key=hits.__getitem__)
        if not hits[self.key]:
            raise DataError(
                "list.splits-of-others",
                "{path}: has no split for {image!r} or any other cell of the first rows of {list}",
                path=path,
                image=head[0][self.image],
                list=self.path,
            )

    def survey(self) -> Survey:
        """One pass over the rows. DataError for a wrong line, and for a column of splits unread."""
        survey = Survey(
            Unread(self.table.names, (self.image, *self.labels, self.name, self.divider))
        )
        was_searched = self.images.is_searched
        for row in self._read(looks=True):
            survey.unread.see(row.cells)
            if kind := self._why_left_out(row):
                survey.left_out.add(kind, f"{self.path}, line {row.line}")
                continue
            if was_searched and not survey.searched and row.path != row.cell:
                survey.searched = row
            self._check_folder(survey, row)
            survey.add(row)
            if self.name is not None and row.labels:
                name = row.cells[self.name].strip()
                if survey.names.setdefault(row.labels[0], name) != name:
                    survey.names[row.labels[0]] = ""
        if self.images.is_searched and not was_searched:
            return self.survey()
        if self.labels[1:]:
            self.has_list = survey.several is not None
        if survey.none and not self.has_list:
            raise DataError(
                "list.no-label",
                "{path}, line {line}: has no label: '{location}#unlabelled=CLASS' gives such rows "
                "a class of their own, '{location}#unlabelled=none' leaves them out",
                path=self.path,
                line=survey.none.line,
                location=self.place.with_options,
            )
        options = self.place.options
        is_divided = self.divider is not None or named_splits(self.place) or "split" in options
        if not is_divided and (found := survey.unread.divided()):
            raise DataError(
                "list.unread-split",
                "{path}: its column {column!r} looks like a split ({values}): "
                "'{location}#split={column}' takes it as one, '{location}#split=none' passes over "
                "it",
                path=self.path,
                column=found[0],
                values=found[1],
                location=self.place.with_options,
            )
        return survey

    def _check_folder(self, survey: Survey, row: Row) -> None:
        """DataError if images that lie in a folder by its name share it with those of another."""
        name = folder_in(row.cell) if self.images.is_searched else ""
        if not name:
            return
        folder = os.path.dirname(row.path)
        is_same = os.path.basename(folder) == name
        survey.cells.setdefault((folder, is_same), row)
        if other := survey.cells.get((folder, not is_same)):
            one, two = (row, other) if is_same else (other, row)
            raise DataError(
                "list.cells-of-two-folders",
                "{path}, line {line}: {cell!r} stands for {image}, in the folder of {other!r} "
                "(line {other_line}): fetch its own folder, or write the paths as they are here",
                path=self.path,
                line=two.line,
                cell=two.cell,
                image=two.path,
                other=one.cell,
                other_line=one.line,
            )

    def class_names(self, labels: set[str], beside: dict[str, str]) -> dict[str, str]:
        """The name of the class of each label: of folders, the path below the one above them.

        `beside`: names in a column of their own; they count for numbers, one name for each.
        """
        if beside and all(map(str.isdigit, labels)):
            is_one_to_one = all(beside.values()) and len({*beside.values()}) == len(beside)
            what = "names the labels" if is_one_to_one else "has no name for each label: not used"
            print_line(f"{self.path}: its column {self.table.names[self.name or 0]!r} {what}")
            if is_one_to_one and beside.keys() == labels:
                return beside
        if self.labels:
            return dict(zip(labels, labels, strict=True))
        folders = {label: os.path.abspath(self.place.path(label)) for label in labels}
        above = os.path.commonpath(folders.values()) if folders else ""
        top = os.path.dirname(above) if above in folders.values() else above
        return {label: os.path.relpath(folder, top) for label, folder in folders.items()}

    def tell(self, survey: Survey) -> None:
        """Print what the cells told of the columns and of the images."""
        names = self.table.names
        if not self.table.has_header:
            label = [f"{names[at]} the label" for at in self.labels] or ["its folder is the class"]
            image = f"column {names[self.image]} is the image, {', '.join(label)}"
            print_line(f"{self.path}: has no header: {image}")
        elif self.is_guessed:
            print_line(f"{self.path}: its column {names[self.image]!r} names the images")
        if self.divider is not None and not has_column("split", [names[self.divider]]):
            print_line(f"{self.path}: its column {names[self.divider]!r} names the splits")
        if self.labels[1:] and (row := survey.several):
            print_line(f"{self.path}, line {row.line}: has several labels: each row has a list")
        if row := survey.searched:
            known = self.images.named(row.cell)
            folders = () if known else self.images.folders_named(row.cell)
            what = f"the images below {folders[0]}" if folders else row.path
            print_line(f"{self.path}, line {row.line}: {row.cell!r} stands for {what}")

    def hint(self, cell: str) -> str:
        """What a missing image may be, for a message."""
        if known := self.images.alike(cell):
            return f"; {self.root} holds {_listed(known)}"
        location = self.place.with_options
        return f"; {self.root} holds no image of this name: {location}#root=FOLDER names another"

    def rows(self) -> Iterator[Row]:
        """The rows, checked one by one, without those that options leave out."""
        rows = self._read()
        if self.members is None and not self.leaves_out:
            return rows
        return (row for row in rows if not self._why_left_out(row))

    def _why_left_out(self, row: Row) -> str:
        """The kind of a row that options leave out; "" for the others."""
        if self.members is not None and not row.split:
            return _UNLISTED
        return _UNLABELLED if self.leaves_out and not row.labels else ""

    def _read(self, *, looks: bool = False) -> Iterator[Row]:
        """All rows. Those that are looked at end at a cell for which the images are searched."""
        inside = os.path.join(self.root, "")
        here = os.path.join(os.path.abspath(self.place.root), "")
        is_here, searches = inside == here, self.images.is_searched
        kinds: dict[str, str] = {}
        has_odd, is_plain, image = False, self.is_plain, self.image
        is_single = len(self.labels) == 1 and not (self.has_list or self.is_lst)
        single = self.labels[0] if is_single else None
        for number, (line, cells) in enumerate(self.table.rows()):
            cell = cells[image].strip()
            text = "" if single is None else cells[single].strip()
            labels = [text] if text else self._labels(line, cells)
            split = self.split
            if self.divider is not None:
                split = self._split(line, cells[self.divider].strip(), kinds)
            if not cell or "" in labels:
                raise self._is_empty(line, "one of its labels" if cell else "its path")
            is_odd = not is_plain and _ODD.search(cell) is not None
            has_odd |= is_odd
            if looks and not searches and self._is_no_path(number, cell, is_odd):
                self.images.is_searched = True
                return
            if searches and number == len(self.found):
                self.found.append(self._found(line, cell))
            for path in self.found[number] if searches else (cell,):
                if not is_here or (_ODD.search(path) if searches else is_odd):
                    path = self._from_here(line, path, inside, here)
                if self.members is not None:
                    key = path if self.key is None else cells[self.key].strip()
                    split = self.members.get(key)
                if not self.labels:
                    labels = [os.path.dirname(path)]
                yield Row(line, path, labels, split, cell, cells)
        self.is_plain = is_plain or (looks and not has_odd)

    def _is_no_path(self, number: int, cell: str, is_odd: bool) -> bool:
        is_outside = is_odd and not cell.startswith(os.path.join(self.root, ""))
        is_looked_up = number < _SURE or number % _EACH == 0 or is_outside
        return is_looked_up and not self.images.is_path(cell)

    def _labels(self, line: int, cells: Sequence[str]) -> list[str]:
        """The labels in a row. DataError for a column of a class with another value than 0 or 1."""
        if len(self.labels) > 1:
            ones = (at for at in self.labels if self._is_one(line, at, cells))
            labels = [self.table.names[at].strip() for at in ones]
        else:
            text = cells[self.labels[0]].strip() if self.labels else ""
            text = _WHOLE.sub("", text) if self.is_lst else text
            if not self.has_list and text:
                return [text]
            between = self.between if self.between.strip() else None  # any blanks
            text = text.removesuffix(END)
            labels = [part.strip() for part in text.split(between)] if text else []
        is_named = self.unlabelled and not self.leaves_out
        return labels or ([self.unlabelled] if is_named and self.labels else [])

    def _is_one(self, line: int, at: int, cells: Sequence[str]) -> bool:
        value = flag_of_cell(cells[at])
        if value is None:
            raise DataError(
                "list.not-a-flag",
                "{path}, line {line}: {value!r} in the column {column!r} of a class is neither 1 "
                "nor 0 (-1, blank)",
                path=self.path,
                line=line,
                value=cells[at],
                column=self.table.names[at],
            )
        return value

    def _is_empty(self, line: int, name: str) -> DataError:
        return DataError(
            "list.empty-cell",
            "{path}, line {line}: {name} is empty",
            path=self.path,
            line=line,
            name=name,
        )

    def _found(self, line: int, cell: str) -> Sequence[str]:
        """The paths below the root of the image or the images of the folder that a cell stands for,
        or the cell as a path.

        DataError if it can stand for several images, or several folders.
        """
        is_above = ".." in cell and ".." in parts_of(cell)
        if is_above or (cell.startswith("/") and os.path.isfile(cell)):
            return (cell,)
        images = self.images.named(cell)
        found = images or self.images.folders_named(cell)
        if found[1:] and (split := split_named(os.path.basename(self.path))):
            # `1` in trainLabels.csv is train/1.png, where there is a test/1.png too
            own = [one for one in found if split in map(split_named, one.split("/")[:-1])]
            found = own or found
        if found[1:] and not self.images.is_path(cell):
            raise DataError(
                "list.ambiguous-image",
                "{path}, line {line}: {image!r} can each be {names}: write more of its path, or "
                "name the folder of the images: {location}#root=FOLDER",
                path=self.path,
                line=line,
                image=cell,
                names=_listed(found),
                location=self.place.with_options,
            )
        if len(found) != 1:
            return (cell,)
        return found if images else self.images.below(found[0])

    def _from_here(self, line: int, cell: str, inside: str, here: str) -> str:
        """A path below the root, relative to the list's folder. DataError if it is outside."""
        full = os.path.normpath(os.path.join(inside, cell))
        if "://" in cell:
            raise DataError(
                "list.image-is-url",
                "{path}, line {line}: {image!r} is a URL: download the images",
                path=self.path,
                line=line,
                image=cell,
            )
        if not is_inside(full.removeprefix(inside)):
            raise DataError(
                "list.image-outside-folder",
                "{path}, line {line}: {image!r} lies outside of {folder}: name a folder that "
                "holds all images, and that relative paths start from: {location}#root=FOLDER",
                path=self.path,
                line=line,
                image=cell,
                folder=self.root,
                location=self.place.location,
            )
        if full.startswith(here):
            return full[len(here) :]
        # `..` is the folder above this one, whatever links to it.
        return os.path.relpath(full, os.path.realpath(here))

    def _split(self, line: int, cell: str, kinds: dict[str, str]) -> str:
        """The split that a cell names. DataError if none, or one that another kind of cell names.

        `kinds`: the first cell of each split.
        """
        column = self.table.names[self.divider or 0]
        split = split_by(column, cell, self.wanted_split)
        if not cell:
            raise self._is_empty(line, "its split")
        if not split:
            hint = did_you_mean(cell, ("train", "val", "test", "training", "validation"))
            if cell in NUMBERED:
                location = self.place.with_options
                hint = f": {location}#split={column} takes 0, 1 and 2 for these"
            raise DataError(
                "list.unknown-split",
                "{path}, line {line}: its split is {split!r}, none of train, val and test{hint}",
                path=self.path,
                line=line,
                split=cell,
                hint=hint,
            )
        first = kinds.setdefault(split, cell)
        if first != cell and rest_of(first) != rest_of(cell):
            raise DataError(
                "list.split-of-two-kinds",
                "{path}, line {line}: its split is {value!r}, and {other!r} before it is {split} "
                "too: give one of them another name, or leave its rows out",
                path=self.path,
                line=line,
                value=cell,
                other=first,
                split=split,
            )
        return split


def _listed(found: Sequence[str]) -> str:
    paths = sorted(found)
    more = f" and {len(paths) - _NAMED:,} more" if paths[_NAMED:] else ""
    return ", ".join(paths[:_NAMED]) + more
