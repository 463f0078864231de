"""Worker processes of a command: without torch, deaf to Ctrl-C, and ended with it."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from trainyard.data.storage.credentials import Credentials, adopt, known

Result = TypeVar("Result")

CONTEXT = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang


class Workers(ProcessPoolExecutor):
    """`count` processes; each calls `start` with the arguments before its first task."""

    def __init__(self, count: int, start: Callable[..., None], *arguments: Any) -> None:
        super().__init__(count, CONTEXT, _begin, (known(), start, arguments))

    def submit(self, action: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Like the executor's; Ctrl-C neither cuts it off nor reaches processes started here."""
        mine = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(action, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mine)


def _begin(
    credentials: Credentials, start: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    adopt(credentials)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", module="PIL")  # odd metadata does not make an image bad
    start(*arguments)


def _end_with_parent() -> None:
    """Ends this process with its parent, which cannot end it if killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
