"""Ports, and a web server in a thread of this process, for tests to say what it answers."""

import socket
import threading
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self


class BurstServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # of the usual 5 a burst of connections loses some for a minute

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are no news."""


class LocalServer(ABC):
    """Serves a folder until it is left; `faults` are used up one a request, first to last."""

    def __init__(self, folder: Path, *, protocol: str) -> None:
        self.folder = folder
        self.faults: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = protocol

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = BurstServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @abstractmethod
    def answer(self, request: BaseHTTPRequestHandler) -> None: ...

    def next_fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
