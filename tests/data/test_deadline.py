"""Servers that send little by little, or without end: a request ends all the same."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from tests.data.tars import Patch
from tests.errors import raises
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote import http, request, retry
from trainyard.data.storage.remote.http import HttpStream
from trainyard.data.storage.remote.remote_file import RemoteFile

CONTENT = bytes(range(200))
HEAD = b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 200 + b"\r\nContent-Length: 200\r\n\r\n"
PART = b"HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Range: bytes 0-%d/200\r\n"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: Patch) -> None:
    monkeypatch.setattr(request, "GRACE_S", 0.4)
    monkeypatch.setattr(http, "MAX_S", 0.8)
    monkeypatch.setenv("TRAINYARD_RETRY_S", "0")
    retry._said.clear()


@contextmanager
def server(*answers: tuple[bytes, bytes]) -> Iterator[str]:
    """Answers one connection after the other, each with bytes sent at once and bytes that drip.

    A drip of 200 bytes takes 4 seconds; the last answer is given again and again.
    """

    def answer(connection: socket.socket, at_once: bytes, drip: bytes) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(at_once)
            for byte in drip:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)

    def serve() -> None:
        given = list(answers)
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                now = given.pop(0) if len(given) > 1 else given[0]
                threading.Thread(target=answer, args=(connection, *now), daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.jpg"
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def stalling_server(sent: bytes) -> Iterator[str]:
    """Sends these bytes on each connection, and no more."""
    held: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                held.append(listener.accept()[0])
                held[-1].recv(65536)
                held[-1].sendall(sent)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.jpg"
        listener.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.mark.parametrize("answer", [(b"", HEAD + CONTENT), (HEAD, CONTENT)], ids=["head", "body"])
def test_an_image_comes_within_its_time_or_not_at_all(
    answer: tuple[bytes, bytes], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(request, "GRACE_S", 30)
    with server(answer) as url, raises("storage.failed", url=url):
        http.fetch_image(url)


def test_a_stream_whose_head_drips_is_broken_off() -> None:
    with server((b"", HEAD + CONTENT)) as url, raises("storage.gave-up", url=url):
        HttpStream(url).readall()


def test_a_stream_that_stalls_is_broken_off() -> None:
    with stalling_server(HEAD + CONTENT[:100]) as url, closing(HttpStream(url)) as stream:
        assert stream.read(100) == CONTENT[:100]
        with raises("storage.gave-up", url=url, reason="no answer in time"):
            stream.read(100)


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_range_that_drips_is_broken_off(part: str) -> None:
    opening = PART % 0 + b"Content-Length: 1\r\n\r\nx", b""
    head = PART % 199 + b"Content-Length: 200\r\n\r\n"
    slow = (b"", head + CONTENT) if part == "head" else (head, CONTENT)
    with server(opening, slow) as url:
        file = open_source(url)
        with raises("storage.gave-up", url=url, reason="no answer in time"):
            file.read(0, 200)


def test_a_slow_range_has_time_for_its_bytes(monkeypatch: Patch) -> None:
    """It takes three times as long as a head may."""
    monkeypatch.setattr(request, "FLOOR", 20)
    opening = PART % 0 + b"Content-Length: 1\r\n\r\nx", b""
    head = PART % 199 + b"Content-Length: 200\r\n\r\n"
    with server(opening, (head + CONTENT[:140], CONTENT[140:])) as url:
        assert open_source(url).read(0, 200) == CONTENT


def test_only_waiting_for_the_server_counts() -> None:
    with server((HEAD + CONTENT[:100], b"")) as url, closing(HttpStream(url)) as stream:
        assert stream.read(50) == CONTENT[:50]
        time.sleep(0.6)
        assert stream.read(50) == CONTENT[50:100]


@pytest.mark.parametrize("asked", [1, 200])
def test_an_answer_longer_than_was_asked_for_is_not_read_to_its_end(asked: int) -> None:
    opening = (PART % 0 + b"Content-Length: 1\r\n\r\nx", b"")
    head = PART % (asked - 1) + b"Content-Length: 9999999\r\n\r\n"
    endless = (head + CONTENT[:asked] + bytes(1000), CONTENT)
    with server(*((opening, endless) if asked > 1 else (endless,))) as url:
        file = open_source(url)
        assert file.size == 200
        if asked > 1:
            assert file.read(0, 200) == CONTENT


class BrokenOff(RemoteFile):
    """A server that breaks off after each byte."""

    name, server, size = "http://server/a.jpg", "server", 6

    async def look(self) -> None:
        """It is there."""

    async def stream(self, offset: int, size: int) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.1)
        yield CONTENT[offset : offset + 1]
        raise retry.Transient("broken off")


def test_the_time_limit_begins_anew_with_each_byte(monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRAINYARD_RETRY_S", "0.3")
    assert asyncio.run(BrokenOff().fetch(0, 6)) == CONTENT[:6]
