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
import numbers
import signal
from typing import Self


class TrainyardError(Exception):
    """An error with a code and fields, which a text in the manner of str.format has in braces.

    Codes and names of fields are for programs, and stay as they are when a text is reworded. A code
    of several places has its text in `SHARED`.
    """

    exit_code = 1
    is_shared = False
    """True once all ranks know of it; then only the first rank needs to print it."""

    def __init__(self, code: str, text: str = "", /, **fields: object) -> None:
        super().__init__(code)  # a copy gets the rest as attributes
        self.code, self.text, self.fields = code, text or SHARED.get(code, ""), fields

    def __str__(self) -> str:
        # Without a text what should be a code is a message: torch's workers make errors so.
        return self.text.format_map(self.fields) if self.text else self.code

    def packed(self) -> tuple[str, str, dict[str, "Plain"]]:
        """Code, text and fields as JSON can hold them: fields that are no numbers become text."""
        return self.code, self.text, {name: _plain(value) for name, value in self.fields.items()}

    @classmethod
    def unpacked(cls, code: str, text: str, fields: "dict[str, Plain]") -> Self:
        """An error of this class that another process has packed."""
        return cls(code, text, **fields)


Plain = str | int | float | None
"""A field of an error that is packed."""


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


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
        self.text, self.fields = SHARED[self.code], {"path": path, "reason": reason}

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


SHARED = {
    "checkpoint.file-unreadable": "{path}: {name} cannot be read: {reason}",
    "data.changed-since-indexed": (
        "{path} has changed since it was indexed: start again, and it is indexed anew"
    ),
    "data.class-name-twice": "{path}: the name of a class appears twice",
    "data.differs-between-nodes": (
        "{location}: {host} holds other data there than the first rank's node (other files, sizes "
        "or classes)"
    ),
    "data.empty-location": "an empty location: name a folder, a file, shards or a URL",
    "data.files-differ-in-classes": "{path}: its classes differ from those of {first}",
    "data.malformed-file": "{path}: not a readable {format} file ({reason})",
    "data.needs-c-extension": "{name} needs the extension in C: {hint}",
    "data.no-labels": "{location}: none of its images has a label",
    "data.no-match": "{location}: no file matches",
    "data.none-readable": "{location}: none of its {num_images:,} images can be read",
    "data.not-found": "{path}: no such file or folder{hint}",
    "disk.full": "{path}: {reason}",
    "disk.read-only": "{path}: {reason}",
    "export.no-parent-folder": "{path}: there is no folder {folder}",
    "file.not-regular": "{path}: is no regular file: move it away",
    "file.other-version": (
        "{path}: of version {version}, and this version of Trainyard reads {known}: install the "
        "one that wrote it{hint}"
    ),
    "file.unreadable": "{path}: cannot be read ({reason})",
    "file.unusable": "{path}: {reason}",
    "file.unwritable": "{path}: cannot be written ({reason})",
    "function.wrong-type": "{key} = {value!r} returns a value of type {type}: return {wanted}",
    "hdf5.needs-repack": (
        "{path}: {dataset} {reason}; rewrite it: `h5repack -f NONE -l CONTI FILE NEW`"
    ),
    "hub.gated": (
        "{url}: a gated data set: accept its terms on its page, and set HF_TOKEN or run `hf auth "
        "login` for that account"
    ),
    "image.unreadable": "{name}: {reason}",
    "model.all-frozen": "model.freeze: nothing is left to train: use fewer patterns",
    "model.no-activation-map": (
        "class activation maps: the last features of {name} have no places for images of this "
        "size, so a class is found nowhere in particular"
    ),
    "model.no-linear-classifier": (
        "model.linear_probe: {name} has no linear classifier, which maps its features to the "
        "scores and has a bias: set model.linear_probe = false"
    ),
    "prepare.member-twice": "{path}: {name!r} comes twice",
    "prepare.missing-file": "{path}: there is no {name} here; get it from {origin}",
    "recipe.data-not-set": "{key} is not set: {hint}",
    "recipe.needs-rgb": (
        "{setting} is for images of 3 channels and cannot go with data.channels = {channels}: "
        "change one of them"
    ),
    "recipe.not-in-order": "{key}: {value!r} comes no later than {previous!r}: write them in order",
    "recipe.not-toml": "{path}: not TOML: {reason}",
    "recipe.pattern-unmatched": "{key}: no parameter matches {pattern!r}{hint}",
    "recipe.val-share-beside-val-data": (
        "{key} = {value}: is for data without validation images, and {locations} has {val}: leave "
        "it out, or name the training data alone by --data.train"
    ),
    "run.stopped": "stopped by a signal; what was trained is saved",
    "storage.changed-while-read": (
        "{url} has changed on the server while it was in use: start again, and it is indexed anew"
    ),
    "storage.failed": "{url}: {reason}",
    "storage.invalid-url": "{url}: not a valid URL ({reason})",
    "storage.wrong-range": "{url}: the server sent another part than the one requested",
    "tar.compressed": (
        "{path}: samples are read by their offset in a tar, which a compressed one does not have: "
        "decompress it{hint}"
    ),
    "tar.damaged": "{path}, byte {offset}: {reason}",
    "tar.second-archive": (
        "{path}: goes on after the end mark of its tar at byte {offset}, as if it were several in "
        "one file: write one tar, or a file for each and name them by a brace list"
    ),
    "tar.truncated": (
        "{path}: the archive is truncated: it ends at byte {offset} without its end mark"
    ),
    "variable.not-seconds": "{name} = {value!r} is not a number of seconds",
}
"""Texts of the codes that several places raise."""


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
