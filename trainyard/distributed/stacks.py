"""Stacks of this process's threads, in a file of its run: written when a rank hangs."""

import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from trainyard.files import open_own, writing

DUMP = signal.SIGQUIT
"""The signal on which a process writes its stacks and ends; it does not need Python's lock."""
_SOON_S, _WRITE_S = 0.01, 0.5


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
        """Writes the current stacks of all threads.

        A thread that does not need Python's lock writes, so a hanging file system blocks no others.
        """
        faulthandler.dump_traceback_later(_SOON_S, file=self._file)
        time.sleep(_WRITE_S)

    def close(self) -> None:
        faulthandler.unregister(DUMP)
        _set_signal(self._before)
        faulthandler.cancel_dump_traceback_later()
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if is_empty:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # another rank's file is still there
                self.path.parent.rmdir()


def _set_signal(handler: Any) -> None:
    """Only a main thread may; None stands for a handler that is not Python's."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(DUMP, handler)
