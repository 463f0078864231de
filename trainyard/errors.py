"""Trainyard's own errors, each with the exit code of a command that it ends.

TrainyardError          1
├── InputError          2   wrong input; the message says what to do
│   ├── RecipeError         a recipe, a key or a value
│   ├── DataError           a data set: missing, empty, mismatched, too many bad samples
│   └── CheckpointError     a checkpoint or a run directory
├── DiskError           1   a disk is full or read-only; the same command resumes later
├── LoaderError         1   the loader process failed or died
├── DivergedError       3   gradients stay infinite or NaN, and rolling back did not help
├── PeerError           1   another rank failed and prints why; this one stops with it
└── Stopped           130   stopped by Ctrl-C, SIGTERM or SIGHUP; what was trained is saved
    └── Requeued       75   stopped by SIGUSR1, SIGUSR2 or SIGXCPU, to be started again
"""

import errno
import functools
import numbers
import signal
from pathlib import Path
from typing import Self


class TrainyardError(Exception):
    """An error with a code and fields, from which messages.toml makes a line for users.

    Codes and names of fields are for programs, and stay as they are when a message is reworded.
    """

    exit_code = 1
    is_shared = False
    """True once all ranks know of it; then only the first rank needs to print it."""

    def __init__(self, code: str, /, **fields: object) -> None:
        super().__init__(code)
        self.code, self.fields = code, fields

    def __str__(self) -> str:
        return messages()[self.code].format_map(self.fields)

    def packed(self) -> tuple[str, dict[str, "Plain"]]:
        """Code and fields as JSON can hold them: fields that are no numbers become text."""
        return self.code, {name: _plain(value) for name, value in self.fields.items()}

    @classmethod
    def unpacked(cls, code: str, fields: "dict[str, Plain]") -> Self:
        """An error of this class that another process has packed."""
        return cls(code, **fields)


Plain = str | int | float | None
"""A field of an error that is packed."""


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


@functools.cache
def messages() -> dict[str, str]:
    """The message of each code, with the fields as in str.format."""
    import tomllib

    areas = tomllib.loads((Path(__file__).parent / "messages.toml").read_text("utf-8"))
    return {f"{area}.{name}": text for area, of in areas.items() for name, text in of.items()}


class InputError(TrainyardError):
    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """The message alone, without a traceback, in a notebook."""
        return [f"{type(self).__name__}: {self}"]


class RecipeError(InputError):
    pass


class DataError(InputError):
    pass


class CheckpointError(InputError):
    pass


class DiskError(TrainyardError, OSError):
    """A disk is full or read-only. `errno`, `strerror` and `filename` as in any OSError."""

    def __init__(self, number: int, reason: str, path: str) -> None:
        OSError.__init__(self, number, reason, path)
        self.code = "disk.read-only" if number == errno.EROFS else "disk.full"
        self.fields = {"path": path, "reason": reason}

    def __str__(self) -> str:
        return f"{super().__str__()}{'; ' * bool(self.advice)}{self.advice}"

    @property
    def advice(self) -> str:
        """A remedy for the user; empty if none is certain."""
        if self.errno == errno.EFBIG:
            return "raise the limit of `ulimit -f`, or choose another file system"
        return "" if self.errno == errno.EROFS else "free some space and give the command again"


class LoaderError(TrainyardError):
    pass


class DivergedError(TrainyardError):
    exit_code = 3


class PeerError(TrainyardError):
    pass


class Stopped(TrainyardError):
    exit_code = 130

    def __init__(self, code: str = "run.stopped", /) -> None:
        super().__init__(code)


class Requeued(Stopped):
    exit_code = 75


STOPS: dict[signal.Signals, type[Stopped]] = {
    signal.SIGUSR1: Requeued,
    signal.SIGUSR2: Requeued,
    signal.SIGXCPU: Requeued,  # of a limit of processor time, once a second
    signal.SIGTERM: Stopped,
    signal.SIGINT: Stopped,
    signal.SIGHUP: Stopped,  # of a terminal that was closed
}
"""The end of training by a signal. Before the first step and after the last one there is nothing to
save: a signal then kills the process, as it does by default.
"""


class NotSaved(KeyboardInterrupt):
    """A second Ctrl-C during training: it ends at once, and the last steps are lost."""

    exit_code = 1
