"""Servers whose answers are malformed: one message, and no traceback."""

import pytest

from tests.data.test_deadline import server
from tests.errors import raises
from trainyard.data.storage.location import take_secrets
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote import request
from trainyard.data.storage.remote.http import HttpStream
from trainyard.errors import TrainyardError


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
    with (
        server((answer, b"")) as url,
        pytest.raises(TrainyardError) as caught,
    ):
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
