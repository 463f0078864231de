"""A web server that answers every request for a range of bytes late: started by remote.py.

python -m benchmarks.remotes.server FOLDER [ADDRESS]

It prints its port. GET /FILE with or without Range sends a file's bytes after the delay;
GET /-/delay/MS sets the delay; GET /-/counts tells requests and bytes since the last such request,
and the most requests that waited at once, as JSON.
"""

import asyncio
import json
import mmap
import socket
import sys
from pathlib import Path

SEND_BUFFER = 4 << 20  # bytes; an image leaves in one system call


class State:
    def __init__(self, folder: Path) -> None:
        self.delay_s = 0.0
        self.in_flight = 0
        self.files = {f"/{path.name}": _mapped(path) for path in folder.iterdir() if path.is_file()}
        self.reset()

    def reset(self) -> None:
        self.requests = self.bytes = 0
        self.most_in_flight = self.in_flight


def _mapped(path: Path) -> memoryview:
    with open(path, "rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


class Connection(asyncio.Protocol):
    def __init__(self, state: State) -> None:
        self._state, self._received = state, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            self._answer(head.decode("latin-1"))

    def _answer(self, head: str) -> None:
        path = head.split(" ", 2)[1].partition("?")[0]
        if path.startswith("/-/"):
            return self._send("200 OK", self._command(path), b"")
        state = self._state
        state.requests += 1
        state.in_flight += 1
        state.most_in_flight = max(state.most_in_flight, state.in_flight)
        content = state.files.get(path)
        status, part, span = "404 Not Found", memoryview(b""), b""
        if content is not None:
            status, part, span = _part(content, head)
        state.bytes += len(part)
        asyncio.get_running_loop().call_later(state.delay_s, self._late, status, part, span)

    def _late(self, status: str, part: memoryview, span: bytes) -> None:
        self._state.in_flight -= 1
        self._send(status, part, span)

    def _send(self, status: str, content: memoryview | bytes, span: bytes) -> None:
        head = b'HTTP/1.1 %b\r\nContent-Length: %d\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n%b\r\n'
        self._transport.write(head % (status.encode(), len(content), span))
        self._transport.write(content)

    def _command(self, path: str) -> bytes:
        state = self._state
        if path.startswith("/-/delay/"):
            state.delay_s = float(path.rpartition("/")[2]) / 1000
        counts = {"requests": state.requests, "bytes": state.bytes, "most": state.most_in_flight}
        state.reset()
        return json.dumps(counts).encode()


def _part(content: memoryview, head: str) -> tuple[str, memoryview, bytes]:
    place = head.lower().find("\r\nrange: bytes=")
    if place < 0:
        return "200 OK", content, b""
    first, _, last = head[place + 15 :].partition("\r\n")[0].partition("-")
    part = content[int(first) : int(last) + 1 if last else len(content)]
    end = int(first) + len(part) - 1
    return (
        "206 Partial Content",
        part,
        (b"Content-Range: bytes %d-%d/%d\r\n" % (int(first), end, len(content))),
    )


async def serve(folder: Path, address: str = "127.0.0.1") -> None:
    state = State(folder)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(state), address, 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), *sys.argv[2:]))
