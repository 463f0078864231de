"""The text of a list of images as rows of cells: CSV and its relatives, with a header or without.

Text is UTF-8, or UTF-16 with its mark. Commas, semicolons or tabs separate cells; in `.txt` and
`.lst` also blanks. There a number alone in the first line is the count of rows, and a header may
lack the name of the first column, as in the lists of CelebA.
"""

import codecs
import csv
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from trainyard.errors import DataError

TEXTS = (".csv", ".tsv", ".txt", ".lst")
HEAD = 1000
"""Rows that a decision about the columns looks at."""
_BLANK_SUFFIXES = (".txt", ".lst")
_DELIMITERS = ",;\t"  # the one that the first line has most often outside of quotes
_QUOTED = re.compile('"[^"]*"')

Row = tuple[int, list[str]]
"""The number of a line, from 1, and its cells."""


class Table:
    """The rows of a file; DataError for one that is no text or has another number of cells.

    `is_row` is True for cells that name an image: as the first ones they are no header. `is_image`
    is True for a text that names one with all its blanks.
    """

    lists: Collection[str] = ()
    """The columns with several values in a cell, of JSON."""

    def __init__(
        self,
        path: str,
        is_row: Callable[[Sequence[str]], bool],
        is_image: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.path = path
        first, second = [*islice(text_lines(path), 2), "", ""][:2]
        is_text = path.lower().endswith(_BLANK_SUFFIXES)
        self._skipped = int(is_text and first.strip().isdigit() and len(second.split()) > 1)
        first = second if self._skipped else first
        bare = _QUOTED.sub("", first)
        self._delimiter = max(_DELIMITERS, key=bare.count)
        is_blank = is_text and self._delimiter not in bare
        self._splits: int | None = None
        """The most cuts at blanks, -1 for any number; None for CSV."""
        if is_blank:
            self._splits = 0 if is_image(first.strip()) else -1
        cells, *rows = [cells for _, cells in islice(self._cells(), HEAD)] or [[]]
        lengths = {*map(len, rows)}
        is_short = is_blank and lengths == {len(cells) + 1} and not is_row(cells)
        if self._splits and not is_short and lengths - {len(cells)}:
            self._splits = 1  # the rest of a line is one text
            _, cells = next(self._cells())
        self.has_header = not (cells and is_row(cells))
        cells = ["1", *cells] if is_short else cells
        self.names = cells if self.has_header else [str(n + 1) for n in range(len(cells))]
        """The names of the columns; their numbers, from 1, without a header."""

    @property
    def header(self) -> str:
        """Where the names of the columns stand, for a message."""
        line = 1 + self._skipped
        return f", line {line}, the header" if self.has_header else ", columns by number"

    def rows(self) -> Iterator[Row]:
        """All rows but the header."""
        width = len(self.names)
        for row in islice(self._cells(), int(self.has_header), None):
            line, cells = row
            if len(cells) != width:
                raise DataError(
                    "list.wrong-cell-count",
                    "{path}, line {line}: has {num_cells} cells, and the {first} {num_columns}: "
                    "put quotes around a text with {delimiter!r} in it",
                    path=self.path,
                    line=line,
                    num_cells=len(cells),
                    first="header" if self.has_header else "first line",
                    num_columns=len(self.names),
                    delimiter=self._delimiter if self._splits is None else " ",
                )
            yield row

    def _cells(self) -> Iterator[Row]:
        lines = islice(text_lines(self.path), self._skipped, None)
        if self._splits is not None:
            for number, text in enumerate(lines, start=1 + self._skipped):
                text = text.strip()
                if text:
                    yield number, text.split(None, self._splits) if self._splits else [text]
            return
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        try:
            for cells in reader:
                # A blank line, or a spreadsheet's empty row, is none.
                if (cells and cells[0].strip()) or any(map(str.strip, cells)):
                    yield reader.line_num + self._skipped, cells
        except csv.Error as error:
            raise DataError(
                "list.not-csv",
                "{path}, line {line}: is not CSV ({reason})",
                path=self.path,
                line=reader.line_num + self._skipped,
                reason=str(error),
            ) from None


def text_lines(path: str) -> Iterator[str]:
    """The lines of a file with their ends; DataError names the first that is not UTF-8."""
    is_utf16 = False
    try:
        with open(path, "rb") as file:
            is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding, newline = ("utf-16", "") if is_utf16 else ("utf-8-sig", "\n")
        with open(path, encoding=encoding, newline=newline) as text:
            yield from text
    except UnicodeError as error:
        if is_utf16:
            raise DataError("file.unreadable", path=path, reason=str(error)) from None
        raise DataError(
            "list.not-utf8",
            "{path}, line {line}: is not UTF-8: save the list as UTF-8",
            path=path,
            line=_not_utf8(path),
        ) from None
    except OSError as error:
        raise DataError("file.unreadable", path=path, reason=error.strerror) from None


def _not_utf8(path: str) -> int:
    """The number of the first line that is not UTF-8."""
    number = 0
    with open(path, "rb") as file, suppress(UnicodeError):
        for number, line in enumerate(file, start=1):  # noqa: B007
            line.decode()
    return number
