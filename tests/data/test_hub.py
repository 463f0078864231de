"""Data sets on the Hub, by a local server that behaves like it."""

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.data.parquet_files import IMAGES, write
from tests.data.tars import write_tar
from tests.errors import raises
from tests.web import LocalServer
from trainyard.data.config import DataConfig
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits, train_and_val
from trainyard.data.open_datasets import open_datasets
from trainyard.data.reading.reader import Reader
from trainyard.data.storage import hub as hub_names
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
