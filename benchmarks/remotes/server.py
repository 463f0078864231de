"""A web server that answers every request for a range of bytes late: started by remote.py.

python -m benchmarks.remotes.server FOLDER [ADDRESS [PORT]]

It prints its port. GET and HEAD of /PATH, with or without Range, are answered after the delay. So
it is also an S3 endpoint whose buckets are the folders in FOLDER, for clients that only read.
GET /-/delay/MS sets the delay; GET /-/counts tells requests, bytes and seconds of CPU since the
last such request, and the most requests that waited at once, as JSON.
"""

import asyncio
import json
import mmap
import socket
import sys
import time
from pathlib import Path

SEND_BUFFER = 4 << 20  # bytes; an image leaves in one system call
_HEAD = (
    b'HTTP/1.1 %b\r\nContent-Length: %d\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n'
    b"Last-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\n%b\r\n"
)


class State:
    def __init__(self, folder: Path) -> None:
        self.delay_s = 0.0
        self.in_flight = 0
        self.files = {
            f"/{path.relative_to(folder)}": _mapped(path)
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.reset()

    def reset(self) -> None:
        self.requests = self.bytes = 0
        self.cpu = time.process_time()
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
        method, path = head.split(" ", 2)[:2]
        path = path.partition("?")[0]
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
        answer = status, part, span, method == "HEAD"
        asyncio.get_running_loop().call_later(state.delay_s, self._late, *answer)

    def _late(self, status: str, part: memoryview, span: bytes, is_head: bool) -> None:
        self._state.in_flight -= 1
        self._send(status, part, span, is_head)

    def _send(
        self, status: str, content: memoryview | bytes, span: bytes, is_head: bool = False
    ) -> None:
        self._transport.write(_HEAD % (status.encode(), len(content), span))
        if not is_head:
            self._state.bytes += len(content)
            self._transport.write(content)

    def _command(self, path: str) -> bytes:
        state = self._state
        if path.startswith("/-/delay/"):
            state.delay_s = float(path.rpartition("/")[2]) / 1000
        counts = {
            "requests": state.requests,
            "bytes": state.bytes,
            "most": state.most_in_flight,
            "cpu_s": time.process_time() - state.cpu,
        }
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


async def serve(folder: Path, address: str = "127.0.0.1", port: str = "0") -> None:
    state = State(folder)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(state), address, int(port), backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), *sys.argv[2:]))
