"""Atomic files, disk errors, checksums, and the layout of a run directory."""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from trainyard.errors import CheckpointError, DiskError, InputError

WRITER = "checkpoint"
"""Name of the thread that writes checkpoints."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (*_FULL, errno.EROFS)
_MOST_JSON = 2**28  # bytes; class names and checksums take a thousandth
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def atomic_write(path: Path, size: int | None = None) -> Iterator[BinaryIO]:
    """A binary file to write. It replaces `path` only once it is complete and on disk.

    `size`: its bytes, if known. DiskError if the disk is full or read-only.
    """
    part = part_of(path)
    with _replacing(path, size, part), open(part, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def sole_write(path: Path, size: int | None = None) -> Iterator[BinaryIO]:
    """Like `atomic_write`, for one process at a time. BlockingIOError while another one writes.

    The lock is that of the unfinished file. One that a killed process left is overwritten.
    """
    part = path.with_name(f".{path.name}.part")
    with open(part, "r+b", opener=lambda name, flags: open_own(name, flags | os.O_CREAT)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = is_at(part, file.fileno())  # else the other process has just completed it
        except BlockingIOError:
            is_free = False
        except OSError:
            is_free = True  # a file system without locks
        if not is_free:
            raise BlockingIOError(errno.EAGAIN, "another process writes it", str(path))
        with _replacing(path, size, part):
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _replacing(path: Path, size: int | None, part: Path) -> Iterator[None]:
    """Inside, a file is written at `part`; then it replaces `path`, or is removed by an error."""
    try:
        with writing(path, size, part):
            yield
            os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def writing(path: Path, needed: int | None = None, part: Path | None = None) -> Iterator[None]:
    """Inside, the error of a full or read-only disk becomes a DiskError that names `path`.

    `needed` and `part` as in `disk_error`.
    """
    try:
        yield
    except Exception as error:
        disk = disk_error(error, path, needed, part)
        if disk is None or disk is error:
            raise
        raise disk from error


def disk_error(
    error: BaseException, path: Path, needed: int | None = None, part: Path | None = None
) -> DiskError | None:
    """The DiskError behind an exception; None if its cause is no full or read-only disk.

    It states the bytes that are `needed`, if known, and the free bytes. `part` is the file or
    folder written so far, which is about to be removed.
    """
    if isinstance(error, DiskError):
        return error
    number = _errno_of(error)
    if number is None:
        return None
    reason = os.strerror(number)
    if number in _FULL:
        written = _bytes_in(part) if part else 0
        least = f"more than {in_words(written)}" if part else "more"
        wanted = least if needed is None else in_words(needed)
        existing = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
        free = shutil.disk_usage(existing).free + written
        reason += f": {wanted} needed, {in_words(free)} free"
    return DiskError(number, reason, str(path))


def why_unwritable(
    error: OSError, path: Path, needed: int | None = None, part: Path | None = None
) -> str:
    """The reason why `path` cannot be written, without its name; like `disk_error`'s if full."""
    shown = disk_error(error, path, needed, part) or error
    return shown.strerror or str(shown)


def _errno_of(error: BaseException | None) -> int | None:
    """The errno of a disk error, in an exception or one of its causes."""
    while error is not None:
        match = _RUST_ERROR.search(str(error))  # safetensors has it in its message alone
        number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if number in _UNWRITABLE:
            return number
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def in_words(size: int) -> str:
    """Bytes as text for users."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def _bytes_in(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in paths if file.is_file())


def part_of(path: Path) -> Path:
    """A temporary name beside a path, hidden and unique."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def remove_parts(path: Path) -> None:
    """Remove temporary files that killed processes left beside a path."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        part.unlink(missing_ok=True)


def use_umask(path: Path) -> None:
    """Give a file the mode of other new files: safetensors makes its files for the owner alone."""
    like = part_of(path)
    like.touch()
    try:
        shutil.copymode(like, path)
    finally:
        like.unlink()


def is_at(path: Path, fd: int) -> bool:
    """True if an open file or folder is still at a path, neither removed nor replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text like `atomic_write`; `errors` as in str.encode."""
    content = text.encode(errors=errors)
    with atomic_write(path, len(content)) as file:
        file.write(content)


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that they survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: Path) -> BufferedReader:
    """A file to read. OSError for any other kind: a pipe may never have a writer, nor a device an
    end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return open(fd, "rb")


def open_own(path: str | Path, flags: int) -> int:
    """A descriptor of a file that Trainyard writes; an `opener` for open().

    InputError for a link or a pipe: a folder of somebody else may bring it, and the file that it
    leads to would be cut.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError("file.is-link", "{path}: a link: remove it", path=path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError("file.not-regular", path=path)
    return fd


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run. OSError or ValueError for anything else."""
    with open_regular(path) as file:
        content = file.read(_MOST_JSON + 1)
    if len(content) > _MOST_JSON:
        raise ValueError(f"larger than {in_words(_MOST_JSON)}")
    return json_object(content)


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object that a JSON text of a run holds. ValueError for anything else.

    A number is None if it is NaN or infinite, and a ValueError if no quantity of a run is so large.
    """
    try:
        content = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    return content


def _integer(digits: str) -> Any:
    return _bounded(int(digits), 2**63 - 1)  # the largest of NumPy and torch


def _float(digits: str) -> Any:
    number = finite(float(digits))
    return None if number is None else _bounded(number, 1e100)  # whose square is finite


def _bounded(number: Any, largest: float) -> Any:
    if abs(number) > largest:
        raise ValueError(f"a number is beyond {largest:.3g}")
    return number


def why_unreadable(error: Exception) -> str:
    """The message of an error of torch.load, without its advice on how to switch safety off."""
    if "Weights only load failed" in str(error):
        return "it is no file of weights that torch wrote, or is damaged"
    return re.split(r"\n|\. ", str(error))[0] or type(error).__name__


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """The folder for caches that cannot lie beside the data: $TRAINYARD_CACHE or ~/.cache.

    InputError where this user has no home, as in containers with a user number of their own.
    """
    configured = os.environ.get("TRAINYARD_CACHE")
    if configured:
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    except RuntimeError:
        raise InputError(
            "file.no-home",
            "user {user} has no home folder: set HOME, or TRAINYARD_CACHE to a folder for caches",
            user=os.getuid(),
        ) from None


class JsonLines:
    """A file with one JSON object per line that survives kill -9: lines are appended whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            _drop_partial_line(path)

    def append(self, line: dict[str, Any]) -> None:
        """Append a line. DiskError if there is no room; the file is then unchanged."""
        text = json.dumps(finite(line)) + "\n"
        with (
            writing(self._path, len(text)),
            _cut_back(self._path),
            open(self._path, "ab", opener=open_own) as file,
        ):
            file.write(text.encode())


@contextmanager
def _cut_back(path: Path) -> Iterator[None]:
    """Inside, an error leaves a file at its previous length."""
    size = path.stat().st_size if path.exists() else 0
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def finite(value: Any) -> Any:
    """None for NaN and infinity, which JSON lacks, also for those in a dict."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_partial_line(path: Path) -> None:
    with open(path, "rb+", opener=open_own) as file:
        size = complete = 0
        for line in file:
            size += len(line)
            complete = size if line.endswith(b"\n") else complete
        if complete < size:  # else another thread may append a line right now
            file.truncate(complete)


def is_locked(path: Path) -> bool:
    """True if a process holds the lock of a run directory; False where that cannot be known."""
    try:
        fd = open_own(path, os.O_RDONLY)
    except (OSError, InputError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for this moment alone
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(fd)
    return False


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path, *, is_named: bool = False) -> None:
        """`is_named`: the user asks to go on with this run, which may then have another end."""
        self.path, self.is_named = path, is_named
        self.recipe = path / "recipe.toml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.quarantine = path / "quarantine.jsonl"
        self.predictions = path / "predictions.npz"
        self.trackers = path / "trackers.json"
        self.lock = path / ".lock"
        self.checkpoints = path / "checkpoints"
        self.stacks = path / "stacks"


def check_files(folder: Path) -> None:
    """InputError if an entry of a run directory is no file, such as a pipe, a device or a loop."""
    run = RunDirectory(folder)
    of_json = (run.environment, run.metrics, run.quarantine, run.trackers)
    for path in (run.recipe, *of_json, run.predictions, run.lock):
        if os.path.lexists(path) and not path.is_file():
            raise InputError("file.not-regular", path=path)


def check_run(folder: Path) -> None:
    """InputError if a folder is no run directory; a run need not have a checkpoint yet."""
    check_files(folder)
    if is_run(folder):
        return
    inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    runs = [name for name in inside if is_run(folder / name)]
    hint = f"; its folders are: did you mean {shlex.quote(str(folder))}/*?" if runs else ""
    raise InputError(
        "run.not-a-run-directory",
        "{path}: no run directory: it has neither recipe.toml nor metrics.jsonl{hint}",
        path=folder,
        hint=hint,
    )


def is_run(folder: Path) -> bool:
    """True for a folder with the files of a run."""
    run = RunDirectory(folder)
    return run.recipe.is_file() or run.metrics.is_file()


def find_checkpoint(target: Path, names: Sequence[str] = ("best", "latest")) -> tuple[Path, Path]:
    """The run directory and the checkpoint that the path of a run or checkpoint stands for.

    For a run, the first that it has of some `names`. CheckpointError if there is none.
    """
    checkpoints = RunDirectory(target).checkpoints
    if checkpoints.is_dir():
        check_files(target)
        for name in names:
            if (checkpoints / name).exists():
                return target, (checkpoints / name).resolve()
        raise CheckpointError(
            "checkpoint.none-yet", "{path}: has no checkpoint yet{hint}", path=target, hint=""
        )
    if (target / "manifest.json").is_file():
        run = target.resolve().parent.parent
        check_files(run)
        return run, target.resolve()
    raise CheckpointError(
        "checkpoint.wrong-path",
        "{path}: neither a run directory nor a checkpoint{hint}",
        path=target,
        hint="",
    )
