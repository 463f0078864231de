"""The result of a check of a data set: a row of a table, and its findings."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from trainyard.data.index.build import Progress
from trainyard.errors import DataError

Result = Literal["ok", "note", "problem"]
"""A note is unusual but does not harm training; a problem makes it fail or its result wrong."""

Counters = Callable[[str, int | None], AbstractContextManager[Progress]]
"""Given a description and a total, gives a function that receives the count so far."""

MAX_LISTED = 100_000  # findings of one check; more would be the same fault, and cost memory


class Finding(NamedTuple):
    code: str  # of the error that training would end with, or "verify." and its kind
    what: str
    file: str = ""  # path or URL
    offset: int | None = None  # bytes
    sample: int | None = None

    def __str__(self) -> str:
        span = f"{self.file}, byte {self.offset}" if self.offset else self.file
        return f"{span}: {self.what}" if span and not self.what.startswith(span) else self.what


def of_error(error: DataError | OSError, file: str = "") -> Finding:
    """The finding that an error is."""
    code = error.code if isinstance(error, DataError) else "file.unreadable"
    return Finding(code, str(error), file)


@dataclass(frozen=True)
class Check:
    data: str  # the split, or several
    name: str
    result: Result
    about: str
    """The data examined, with figures."""
    count: int
    """Number of findings, including unlisted ones."""
    found: Sequence[Finding]


def checked(
    data: str,
    name: str,
    about: str,
    found: Iterable[Finding] = (),
    *,
    count: int | None = None,
    otherwise: Result = "problem",
) -> Check:
    """A check that is ok without findings, else `otherwise`; `count` if not all are listed."""
    listed = list(islice(found, MAX_LISTED))
    count = len(listed) if count is None else count
    return Check(data, name, otherwise if count else "ok", about, count, listed)
