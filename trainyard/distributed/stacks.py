"""Where each thread of this process stands, in a file of its run: written when a rank hangs."""

import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from trainyard.files import writing

_SOON_S, _WRITE_S = 0.01, 0.5


class Stacks:
    """RUN/stacks/rank-00003.txt, which is there only if there is something to read in it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank:05d}.txt"
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = self.path.open("w")
        self._on_pause: Any = None
        if threading.current_thread() is threading.main_thread():
            self._on_pause = signal.signal(signal.SIGTSTP, self._pause)

    def write(self) -> None:
        """Of all threads, as they stand now.

        By a thread that needs no leave of Python: a file system that hangs must not hold all.
        """
        faulthandler.dump_traceback_later(_SOON_S, file=self._file)
        time.sleep(_WRITE_S)

    def arm(self, seconds: float) -> None:
        """Unless this is called again before, write and end the process with exit code 1.

        From a thread that needs no leave of Python: the one that should call may never get it.
        """
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z, or a scheduler that suspends: however long that is, it is no hang."""
        self.disarm()
        os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> None:
        self.disarm()
        if self._on_pause is not None:
            signal.signal(signal.SIGTSTP, self._on_pause)
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if is_empty:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # another rank's is still there
                self.path.parent.rmdir()
