"""Web servers to test against: the nginx that we run, and a little one with chosen faults."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.web import LocalServer, free_port
from trainyard.datasets.serve import _SEARCH, ServerOptions, serving

# --- nginx ---


class WebServer:
    """The nginx that `trainyard data serve` runs, to be killed and started again."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.url = options.url.replace("NAME:PASSWORD@", "")
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
    shutil.which("nginx", path=_SEARCH) is None,
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


# --- a server with faults that nginx has not ---


class FaultyServer(LocalServer):
    """Serves files by ranges."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, protocol="HTTP/1.1")
        self.requests: list[tuple[str, str]] = []  # path and Range
        self.delay_s = 0.0
        self.at_once = self.most_at_once = 0  # requests that wait for their answers
        self._counting = threading.Lock()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        with self._counting:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.delay_s)
        with self._counting:
            self.at_once -= 1
        self._answer(request)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range", "")
        self.requests.append((request.path, wanted))
        fault = self.next_fault()
        path = self.folder / urlsplit(request.path).path.lstrip("/")
        if not path.is_file():
            return _say(request, 404)
        if fault == "moved":
            return _send(request, 302, b"", {"Location": f"{self.url}/file.bin"})
        if fault.isdigit():
            return _say(request, int(fault))
        content = path.read_bytes()
        if fault == "whole":
            return _send(request, 200, content, {})
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        first += fault == "shifted"
        part += bytes(9) if fault == "longer" else b""
        span = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"}
        span = {} if fault == "unranged" else span
        tag = '"another"' if fault == "changed" else f'"{path.stat().st_mtime_ns}"'
        _send(request, 206, part, span | {"ETag": tag}, is_cut=fault == "cut")


def _say(request: BaseHTTPRequestHandler, status: int) -> None:
    _send(request, status, b"", {"Retry-After": "0"})


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str],
    *,
    is_cut: bool = False,
) -> None:
    request.send_response(status)
    for name, value in (headers | {"Content-Length": str(len(content))}).items():
        request.send_header(name, value)
    request.end_headers()
    if is_cut:
        content = content[: len(content) // 2]
        request.close_connection = True
    with suppress(OSError):  # the client has seen enough
        request.wfile.write(content)
