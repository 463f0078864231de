"""Ends of a run at named points, in this process: a kill, a kill within a save, a signal."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.runs import hooked
from tests.spawn import wait_for_writer
from trainyard.training import saver
from trainyard.training.step import TrainStep

CUTS = ("killed in a step", "killed in a save", "stopped", "asked to come back")
SIGNALS = {"stopped": signal.SIGTERM, "asked to come back": signal.SIGUSR1}


class Killed(BaseException):
    """An end that no handler expects, like a kill."""


def kill(*_: object) -> None:
    raise Killed


def die(*_: object) -> None:
    """The real thing."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def cut(kind: str, at: int, end: Callable[..., None] = kill) -> Iterator[None]:
    """Inside, a run is cut off after so many updates, or in the first save from there on.

    Before, the save under way is completed. A kill in a save leaves all files but the manifest,
    under the name of something half-written.
    """
    calls = 0

    def after(_: TrainStep, batch: Any, step: int) -> None:
        nonlocal calls
        calls += 1
        if calls != at:
            return
        wait_for_writer()  # so that the save under way is complete
        if kind == "killed in a save":
            patch.setattr(saver, "write_manifest", end)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # nobody tidies up
        elif kind == "killed in a step":
            end()
        else:
            os.kill(os.getpid(), SIGNALS[kind])

    with pytest.MonkeyPatch.context() as patch, hooked(after=after):
        yield
