"""The nginx that we run."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.web import free_port
from trainyard.datasets.serve import ServerOptions, find_nginx, serving


class WebServer:
    """The nginx that `trainyard data serve` runs, to be killed and started again."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.url = options.url
        self._stack = ExitStack()
        self._thread = ThreadPoolExecutor(1)  # lasts: nginx ends with the thread that started it
        self.process: Any = None

    def start(self) -> None:
        context = serving(self.options)
        self.process = self._thread.submit(self._stack.enter_context, context).result()

    def kill(self) -> None:
        """SIGKILL, as a crash would have it, to the master and its workers."""
        pid = self.process.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *map(int, workers)):
            os.kill(process, signal.SIGKILL)
        self.stop()

    def kill_and_start(self, down_s: float) -> threading.Thread:
        """Kill it now; it comes back after a while, by another thread."""
        self.kill()

        def later() -> None:
            time.sleep(down_s)
            self.start()

        thread = threading.Thread(target=later)
        thread.start()
        return thread

    def stop(self) -> None:
        self._stack.close()


needs_nginx = pytest.mark.skipif(
    find_nginx() is None,
    reason="needs nginx: tests/services/install.sh, or apt-get install nginx-light",
)


def let_others_read(folder: Path) -> None:
    """Pytest's folders are their owner's alone; nginx is not root's."""
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o055)


@contextmanager
def web_server(folder: Path, **options: Any) -> Iterator[WebServer]:
    let_others_read(folder)
    server = WebServer(ServerOptions(folder=folder, port=free_port(), **options))
    server.start()
    try:
        yield server
    finally:
        server.stop()
