"""Work in parts, on machines that share a folder: a journal for each part, and their join.

The work is a list of units that every machine derives from the same data: shards to write, files to
index, images to check. A part takes every N-th of them and adds each to its journal, so that the
same command resumes after a kill. The command without a part reads the journals, in the order in
which one machine would have worked.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from trainyard.errors import DataError
from trainyard.files import JsonLines, is_at, open_own, why_unwritable
from trainyard.printable import print_line

T = TypeVar("T")

_END = {"end": True}  # the last line of a finished part
_NUMBER = r"([1-9]\d{0,5})"  # as in the option --part
# What a result of the wrong kind raises.
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)
_NAMED = 5  # parts in a message


class Part(NamedTuple):
    """One of several shares of the work."""

    number: int  # from 1
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def owns(self, place: int) -> bool:
        """True for the unit at a place in the list: every `of`th one."""
        return place % self.of == self.number - 1


@dataclass(frozen=True)
class Identity:
    """The properties that must be equal for work to be resumed, or joined."""

    plan: str
    """SHA-256 of the settings and of the data."""
    settings: dict[str, Any]


@dataclass(frozen=True)
class Journals:
    """The journals of some work in a folder. The first line of each is the identity."""

    folder: Path
    stem: str
    """The beginning of their names."""
    noun: str
    """The work, for messages: "a pack"."""
    doing: str
    """What a process does: "packing into it"."""
    otherwise: str = ""
    """What to do instead of giving the same settings."""

    def path(self, part: Part | None) -> Path:
        """The journal's place."""
        of_part = "" if part is None else f"-{part.number}-of-{part.of}"
        return self.folder / f"{self.stem}{of_part}.jsonl"

    def parts(self) -> list[Part]:
        """The parts that have a journal. DataError if they are parts of different numbers."""
        pattern = re.compile(rf"{re.escape(self.stem)}-{_NUMBER}-of-{_NUMBER}\.jsonl", re.ASCII)
        names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        matches = (pattern.fullmatch(name) for name in names)
        return sorted(Part(int(match[1]), int(match[2])) for match in matches if match)

    def count(self, parts: Iterable[Part]) -> int:
        """The number of all parts. DataError if some are of another number."""
        counts = {part.of for part in parts}
        if len(counts) > 1:
            either = " and in ".join(map(str, sorted(counts)))
            raise DataError(
                f"{self.folder}: holds {self.noun} in {either} parts: keep to one number, or "
                f"{self._otherwise}"
            )
        return counts.pop()

    def check_others(self, part: Part, identity: Identity) -> bool:
        """True if other parts have begun. DataError if one is of other work."""
        parts = [other for other in self.parts() if other != part]
        self.count([part, *parts])
        heads = [head for other in parts if (head := next(whole_lines(self.path(other)), None))]
        for head in heads:
            self.check_same(f"{self.folder}: holds parts of {self.noun}", head, identity)
        return bool(heads)

    def check_same(self, what: str, known: dict[str, Any], identity: Identity) -> None:
        """DataError unless the `known` identity is this one."""
        if known.get("plan") == identity.plan:
            return
        settings = known.get("settings")
        before: dict[str, Any] = settings if isinstance(settings, dict) else {}
        changed = [
            f"{key} {before.get(key)!r} instead of {value!r}"
            for key, value in identity.settings.items()
            if before.get(key) != value
        ]
        raise DataError(
            f"{what} made with {'; '.join(changed) or 'a source that has changed since'}: give the "
            f"same settings, or {self._otherwise}"
        )

    def check_part(self, part: Part, known: dict[str, Any], identity: Identity) -> None:
        """DataError unless a part's identity is this one."""
        self.check_same(f"{self.folder}: holds part {part} of {self.noun}", known, identity)

    def unfinished(self, numbers: Iterable[int], count: int) -> DataError:
        """The error of a join before all parts have finished."""
        left = [f"{number}/{count}" for number in sorted(numbers)]
        more = f" and {len(left) - _NAMED:,} more" if len(left) > _NAMED else ""
        remedy = "" if self.otherwise else f", or {self._otherwise}"
        return DataError(
            f"{self.folder}: not finished: {', '.join(left[:_NAMED])}{more}: give the same command "
            f"with --part for each of them, then once without{remedy}"
        )

    def report_join(self, count: int) -> None:
        """Print whose results are taken: journals can come with the data of somebody else."""
        which = f"{self.path(Part(1, count))}" + f" to {count}" * (count > 1)
        print_line(f"{self.noun} takes the results of {which}")

    def remove(self) -> None:
        """Removes the journals of finished work."""
        for part in (None, *self.parts()):
            self.path(part).unlink(missing_ok=True)

    @property
    def _otherwise(self) -> str:
        return self.otherwise or f"remove {self.folder / self.stem}-*-of-*.jsonl"

    @contextmanager
    def locked(self, part: Part | None = None) -> Iterator[None]:
        """Locks the work, or a part of it. DataError if another process holds it."""
        path = self.path(part)
        while True:
            try:
                lock = open_own(path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                reason = why_unwritable(error, path)
                raise DataError(f"{self.folder}: cannot be written ({reason})") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                which = f", part {part}" if part else ""
                raise DataError(
                    f"{self.folder}: another process is {self.doing}{which}: wait for it"
                ) from None
            except OSError:  # a file system without locks
                break
            if is_at(path, lock):
                break
            os.close(lock)  # of work that has just finished and removed the file
        try:
            yield
        finally:
            if not os.fstat(lock).st_size and is_at(path, lock):  # no work was begun
                path.unlink()
            os.close(lock)


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal: another process may be writing the last one.

    DataError if it is damaged.
    """
    with open(path, encoding="utf-8", errors="replace", opener=open_own) as file:
        for line in file:
            if line.endswith("\n"):
                yield _parsed(path, line)


def _parsed(path: Path, line: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path}: damaged: remove it")
    return found


# --- units whose results lie in the journal ---


class Codec(NamedTuple):
    """How a result is written into a journal: as JSON."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Units(Protocol):
    """Units of work: all of them, those of a part, or the results of all parts."""

    def begin(self, identity_of: Callable[[], Identity]) -> None:
        """Begins. DataError if the journals are of other work."""

    def run(
        self, do: Callable[[Sequence[str]], Iterator[T]], names: Sequence[str], codec: Codec
    ) -> Generator[T, None, None]:
        """The results of units, in order; none of a part, which adds them to its journal.

        `do` performs those that it is given the names of.
        """

    def results(self) -> Iterator[Any] | None:
        """The results in the journals, of the part or of all; None without journals."""


@contextmanager
def units_of(journals: Journals, part: Part | None) -> Iterator[Units]:
    """The units of a part. Without one, the join if any part has begun, or else all of them.

    Inside, the journals are locked. A join removes them at the end, unless there is an error.
    """
    begun = [] if part else journals.parts()
    if part is not None:
        with journals.locked(part):
            yield (units := _OnePart(journals, part))
            units.finish()
    elif begun:
        with ExitStack() as stack:
            for each in begun:
                stack.enter_context(journals.locked(each))
            yield _Joined(journals, begun)
            journals.remove()
    else:
        yield AllUnits()


class AllUnits:
    """Every unit, on this machine, without a journal."""

    def begin(self, identity_of: Callable[[], Identity]) -> None:
        pass

    def run(
        self, do: Callable[[Sequence[str]], Iterator[T]], names: Sequence[str], codec: Codec
    ) -> Generator[T, None, None]:
        yield from do(names)

    def results(self) -> None:
        return None


class _OnePart:
    def __init__(self, journals: Journals, part: Part) -> None:
        self._journals, self._part = journals, part
        self._lines = JsonLines(journals.path(part))
        self._done, self._is_over = 0, False

    def begin(self, identity_of: Callable[[], Identity]) -> None:
        identity, state = identity_of(), _state(self._journals.path(self._part))
        if state.head is None:
            self._journals.check_others(self._part, identity)
            self._lines.append(asdict(identity))
        else:
            self._journals.check_part(self._part, state.head, identity)
        self._done, self._is_over = state.results, state.is_over

    def run(
        self, do: Callable[[Sequence[str]], Iterator[T]], names: Sequence[str], codec: Codec
    ) -> Generator[T, None, None]:
        own = names[self._part.number - 1 :: self._part.of]
        before = min(self._done, len(own))
        self._done -= before
        for name, result in zip(own[before:], do(own[before:]), strict=True):
            self._lines.append({"unit": name, "result": codec.encode(result)})
        yield from ()

    def results(self) -> Iterator[Any]:
        lines = islice(whole_lines(self._journals.path(self._part)), 1, None)
        return (line["result"] for line in lines if line != _END)

    def finish(self) -> None:
        if not self._is_over:
            self._lines.append(_END)


class _Joined:
    def __init__(self, journals: Journals, begun: Sequence[Part]) -> None:
        self._journals, self._count = journals, journals.count(begun)
        self._streams: list[Iterator[dict[str, Any]]] = []

    def begin(self, identity_of: Callable[[], Identity]) -> None:
        identity = identity_of()
        parts = [Part(number + 1, self._count) for number in range(self._count)]
        states = [_state(self._journals.path(part)) for part in parts]
        for part, state in zip(parts, states, strict=True):
            if state.head is not None:
                self._journals.check_part(part, state.head, identity)
        left = [part.number for part, state in zip(parts, states, strict=True) if not state.is_over]
        if left:
            raise self._journals.unfinished(left, self._count)
        self._journals.report_join(self._count)
        self._streams = self._open()

    def run(
        self, do: Callable[[Sequence[str]], Iterator[T]], names: Sequence[str], codec: Codec
    ) -> Generator[T, None, None]:
        for place, name in enumerate(names):
            number = place % self._count
            line = next(self._streams[number], {})
            path = self._journals.path(Part(number + 1, self._count))
            yield _decoded(path, line, name, codec)

    def results(self) -> Iterator[Any]:
        for stream in cycle(self._open()):
            line = next(stream)
            if line == _END:  # those of all parts have come
                return
            yield line["result"]

    def _open(self) -> list[Iterator[dict[str, Any]]]:
        """The results of each part, and its end."""
        parts = (Part(number + 1, self._count) for number in range(self._count))
        return [islice(whole_lines(self._journals.path(part)), 1, None) for part in parts]


def _decoded(path: Path, line: dict[str, Any], name: str, codec: Codec) -> Any:
    """The result of the unit of a name. DataError if no part writes such a line."""
    with suppress(*_DAMAGE):
        if line["unit"] == name:
            return codec.decode(line["result"])
    raise DataError(f"{path}: damaged: remove it")


class _State(NamedTuple):
    head: dict[str, Any] | None
    results: int
    is_over: bool


def _state(path: Path) -> _State:
    """How far a part has got."""
    head, count, last = None, 0, ""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", opener=open_own) as file:
            for line in file:
                if line.endswith("\n"):
                    head = head or _parsed(path, line)
                    count, last = count + 1, line
    is_over = last.rstrip() == json.dumps(_END)
    return _State(head, max(count - 1, 0) - is_over, is_over)
