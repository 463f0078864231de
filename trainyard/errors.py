"""The errors that Trainyard raises on purpose, each with the exit code it ends a command with.

TrainyardError          1
├── InputError          2   something the user gave is wrong; the message says what to do
│   ├── RecipeError         a recipe, a key or a value
│   ├── DataError           a data set: missing, empty, mismatched, too many bad samples
│   └── CheckpointError     a checkpoint or a run directory
├── DiskError           1   a disk is full or read-only; the same command goes on later
├── LoaderError         1   the loader process failed or died
├── DivergedError       3   gradients stay infinite or NaN, and going back did not help
├── PeerError           1   another rank failed and says why; this one stops with it
└── Stopped           130   stopped by Ctrl-C or SIGTERM, checkpoint saved
    └── Requeued       75   stopped by SIGUSR1 or SIGUSR2, to be started again
"""

import errno


class TrainyardError(Exception):
    """What cannot go on, in one line for a person."""

    exit_code = 1
    is_shared = False
    """True once all ranks know of it, so that only the first rank need print it."""


class InputError(TrainyardError):
    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """In a notebook the message is all that helps."""
        return [f"{type(self).__name__}: {self}"]


class RecipeError(InputError):
    pass


class DataError(InputError):
    pass


class CheckpointError(InputError):
    pass


class DiskError(TrainyardError, OSError):
    """A disk is full or read-only. `errno`, `strerror` and `filename` as any OSError has them."""

    def __str__(self) -> str:
        more = "" if self.errno == errno.EROFS else "; free some space and give the command again"
        return f"{self.filename}: {self.strerror}{more}"


class LoaderError(TrainyardError):
    pass


class DivergedError(TrainyardError):
    exit_code = 3


class PeerError(TrainyardError):
    pass


class Stopped(TrainyardError):
    exit_code = 130


class Requeued(Stopped):
    exit_code = 75
