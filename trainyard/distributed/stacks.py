"""Stacks of this process's threads, in a file of its run: written when a rank hangs."""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from typing import Any, TextIO

from trainyard.files import open_own, writing

DUMP = signal.SIGQUIT
"""The signal on which a process writes its stacks and ends; it does not need Python's lock."""


class Stacks:
    """The file RUN/stacks/rank-00003.txt, which is kept only if it has contents."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank:05d}.txt"
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = open(self.path, "w", opener=open_own)  # noqa: SIM115
        self._before = signal.getsignal(DUMP)
        _set_signal(signal.SIG_DFL)  # a shell's background jobs ignore it: a rank would not end
        faulthandler.register(DUMP, file=self._file, chain=True)

    def write(self) -> None:
        """Write the current stacks of all threads. May take for ever, where a file system hangs.

        They are read with Python's lock: without it, as `faulthandler` reads them, a thread that
        ends meanwhile crashes this process.
        """
        text = "".join(_lines())
        with suppress(OSError, ValueError):  # ValueError: closed
            os.write(self._file.fileno(), text.encode(errors="backslashreplace"))

    def close(self) -> None:
        faulthandler.unregister(DUMP)
        _set_signal(self._before)
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if is_empty:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # another rank's file is still there
                self.path.parent.rmdir()


def _lines() -> Iterator[str]:
    """The stacks of all threads, in the form of `faulthandler`, with the threads' names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, last in sys._current_frames().items():
        yield f"Thread {names.get(ident, ident)} (most recent call first):\n"
        for frame, line in walk_stack(last):
            yield f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n'


def _set_signal(handler: Any) -> None:
    """Only a main thread may; None stands for a handler that is not Python's."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(DUMP, handler)
