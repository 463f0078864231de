"""examples/serve.py: photographs over HTTP."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from trainyard.classifier import Guess, load
from trainyard.errors import DataError

EXAMPLE = Path(__file__).parent.parent / "examples" / "serve.py"


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a server for a run."""
    command = [sys.executable, str(EXAMPLE), str(run), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Echo:
    """In place of a classifier."""

    def predict(self, content: bytes) -> list[list[Any]]:
        if not content:
            raise DataError("image.unreadable", name="image", reason="is empty")
        return [[Guess(content.decode(), 1.0)]]


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server in this process."""
    spec = spec_from_file_location("serve", EXAMPLE)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["classifier"] = Echo()
    with module.serve(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def answer(port: int, head: str, content: bytes = b"") -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"POST / HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n".encode() + content)
        response = HTTPResponse(client)
        response.begin()
        return response.status, json.load(response)


@pytest.mark.parametrize(
    "length", ["abc", "-1", "9" * 5000, str(2**30), "1e3", "0x5", "+4", "4_0", "", "0"]
)
def test_a_length_that_is_none_is_answered(port: int, length: str) -> None:
    status, found = answer(port, f"Content-Length: {length}")
    assert status == 400 and "error" in found
    assert answer(port, "Host: b")[0] == 400
    assert answer(port, "Content-Length: 4", b"next")[1][0]["name"] == "next"


def test_a_client_that_sends_nothing_keeps_no_other_waiting(port: int) -> None:
    with (
        socket.create_connection(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)) as half,
    ):
        half.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf")
        assert answer(port, "Content-Length: 3", b"one")[1][0]["name"] == "one"


@pytest.mark.slow
def test_guesses_are_those_of_the_run(finished: Path, digits: Path) -> None:
    photograph = next((digits / "val").glob("*/*"))
    with served(finished) as address:
        assert address.startswith("http://127.0.0.1:")
        found = json.load(urlopen(address, photograph.read_bytes()))
        for content in (b"no image", b""):
            with pytest.raises(HTTPError) as caught:
                urlopen(address, content)
            assert caught.value.code == 400
            assert "error" in json.load(caught.value)
    (expected,) = load(finished).predict(photograph)
    assert [guess["name"] for guess in found] == [guess.name for guess in expected]
    assert found[0]["probability"] == pytest.approx(expected[0].probability)
