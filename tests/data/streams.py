"""Shards of WebDataset for streams, and a server that cannot send parts of a file."""

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.tars import write_tar


def png(number: int, side: int = 16) -> bytes:
    """Noise, another one for each number."""
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


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


class PlainServer:
    """Serves a folder whole, ignoring Range; `faults` are used up one a request, first to last."""

    def __init__(self, folder: Path) -> None:
        self.faults: list[str] = []
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                fault = outer.faults.pop(0) if outer.faults else ""
                path = folder / self.path.lstrip("/")
                if fault.isdigit() or not path.is_file():
                    self.send_error(int(fault or 404))
                    return
                content = path.read_bytes() + bytes(512 if fault == "longer" else 0)
                first, size = 0, len(content)
                if fault == "ranges":
                    first = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
                self.send_response(206 if first else 200)
                if first:
                    self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
                if "chunked" in fault:
                    self.send_header("Transfer-Encoding", "chunked")
                elif "unsized" not in fault:
                    self.send_header("Content-Length", str(size - first))
                self.send_header("ETag", '"other"' if "changed" in fault else '"one"')
                self.end_headers()
                stop = size // 2 if "cut" in fault else size
                if "chunked" in fault:
                    self.wfile.write(b"%x\r\n" % size)
                self.wfile.write(content[first:stop])

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def plain_server(folder: Path) -> Iterator[PlainServer]:
    server = PlainServer(folder)
    try:
        yield server
    finally:
        server.close()
