"""Stacks of this process's threads, in a file of its run: written when a rank hangs."""

import faulthandler
import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from trainyard.early_stop import at_once
from trainyard.files import open_own, writing

_SOON_S, _WRITE_S = 0.01, 0.5


class Stacks:
    """The file RUN/stacks/rank-00003.txt, which is kept only if it has contents."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank:05d}.txt"
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = open(self.path, "w", opener=open_own)  # noqa: SIM115
        self._exits = ExitStack()
        self._exits.enter_context(at_once(signal.SIGTSTP, self._pause))

    def write(self) -> None:
        """Writes the current stacks of all threads.

        A thread that does not need Python's lock writes, so a hanging file system blocks no others.
        """
        faulthandler.dump_traceback_later(_SOON_S, file=self._file)
        time.sleep(_WRITE_S)

    def arm(self, seconds: float) -> None:
        """Sets, or resets, a timer that writes the stacks and ends the process with exit code 1.

        The timer's thread does not need Python's lock, which the caller may never get again.
        """
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _pause(self) -> None:
        """Suspends the process on Ctrl-Z or by a scheduler; a pause of any length is no hang."""
        self.disarm()
        os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> None:
        self.disarm()
        self._exits.close()
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if is_empty:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # another rank's file is still there
                self.path.parent.rmdir()
