"""Servers that send little by little, without end, or no HTTP: a request ends all the same."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from tests.data.tars import Patch
from tests.errors import raises
from trainyard.data.storage.location import take_secrets
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote import http, request, retry
from trainyard.data.storage.remote.http import HttpStream
from trainyard.data.storage.remote.remote_file import RemoteFile
from trainyard.errors import TrainyardError

CONTENT = bytes(range(200))
HEAD = b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 200 + b"\r\nContent-Length: 200\r\n\r\n"
PART = b"HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Range: bytes 0-%d/200\r\n"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: Patch) -> None:
    monkeypatch.setattr(request, "GRACE_S", 0.4)
    monkeypatch.setattr(http, "MAX_S", 0.8)
    monkeypatch.setenv("TRAINYARD_RETRY_S", "0")
    retry._last_said.clear()


@contextmanager
def server(*answers: tuple[bytes, bytes | None]) -> Iterator[str]:
    """Answers one connection after the other, each with bytes sent at once and bytes that drip.

    A drip of 200 bytes takes 4 seconds, None sends no more and stays; the last answer is given
    again and again.
    """

    def answer(connection: socket.socket, at_once: bytes, drip: bytes | None) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(at_once)
            time.sleep(4 if drip is None else 0)
            for byte in drip or b"":
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
    with server((HEAD + CONTENT[:100], None)) as url, closing(HttpStream(url)) as stream:
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

    async def stat(self) -> None:
        """It is there."""

    async def stream(self, offset: int, size: int) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.1)
        yield CONTENT[offset : offset + 1]
        raise retry.Transient("broken off")


def test_the_time_limit_begins_anew_with_each_byte(monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRAINYARD_RETRY_S", "0.3")
    assert asyncio.run(BrokenOff().fetch(0, 6)) == CONTENT[:6]


# --- answers that are malformed: one message, and no traceback ---


@pytest.mark.parametrize("size", ["abc", "-5", "²", "9" * 19, "9" * 5000])
@pytest.mark.parametrize(
    "head",
    [
        "200 OK\r\nContent-Length: {}\r\n\r\n",
        "206 Partial\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/{}\r\n\r\nx",
    ],
    ids=["length", "range"],
)
def test_a_size_that_is_none(head: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a ValueError of int, or a file that ends at byte -5."""
    monkeypatch.setenv("TRAINYARD_RETRY_S", "0")
    answer = f"HTTP/1.1 {head.format(size)}".encode("latin-1")
    with server((answer, b"")) as url, pytest.raises(TrainyardError) as caught:
        open_source(url)
    assert caught.value.code in ("storage.no-size", "storage.gave-up")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200\xff\r\n\r\n",
        b"no head of HTTP\r\n\r\n",
        b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-0/10\r\nContent-Length: 1\r\n: x\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
    ids=["status", "protocol", "header", "long"],
)
def test_an_answer_that_is_none_shows_no_signature(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_RETRY_S", "0")
    with server((answer, b"")) as url, raises("storage.gave-up", url=url) as caught:
        open_source(take_secrets(f"{url}?sig=S1gnature"))
    assert "S1gnature" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_interim_answers_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one would begin the time for an answer anew."""
    monkeypatch.setenv("TRAINYARD_RETRY_S", "0")
    monkeypatch.setattr(request, "GRACE_S", 0.3)
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    with server((interim, interim * 1000)) as url:
        with raises("storage.gave-up", url=url, reason="no answer in time"):
            open_source(url)
        with raises("storage.gave-up", url=url, reason="no answer in time"):
            HttpStream(url).read(1)


@pytest.mark.parametrize("proxy", [False, True])
def test_a_redirect_to_no_url(proxy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a ValueError of urlsplit; an error that quotes the address may show its signature."""
    head = "302 Found\r\nLocation: http://[::x/?X-Amz-Signature=S\r\nContent-Length: 0\r\n\r\n"
    with server((f"HTTP/1.1 {head}".encode(), b"")) as url:
        if proxy:
            monkeypatch.setenv("http_proxy", url.removesuffix("/a.jpg"))
        with raises("storage.redirect-to-no-url"):
            open_source("http://example.org/a.jpg" if proxy else url)
