"""Reading S3 (from moto's server, through s3fs) and Google Cloud Storage (a stand-in, gcsfs)."""

import json
import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.command_line import SHORT, run
from tests.data.streams import write_shards
from tests.errors import raises
from tests.web import LocalServer, free_port
from trainyard.data.index.build import build_index, open_index
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote import object_store

pytestmark = pytest.mark.slow

CONTENT = random.Random(0).randbytes(300_000)
TRAIN = "digits-train-{000000..000003}.tar"


class Bucket:
    """An S3 bucket `data` of moto's server."""

    def __init__(self, client: Any, server: Any) -> None:
        self._client = client
        self.stop, self.start = server.stop, server.start  # what it holds lies in this process

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket="data", Key=key, Body=content)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket="data", Key=key)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    boto3 = pytest.importorskip("boto3", reason="needs pip install 'moto[s3,server]'")
    moto_server = pytest.importorskip("moto.server", reason="needs pip install 'moto[s3,server]'")
    pytest.importorskip("s3fs", reason="needs s3fs: make .venv/.dev")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    port = free_port()
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="data")
    object_store._file_system.cache_clear()
    yield Bucket(client, server)
    object_store._file_system.cache_clear()
    server.stop()


@pytest.mark.night
def test_two_slashes_running_are_part_of_a_key(bucket: Bucket, tmp_path: Path) -> None:
    path = write_shards(tmp_path / "shards", [2])
    content = Path(path.replace("{000..000}", "000")).read_bytes()
    bucket.put("/x//part-000.tar", content)
    bucket.put("x/part-000.tar", b"another")
    index = open_index("s3://data//x//part-{000..000}.tar")
    assert index.locate(0)[0] == "s3://data//x//part-000.tar"
    assert Reader(index).read(0) in content
    assert open_index("s3://data//x//part-{000..000}.tar").path == index.path


def test_an_object_has_its_size_and_its_bytes(bucket: Bucket) -> None:
    bucket.put("folder/file.bin", CONTENT)
    file = open_source("s3://data/folder/file.bin")
    assert file.size == len(CONTENT)
    for offset, size in ((0, len(CONTENT)), (10, 100_000), (len(CONTENT) - 1, 1), (5, 0)):
        assert file.read(offset, size) == CONTENT[offset : offset + size]
    with pytest.raises(OSError, match="truncated or has changed"):
        file.read(len(CONTENT) - 1, 2)
    stamp = open_source("s3://data/folder/file.bin").stamp
    assert stamp == file.stamp
    assert json.loads(json.dumps(stamp)) == stamp
    bucket.put("folder/file.bin", CONTENT[::-1])
    assert open_source("s3://data/folder/file.bin").stamp != stamp


def test_an_object_that_changes_ends_the_run(bucket: Bucket) -> None:
    bucket.put("file.bin", CONTENT)
    file = open_source("s3://data/file.bin")
    bucket.put("file.bin", CONTENT[::-1])
    with raises("storage.changed-while-read", url="s3://data/file.bin"):
        file.read(0, 1000)
    bucket.delete("file.bin")
    with raises("storage.gone", url="s3://data/file.bin"):
        file.read(0, 1000)
    with pytest.raises(FileNotFoundError):
        open_source("s3://data/file.bin")


@pytest.mark.night
def test_threads_share_one_connection_to_the_store(bucket: Bucket) -> None:
    bucket.put("file.bin", CONTENT)
    file = open_source("s3://data/file.bin")

    def right(seed: int) -> bool:
        rng = random.Random(seed)
        offset, size = rng.randrange(200_000), rng.randrange(100_000)
        return file.read(offset, size) == CONTENT[offset : offset + size]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(64)))


@pytest.mark.night
def test_a_store_that_stays_away_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_RETRY_S", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    object_store._file_system.cache_clear()
    with raises("storage.gave-up", url="s3://data/x.tar", duration="1 s"):
        open_source("s3://data/x.tar")


def test_a_store_that_comes_back_is_waited_for(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("file.bin", CONTENT)
    file = open_source("s3://data/file.bin")
    bucket.stop()
    later = threading.Timer(1.5, bucket.start)
    later.start()
    started = time.monotonic()
    assert file.read(0, 1000) == CONTENT[:1000]
    assert time.monotonic() - started > 1
    later.join()


def test_credentials_that_are_missing_are_asked_for_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    object_store._file_system.cache_clear()
    with raises("storage.failed", url="s3://data/x.tar"):
        open_source("s3://data/x.tar")


def test_training_reads_from_a_bucket(bucket: Bucket, shards: Path, tmp_path: Path) -> None:
    for path in sorted(shards.iterdir()):
        if not path.name.startswith("."):
            bucket.put(f"digits/{path.name}", path.read_bytes())
    local = build_index(str(shards / TRAIN))
    remote = open_index(f"s3://data/digits/{TRAIN}")
    assert remote.fingerprint == local.fingerprint
    here, there = Reader(local), Reader(remote)
    for sample in range(0, len(local), 17):
        assert there.read(sample) == here.read(sample)
    folder = tmp_path / "run"
    assert run("train", "debug", "--data", "s3://data/digits", "--run", folder, *SHORT) == 0
    assert not (folder / "quarantine.jsonl").exists()


def test_a_library_that_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    object_store._file_system.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with raises("data.needs-package", package="gcsfs"):
        open_source("gs://data/file.bin")


# --- Google Cloud Storage: there is no server of it in Python, so the few answers that matter ---


class Google(LocalServer):
    """Answers for the objects that it holds: generation and content by name."""

    def __init__(self) -> None:
        super().__init__(Path(), protocol="HTTP/1.1")
        self.objects: dict[str, tuple[str, bytes]] = {}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        name = unquote(parts.path.rpartition("/")[2])
        generation, content = self.objects.get(name, ("", b""))
        wanted = dict(item.split("=") for item in parts.query.split("&") if "=" in item)
        status = 206
        if not generation or wanted.get("generation", generation) != generation:
            status, content = 404, b'{"error": {"code": 404, "message": "Not Found"}}'
        elif wanted.get("alt") != "media":
            about = {"name": "x", "bucket": "data", "size": str(len(content))}
            about |= {"etag": generation, "generation": generation}
            status, content = 200, json.dumps(about).encode()
        else:
            first, last = request.headers["Range"].removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        self.send(request, status, content, {"Content-Type": "application/json"})


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    pytest.importorskip("gcsfs", reason="needs gcsfs: make .venv/.dev")
    with Google() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("GCSFS_DEFAULT_PROJECT", "test")
        object_store._file_system.cache_clear()
        yield server
        object_store._file_system.cache_clear()


def test_google_keeps_to_the_generation_that_was_opened(google: Google) -> None:
    google.objects["file.bin"] = ("1", CONTENT)
    file = open_source("gs://data/file.bin")
    assert file.size == len(CONTENT)
    assert file.read(1000, 200_000) == CONTENT[1000:201_000]
    stamp = file.stamp
    google.objects["file.bin"] = ("2", CONTENT[::-1])
    with raises("storage.gone", url="gs://data/file.bin"):
        file.read(1000, 1000)
    assert open_source("gs://data/file.bin").stamp != stamp
    with pytest.raises(FileNotFoundError):
        open_source("gs://data/absent.bin")
