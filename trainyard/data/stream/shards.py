"""Training data without an index: shards that are read once as streams, front to back.

A shard is a tar in WebDataset's format: a file, a URL of any web server, or `pipe:COMMAND`, the
output of a shell command (as in WebDataset; the command is the user's, and runs as the user).
"""

import io
import os
import subprocess
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from trainyard.data.config import DataConfig
from trainyard.data.storage.credentials import PIPE, with_secrets
from trainyard.data.storage.location import expand_braces, find_place
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError, RecipeError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER = 1 << 18  # bytes read at once
_EXACT_ONLY = "is for data that has an index; a stream, with data.order = 'join', takes none of it"


@dataclass(frozen=True)
class Stream:
    """Shards to read in turn. `len` is the number of samples that the recipe states."""

    shards: tuple[str, ...]
    samples: int
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return self.samples

    @property
    def epoch_samples(self) -> int:
        return self.samples

    @property
    def fingerprint(self) -> str:
        """A description of the data as far as known without reading it."""
        return f"a stream of {len(self.shards)} shards"


def list_shards(config: DataConfig) -> tuple[str, ...]:
    """The shards of `data.train`. RecipeError or DataError if they cannot be a stream."""
    _check(config)
    assert isinstance(config.train, str)
    return tuple(_list(config.train))


def _check(config: DataConfig) -> None:
    if config.train is None:
        raise RecipeError("data.train is not set: pass --data.train SHARDS")
    if not isinstance(config.train, str):
        raise RecipeError(
            "data.train has several locations; with data.order = 'join' it has one: a brace list"
        )
    if config.samples is None:
        raise RecipeError(
            "data.samples is not set: with data.order = 'join' nobody knows beforehand how many "
            "samples a pass has; schedules go by what it says, so a good guess will do"
        )
    usual = DataConfig()
    for key in ("locality", "weights", "repeats", "stage", "stage_gb"):
        value = getattr(config, key)
        if value != getattr(usual, key):
            raise RecipeError(f"data.{key} = {value} {_EXACT_ONLY}: leave it out")


def _list(location: str) -> list[str]:
    if location.startswith(PIPE):
        return expand_braces(location)
    place = find_place(location)
    scheme = location.partition("://")[0].lower()
    if is_remote(location) and scheme not in ("http", "https"):
        raise DataError(
            f"{location}: {scheme}:// is read by an index: leave out data.order = 'join', or name "
            "a command that writes its shards, as in 'pipe:COMMAND'"
        )
    names = place.files(".tar") if place.is_folder else place.names
    if not names:
        raise DataError(f"{location}: no shards (*.tar) in it")
    return [place.path(name) for name in names]


def open_shard(name: str) -> IO[bytes]:
    """The bytes of a shard, to be read once. Reading raises DataError if it fails."""
    return io.BufferedReader(_open(name), _BUFFER)


def _open(name: str) -> io.RawIOBase:
    if name.startswith(PIPE):
        return Pipe(name)
    if is_remote(name):
        from trainyard.data.storage.remote.http_stream import HttpStream

        return HttpStream(name)
    try:
        return open(name, "rb", buffering=0)
    except OSError as error:
        raise DataError(f"{name}: {error.strerror}") from None


class Pipe(io.RawIOBase):
    """The output of a shell command. DataError at its end if the command failed.

    All processes that the command starts belong to the loader's process group and end with it; the
    signals that end a run are ignored in them, as in the loader. An early `close` kills the shell
    only, since the loader is about to end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", with_secrets(name).removeprefix(PIPE)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        count = os.readv(self._output.fileno(), [buffer])
        if count == 0:
            code = self._process.wait()
            if code:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise DataError(f"{self.name}: the command failed ({how})")
        return count

    def close(self) -> None:
        if not self.closed:
            self._process.kill()
            self._process.wait()
            self._output.close()
        super().close()
