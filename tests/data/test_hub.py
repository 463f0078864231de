"""Data sets on the Hub, by a local server that behaves like it, and tokens for any server."""

import json
import os
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.data.parquet_files import IMAGES, write
from tests.data.tars import Patch, write_tar
from tests.errors import raises
from tests.web import FaultyServer, LocalServer
from trainyard.data.config import DataConfig
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits, train_and_val
from trainyard.data.open_datasets import open_datasets
from trainyard.data.reading.reader import Reader
from trainyard.data.storage import hub as hub_names
from trainyard.data.storage.credentials import token_of
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote.http import HttpStream
from trainyard.errors import DataError
from trainyard.world import World

REPO = "hf://datasets/acme/photos"
TOKEN = "hf_secret"


class Storage(LocalServer):
    """Where the Hub redirects to: takes a signature, and refuses the Hub's token."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, _, query = handler.path.partition("?")
        if query != "sig=1" or "Authorization" in handler.headers:
            handler.send_error(403)
            return
        content = (self.folder / path[1:]).read_bytes()
        first, last = map(int, re.findall(r"\d+", handler.headers["Range"]))
        part = content[first : last + 1]
        span = f"bytes {first}-{last}/{len(content)}"
        self.send(handler, 206, part, {"ETag": '"tag"', "Content-Range": span})


class Hub(LocalServer):
    """A gated repository: the list of its files in pages of two, and redirects to the storage."""

    def __init__(self, folder: Path, storage: str) -> None:
        super().__init__(folder, protocol="HTTP/1.1")
        self.storage = storage

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, _, query = handler.path.partition("?")
        listing, files = (
            "/api/datasets/acme/photos/tree/refs%2Fpr%2F1",
            "/datasets/acme/photos/resolve/",
        )
        if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.send(handler, 401, b"", {"X-Error-Code": "GatedRepo"})
        elif path == listing:
            self._list(handler, query)
        elif path.startswith(files):
            name = path.removeprefix(files).removeprefix("refs%2Fpr%2F1/")
            is_there = (self.folder / name).is_file()
            moved = {"Location": f"{self.storage}/{name}?sig=1"}
            self.send(handler, 302 if is_there else 404, b"", moved if is_there else {})
        else:
            self.send(handler, 404, b"", {"X-Error-Code": "RevisionNotFound"})

    def _list(self, handler: BaseHTTPRequestHandler, query: str) -> None:
        found = sorted(self.folder.rglob("*"))
        at = int(query.partition("cursor=")[2] or 0)
        entries = [
            {
                "type": "directory" if path.is_dir() else "file",
                "path": str(path.relative_to(self.folder)),
                "oid": "0",
                "size": path.stat().st_size,
            }
            for path in found
        ]
        more = {"Link": f'<{self.url}{handler.path.partition("?")[0]}?cursor={at + 2}>; rel="next"'}
        content = json.dumps(entries[at : at + 2]).encode()
        self.send(handler, 200, content, more if at + 2 < len(entries) else {})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the repository."""
    folder = tmp_path / "repo"
    (folder / "data").mkdir(parents=True)
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    hub_names._all_files.cache_clear()
    with Storage(folder, protocol="HTTP/1.1") as storage, Hub(folder, storage.url) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield folder


def test_parquet_of_a_gated_repository(hub: Path) -> None:
    """The token goes to the Hub only; splits are found by the names of files, over pages."""
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
        write(hub / "data" / f"{name}.parquet", names=["a", "b", "c"], row_group_size=9)
    train, val = (train_and_val(_at())[split] or "" for split in ("train", "val"))
    assert train.endswith("/data/*train*.parquet")
    index = open_index(train)
    reader = Reader(index)
    assert index.classes == ("a", "b", "c")
    assert [reader.read(sample) for sample in range(len(index))] == IMAGES * 2
    assert len(open_index(val)) == len(IMAGES)
    chosen = find_splits(f"{_at()}#label=label")
    assert chosen["val"] == f"{val}#label=label"
    assert len(open_index(chosen["val"])) == len(IMAGES)


def _at() -> str:
    return f"{REPO}@refs/pr/1"


def test_webdataset_and_a_test_split(hub: Path) -> None:
    for split in ("train", "test"):
        write_tar(hub / f"mini-{split}-0000.tar", [("a.jpg", b"image"), ("a.cls", b"0")])
    found = find_splits(_at())
    assert open_index(found["val"] or "").format == "webdataset"
    assert Reader(open_index(found["train"] or "")).read(0) == b"image"


def test_a_new_file_upstream_is_indexed(hub: Path) -> None:
    for number in (1, 2):
        write_tar(hub / f"train-{number}.tar", [("a.jpg", b"image"), ("a.cls", b"0")])
        hub_names._all_files.cache_clear()  # as in a new process
        assert len(open_index(f"{_at()}/train-*.tar")) == number


def test_a_missing_token_is_one_line(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with raises("hub.gated") as caught:
        train_and_val(_at())
    assert "\n" not in str(caught.value)


def test_names_that_are_not_there(hub: Path) -> None:
    with raises("hub.bad-name"):
        train_and_val("hf://photos")
    for name in (f"{REPO}@other", "hf://datasets/acme/none"):
        with raises("hub.unknown-data-set"):
            train_and_val(name)


def test_a_random_order_of_single_requests_is_refused(hub: Path) -> None:
    config = DataConfig(train=f"{_at()}/data/train-*.parquet", val="x")
    with raises("recipe.random-order-on-hub"):
        open_datasets(config, World(), lambda *_: None)


# --- bearer tokens: sent to the server that they are for, and to no other; told to nobody ---

STORED = bytes(range(256)) * 100
SECRET = "hf_0123456789secret"


class Server(FaultyServer):
    """Sends STORED to whoever has its token, and notes the Authorization of each request."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: list[str | None] = []
        self.token: str | None = None
        self.refusal = self._check
        for name in ("a.tar", "signed"):
            (folder / name).write_bytes(STORED)
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
    assert open_source(f"http://{hub.host}/a.tar").read(5000, 9000) == STORED[5000:14_000]
    assert open_source(f"http://{storage.host}/a.tar").read(5000, 9000) == STORED[5000:14_000]
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
        assert file.read(offset, 5000) == STORED[offset : offset + 5000]
    assert hub.seen == [f"Bearer {SECRET}"]  # later ranges go to where it led
    assert {*storage.seen} == {None}
    assert HttpStream(f"http://{hub.host}/a.tar").readall() == STORED
    assert {*hub.seen} == {f"Bearer {SECRET}"}
    assert {*storage.seen} == {None}


def test_a_redirect_that_has_expired_is_followed_anew(servers: tuple[Server, Server]) -> None:
    hub, storage = servers
    hub.moved_to = f"http://{storage.host}/signed"
    file = open_source(f"http://{hub.host}/a.tar")
    storage.token = "nobody has it"  # so it refuses, as it does after the time of a signature
    hub.moved_to = ""
    assert file.read(5000, 9000) == STORED[5000:14_000]


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
