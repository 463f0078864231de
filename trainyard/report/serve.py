"""A live report for a browser on this machine."""

import hashlib
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from trainyard.errors import InputError, TrainyardError
from trainyard.report.page import page
from trainyard.report.pictures import Gallery
from trainyard.report.runs import read_runs

_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_FILES = ("recipe.toml", "environment.json", "metrics.jsonl", "quarantine.jsonl", "predictions.npz")


class Made(NamedTuple):
    tag: str  # changes with the files of the runs
    body: bytes


class LivePage:
    """The page of some runs, rendered again when their files change."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._gallery = Gallery()
        self._lock = threading.Lock()
        self._made: Made | None = None

    def tag(self) -> str:
        """A tag of the current state of the files."""
        looks = [_look(folder / name) for folder in self._folders for name in _FILES]
        looks += [_look(folder / "checkpoints" / "best") for folder in self._folders]
        return f'"{hashlib.sha256(repr(looks).encode()).hexdigest()[:20]}"'

    def made(self) -> Made:
        with self._lock:  # concurrent requests render the page once
            tag = self.tag()  # taken before rendering: later changes give a new tag
            if self._made is None or self._made.tag != tag:
                text = page(read_runs(self._folders), self._gallery, is_live=True)
                self._made = Made(tag, text.encode())
            return self._made


def _look(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def server_of(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server on the loopback interface alone; port 0 picks any free port.

    InputError if a folder is no run directory, or the port is not available.
    """
    live = LivePage(folders)
    live.made()

    class Handler(_Handler):
        page = live

    try:
        server = ThreadingHTTPServer((_HOST, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--port {port}: {reason}; 0 takes any port that is free") from None
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    page: LivePage

    def do_GET(self) -> None:
        # DNS rebinding: another site's name that resolves to this host must not read the page.
        if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES:
            self.send_error(403, "only for this machine")
        elif self.path != "/":
            self.send_error(404)
        elif self.headers.get("If-None-Match") == self.page.tag():
            self.send_response(304)
            self.end_headers()
        else:
            self._send()

    def _send(self) -> None:
        try:
            made = self.page.made()
        except TrainyardError as error:  # a file being replaced, say; retried soon
            self.send_error(503, explain=str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(made.body)))
        self.send_header("ETag", made.tag)
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        self.wfile.write(made.body)

    def log_message(self, *_: object) -> None:
        """Suppresses the log of requests on the terminal."""
