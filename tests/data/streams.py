"""Shards of WebDataset for streams, and servers with and without parts of files."""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.tars import write_tar
from tests.images import encode
from tests.web import LocalServer


def png(number: int, side: int = 16) -> bytes:
    """Noise, another one for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
    return encode(Image.fromarray(pixels), "PNG", compress_level=1)


def write_shards(folder: Path, sizes: Sequence[int], *, classes: int = 10) -> str:
    """Shards of so many samples each, as a brace list; the key of each is SHARD-POSITION."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        members = []
        for position in range(size):
            key = f"{shard}-{position:05d}"
            label = str((shard + position) % classes).encode()
            members += [(f"{key}.png", png(shard << 16 | position)), (f"{key}.cls", label)]
        write_tar(folder / f"part-{shard:03d}.tar", members)
    return f"{folder}/part-{{000..{len(sizes) - 1:03d}}}.tar"


def ids_of(sizes: Sequence[int]) -> list[int]:
    """The ids of all samples of such shards, sorted."""
    return [shard << 32 | place for shard, size in enumerate(sizes) for place in range(size)]


class PlainServer(LocalServer):
    """Serves files whole, ignoring Range."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, protocol="HTTP/1.0")
        self.requests: list[str] = []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(request.path)
        fault = self.next_fault()
        path = self.folder / request.path.lstrip("/")
        if fault.isdigit() or not path.is_file():
            request.send_error(int(fault or 404))
            return
        content = path.read_bytes() + bytes(512 if fault == "longer" else 0)
        first, size = 0, len(content)
        if fault == "ranges":
            first = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        request.send_response(206 if first else 200)
        if first:
            request.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        if "chunked" in fault:
            request.send_header("Transfer-Encoding", "chunked")
        elif "unsized" not in fault:
            request.send_header("Content-Length", str(size - first))
        request.send_header("ETag", '"other"' if "changed" in fault else '"one"')
        request.end_headers()
        stop = size // 2 if "cut" in fault else size
        if "chunked" in fault:
            request.wfile.write(b"%x\r\n" % size)
        request.wfile.write(content[first:stop])


class Server(LocalServer):
    """A web server of a folder that remembers what it was asked for, and may be slow."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.requests: list[tuple[str, int, int]] = []  # path, offset, size
        self.pause_s = 0.0  # before each full 64 KiB
        super().__init__(folder, protocol="HTTP/1.1")

    def fetched(self) -> dict[str, int]:
        """Bytes that each file was asked for, but for looks at its head."""
        sizes = Counter[str]()
        for path, _, size in list(self.requests):
            sizes[path] += size if size > 1 else 0
        return dict(sizes)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = self.folder / request.path[1:]
        # Else each answer waits 40 ms for an acknowledgement.
        request.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        if not path.is_file():
            request.send_error(404)
            return
        content = path.read_bytes()
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        body = content[first : last + 1]
        last = first + len(body) - 1
        self.requests.append((path.name, first, len(body)))
        request.send_response(206)
        request.send_header("Content-Length", str(len(body)))
        request.send_header(
            "Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content)}"
        )
        request.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        request.end_headers()
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(body), 1 << 16):
                piece = body[start : start + (1 << 16)]
                time.sleep(self.pause_s if len(piece) == 1 << 16 else 0)
                request.wfile.write(piece)
