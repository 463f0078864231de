"""Bearer tokens: sent to the server that they are for, and to no other; told to nobody."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.data.tars import Patch
from tests.errors import raises
from tests.web import FaultyServer
from trainyard.data.storage.credentials import token_of
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote.http import HttpStream
from trainyard.errors import DataError

CONTENT = bytes(range(256)) * 100
SECRET = "hf_0123456789secret"


class Server(FaultyServer):
    """Sends CONTENT to whoever has its token, and notes the Authorization of each request."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: list[str | None] = []
        self.token: str | None = None
        self.refusal = self._check
        for name in ("a.tar", "signed"):
            (folder / name).write_bytes(CONTENT)
            os.utime(folder / name, (1, 1))  # its tag

    def _check(self, request: BaseHTTPRequestHandler) -> int:
        given = request.headers.get("Authorization")
        self.seen.append(given)
        return 401 if self.token and given != f"Bearer {self.token}" and not self.moved_to else 0


@pytest.fixture
def servers(monkeypatch: Patch, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("TRAINYARD_TOKENS", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TRAINYARD_RETRY_S", "1")
    with Server(tmp_path / "hub") as hub, Server(tmp_path / "storage") as storage:
        yield hub, storage


def test_a_token_goes_to_its_server_alone(
    servers: tuple[Server, Server], monkeypatch: Patch
) -> None:
    hub, storage = servers
    hub.token = SECRET
    monkeypatch.setenv("HF_TOKEN", "hf_of_another_host")
    monkeypatch.setenv("TRAINYARD_TOKENS", f"example.org=other {hub.host}={SECRET}")
    assert open_source(f"http://{hub.host}/a.tar").read(5000, 9000) == CONTENT[5000:14_000]
    assert open_source(f"http://{storage.host}/a.tar").read(5000, 9000) == CONTENT[5000:14_000]
    assert {*hub.seen} == {f"Bearer {SECRET}"}
    assert {*storage.seen} == {None}


def test_a_token_does_not_follow_a_redirect_to_another_server(
    servers: tuple[Server, Server], monkeypatch: Patch
) -> None:
    hub, storage = servers
    hub.moved_to = f"http://{storage.host}/signed?X-Amz-Signature=abc"
    monkeypatch.setenv("TRAINYARD_TOKENS", f"{hub.host}={SECRET}")
    file = open_source(f"http://{hub.host}/a.tar")
    for offset in range(0, 20_000, 5000):
        assert file.read(offset, 5000) == CONTENT[offset : offset + 5000]
    assert hub.seen == [f"Bearer {SECRET}"]  # later ranges go to where it led
    assert {*storage.seen} == {None}
    assert HttpStream(f"http://{hub.host}/a.tar").readall() == CONTENT
    assert {*hub.seen} == {f"Bearer {SECRET}"}
    assert {*storage.seen} == {None}


def test_a_redirect_that_has_expired_is_followed_anew(servers: tuple[Server, Server]) -> None:
    hub, storage = servers
    hub.moved_to = f"http://{storage.host}/signed"
    file = open_source(f"http://{hub.host}/a.tar")
    storage.token = "nobody has it"  # so it refuses, as it does after the time of a signature
    hub.moved_to = ""
    assert file.read(5000, 9000) == CONTENT[5000:14_000]


def test_a_wrong_token_is_named_without_being_told(
    servers: tuple[Server, Server], monkeypatch: Patch
) -> None:
    hub, _ = servers
    hub.token = "another"
    monkeypatch.setenv("TRAINYARD_TOKENS", f"{hub.host}={SECRET}")
    with raises("storage.token-refused", status="401 Unauthorized") as caught:
        open_source(f"http://{hub.host}/a.tar")
    assert SECRET not in str(caught.value)
    monkeypatch.delenv("TRAINYARD_TOKENS")
    with raises("storage.no-login"):
        open_source(f"http://{hub.host}/a.tar")


@pytest.mark.parametrize(
    ("url", "has_it"),
    [
        ("https://huggingface.co/datasets/a/b/resolve/main/0.tar", True),
        ("http://huggingface.co/a", False),
        ("https://huggingface.co.evil.org/a", False),
        ("https://cdn-lfs.huggingface.co/a", False),
        ("https://example.org/huggingface.co", False),
    ],
)
def test_the_hub_has_a_variable_of_its_own(url: str, has_it: bool, monkeypatch: Patch) -> None:
    monkeypatch.delenv("TRAINYARD_TOKENS", raising=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert token_of(urlsplit(url)) == (SECRET if has_it else None)


def test_the_token_of_hf_auth_login_is_taken(tmp_path: Path, monkeypatch: Patch) -> None:
    """It was ignored, and the user asked for a variable."""
    for name in ("TRAINYARD_TOKENS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text(SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert token_of(urlsplit("https://huggingface.co/datasets/a/b/resolve/main/0.tar")) == SECRET
    assert token_of(urlsplit("https://example.org/0.tar")) is None


@pytest.mark.parametrize("value", [SECRET, f"={SECRET}", "host=", f"host={SECRET}\x07"])
def test_a_malformed_variable_is_named_without_its_content(value: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRAINYARD_TOKENS", value)
    with pytest.raises(DataError) as caught:
        token_of(urlsplit("https://host/a"))
    assert SECRET not in str(caught.value)
