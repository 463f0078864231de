"""Servers whose answers are malformed: one message, and no traceback."""

import pytest

from tests.data.test_deadline import server
from trainyard.data.storage.remote.http import HttpFile
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
def test_a_size_that_is_none(head: str, size: str) -> None:
    """It was a ValueError of int, or a file that ends at byte -5."""
    answer = f"HTTP/1.1 {head.format(size)}".encode("latin-1")
    with server((answer, b"")) as url, pytest.raises(TrainyardError, match="send its size"):
        HttpFile(url)


@pytest.mark.parametrize("proxy", [False, True])
def test_a_redirect_to_no_url(proxy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a ValueError of urlsplit; an error that quotes the address may show its signature."""
    head = "302 Found\r\nLocation: http://[::x/?X-Amz-Signature=S\r\nContent-Length: 0\r\n\r\n"
    with server((f"HTTP/1.1 {head}".encode(), b"")) as url:
        if proxy:
            monkeypatch.setenv("http_proxy", url.removesuffix("/a.jpg"))
        with pytest.raises(TrainyardError, match=r"/a\.jpg: the server redirects to an address"):
            HttpFile("http://example.org/a.jpg" if proxy else url)
