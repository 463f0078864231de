"""Ports, and a web server in a thread of this process, for tests to say what it answers."""

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit


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


class Asked(NamedTuple):
    path: str
    offset: int
    size: int  # of the part that is asked for, and there


class FaultyServer(LocalServer):
    """Serves files by ranges, or whole ones, with faults, delays and refusals as a test wants them.

    A fault is a status, or words: cut, changed, whole, moved, shifted, longer, unranged, chunked,
    unsized; and ranges, for one answer of a server without them.
    """

    def __init__(self, folder: Path, *, has_ranges: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, protocol="HTTP/1.1" if has_ranges else "HTTP/1.0")
        self.host = self.url.removeprefix("http://")
        self.has_ranges, self.has_tags = has_ranges, True
        self.requests: list[Asked] = []
        self.delay_s = 0.0  # before each answer
        self.pause_s = 0.0  # before each full 64 KiB
        self.at_once = self.most_at_once = 0  # requests that wait for their answers
        self.moved_to = ""
        self.refusal: Callable[[BaseHTTPRequestHandler], int] = lambda request: 0
        """The status that refuses a request; 0 if it is served."""
        self._counting = threading.Lock()

    def fetched(self) -> dict[str, int]:
        """Bytes that each file was asked for, but for looks at its head."""
        sizes = Counter[str]()
        for path, _, size in list(self.requests):
            sizes[Path(path).name] += size if size > 1 else 0
        return dict(sizes)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        # Else each answer waits 40 ms for an acknowledgement.
        request.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        with self._counting:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.delay_s)
        with self._counting:
            self.at_once -= 1
        with suppress(OSError):  # the client has seen enough
            self._answer(request, self.next_fault())

    def _answer(self, request: BaseHTTPRequestHandler, fault: str) -> None:
        path = self.folder / urlsplit(request.path).path.lstrip("/")
        content = path.read_bytes() if path.is_file() else b""
        first, last = _span(request, len(content))
        self.requests.append(Asked(request.path, first, len(content[first : last + 1])))
        moved_to = f"{self.url}/file.bin" if fault == "moved" else self.moved_to
        status = self.refusal(request) or int(fault if fault.isdigit() else 0)
        if status := status or (0 if path.is_file() or moved_to else 404):
            return self.send(request, status, b"", {"Retry-After": "0"})
        if moved_to:
            return self.send(request, 302, b"", {"Location": moved_to})
        changed = '"another"' if "changed" in fault else f'"{path.stat().st_mtime_ns}"'
        headers = {"ETag": changed} if self.has_tags else {}
        is_part = fault == "ranges" or (self.has_ranges and fault != "whole")
        extra = bytes(512 if "longer" in fault else 0)
        body = (content[first : last + 1] if is_part else content) + extra
        if is_part and fault != "unranged":
            first += fault == "shifted"
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(content)}"
        if "chunked" in fault:
            headers["Transfer-Encoding"] = "chunked"
        elif "unsized" not in fault:
            headers["Content-Length"] = str(len(body))
        request.send_response(206 if is_part else 200)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if "chunked" in fault:
            request.wfile.write(b"%x\r\n" % len(body))
        if "cut" in fault:
            body = body[: len(body) // 2]
            request.close_connection = True
        for start in range(0, len(body), 1 << 16):
            piece = body[start : start + (1 << 16)]
            time.sleep(self.pause_s if len(piece) == 1 << 16 else 0)
            request.wfile.write(piece)


def _span(request: BaseHTTPRequestHandler, size: int) -> tuple[int, int]:
    """The first and the last byte that a request asks for."""
    first, _, last = request.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
    return int(first), int(last or size - 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
