"""Ranks as real processes, each with an environment of its own, and the errors that end them."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.errors import check
from tests.spawn import _CONTEXT
from tests.web import free_port
from trainyard import command_line
from trainyard.command_line import end, main, print_error
from trainyard.distributed import discover, init_distributed
from trainyard.errors import TrainyardError
from trainyard.world import World, gather

Work = Callable[[World], None]


def torchruns(rank: int, size: int, port: int) -> dict[str, str]:
    """Its variables, for a rank on this machine."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, size, rank, size, "127.0.0.1", port)), strict=True))


def talk(world: World) -> None:
    assert gather(world, world.rank) == list(range(world.size))


class Rank:
    """A process under way."""

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str],
        work: Work = talk,
        facts: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._said = folder / f"{len(list(folder.glob('*.txt')))}.txt"
        self._said.touch()
        args = (dict(env), work, dict(facts or {}), list(command), prepare, self._said)
        self.process: Any = _CONTEXT.Process(target=_run, args=args)
        self.process.start()

    @property
    def said(self) -> str:
        return self._said.read_text()

    def check(self, code: str, **fields: object) -> None:
        """Want an error of this code and of these fields, and one line about it."""
        check(TrainyardError.unpacked(*json.loads(_errors(self._said).read_text())), code, **fields)
        assert self.said.startswith("trainyard: ") and self.said.count("\n") == 1

    def wait(self, timeout_s: float = 60) -> int:
        """Its exit code, or minus the signal that killed it."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"it hangs; it has said {self.said!r}"
        code: int = self.process.exitcode
        return code

    @property
    def pid(self) -> int:
        number: int = self.process.pid
        return number


def _run(
    env: dict[str, str],
    work: Work,
    facts: dict[str, str],
    command: list[str],
    prepare: Callable[[], None] | None,
    said: Path,
) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    os.environ |= env
    vars(command_line)["print_error"] = partial(_print_and_note, said)
    if prepare is not None:
        prepare()
    if command:
        torch.set_num_threads(1)
        end(main(command))
    try:
        world = discover()
        with init_distributed(world, facts):
            work(world)
    except TrainyardError as error:
        end(_print_and_note(said, error))
    sys.exit(0)


def _errors(said: Path) -> Path:
    return said.with_suffix(".json")


def _print_and_note(said: Path, error: TrainyardError, *, as_json: bool = False) -> int:
    _errors(said).write_text(json.dumps(error.packed()))
    return print_error(error, as_json=as_json)


class Ranks:
    """Starts ranks of one world."""

    def __init__(self, folder: Path, size: int, limit_s: float = 60) -> None:
        self.port, self._size, self._folder = free_port(), size, folder
        self._limit_s = limit_s
        self.all: list[Rank] = []

    def start(
        self,
        *numbers: int,
        work: Work = talk,
        facts: Mapping[str, str] | None = None,
        command: Sequence[object] = (),
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> list[Rank]:
        """They join and do the work, or run a command of Trainyard's; before, they `prepare`."""
        words = [str(word) for word in command]
        limit = {"TRAINYARD_START_S": str(self._limit_s)}
        started = []
        for number in numbers:
            variables = torchruns(number, self._size, self.port) | limit | dict(env or {})
            started.append(Rank(self._folder, variables, work, facts, words, prepare))
            self.all.append(started[-1])
        return started


@contextmanager
def ranks(folder: Path, size: int, limit_s: float = 60) -> Iterator[Ranks]:
    """None is left behind."""
    started = Ranks(folder, size, limit_s)
    try:
        yield started
    finally:
        for rank in started.all:
            rank.process.kill()
            rank.process.join()


def wait_for(condition: Callable[[], object], timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
