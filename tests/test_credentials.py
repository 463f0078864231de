"""A login or a signature in a location opens the data and is written nowhere."""

import base64
import json
import re
import shlex
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.command_line import SHORT, Capture, run, shown
from tests.data.streams import png
from tests.data.tars import write_tar
from tests.errors import check, raises, refused
from tests.web import FaultyServer
from trainyard.config import load_recipe, to_toml
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import all_splits, find_splits
from trainyard.data.index.unlabelled import open_images
from trainyard.data.reading.reader import Reader
from trainyard.data.storage import credentials
from trainyard.data.storage.credentials import with_secrets, without_secrets
from trainyard.data.storage.location import find_place, take_secrets
from trainyard.data.storage.manifest import Manifest, Shard, Split, write_manifest
from trainyard.data.storage.remote import request
from trainyard.data.storage.remote.http import fetch_image

PASSWORD, SIGNATURE = "s3cret", "S1gnature"


class GuardedServer(FaultyServer):
    """Serves ranges of files to those who have the login, or sign each URL."""

    def __init__(self, folder: Path, wanted: str) -> None:
        super().__init__(folder)
        login = base64.b64encode(f"me:{PASSWORD}".encode()).decode()

        def refusal(request: BaseHTTPRequestHandler) -> int:
            if wanted == "login":
                return 0 if request.headers.get("Authorization") == f"Basic {login}" else 401
            return 0 if parse_qs(urlsplit(request.path).query).get("sig") == [SIGNATURE] else 403

        self.refusal = refusal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache, a ~/.netrc and a memory of their own."""
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(credentials, "_known", {})
    request._login_in_netrc.cache_clear()
    yield tmp_path / "cache"
    request._login_in_netrc.cache_clear()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards to train on, of which one image is damaged, one to validate on, and a manifest."""
    folder = tmp_path / "shards"
    folder.mkdir()
    names = {"train": ["train-0.tar", "train-1.tar"], "val": ["val-0.tar"]}
    for number, name in enumerate(names["train"] + names["val"]):
        members = []
        for sample in range(16):
            content = b"no image" if (number, sample) == (0, 3) else png(100 * number + sample)
            members += [(f"{sample:02d}.png", content), (f"{sample:02d}.cls", b"%d" % (sample % 2))]
        write_tar(folder / name, members)
    splits = {
        split: Split(
            f"{split}-{{0..{len(shards) - 1}}}.tar",
            tuple(Shard(name, 16, (folder / name).stat().st_size, "") for name in shards),
        )
        for split, shards in names.items()
    }
    write_manifest(folder, Manifest("webdataset", ("cat", "dog"), splits))
    return folder


def files_with(secret: str, *folders: Path) -> list[str]:
    """The files that hold it in their bytes or their names."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 5
    return [str(p) for p in files if secret.encode() in p.read_bytes() or secret in str(p)]


OPTIONS = (*SHORT, "--data.max_bad", 1, "--data.image_size", 16, "--batch.size", 16)


def train(tmp_path: Path, *words: object, steps: int = 2) -> int:
    options = (*OPTIONS, "--run.length", f"{steps} steps", "--run", tmp_path / "run")
    return run("train", "debug", *words, *options)


def log_in(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {PASSWORD}\n")
    request._login_in_netrc.cache_clear()


def test_a_login_is_written_nowhere(
    shards: Path, tmp_path: Path, cache: Path, capsys: Capture
) -> None:
    with GuardedServer(shards, "login") as server:
        trained = ", ".join(f'"{server.url}/train-{number}.tar"' for number in range(2))
        words = ("--data.train", f"[{trained}]", "--data.val", f"{server.url}/val-0.tar")
        check(refused("data", "show", f"{server.url}/train-0.tar"), "storage.no-login")
        log_in(tmp_path)
        assert train(tmp_path, *words) == 0
        assert run("evaluate", tmp_path / "run") == 0
        printed = capsys.readouterr()
        assert files_with(PASSWORD, tmp_path / "run", cache) == []
        assert PASSWORD not in printed.out + printed.err
        [bad] = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()[:1]
        assert json.loads(bad)["file"] == f"{server.url}/train-0.tar"


def test_a_signature_is_written_nowhere_and_a_newer_one_goes_on(
    shards: Path, tmp_path: Path, cache: Path, capsys: Capture
) -> None:
    (shards / "dataset.json").unlink()
    with GuardedServer(shards, "signature") as server:
        train_url, val_url = (f"{server.url}/{name}" for name in ("train-{0..1}.tar", "val-0.tar"))
        query = f"?sv=2026&sig={SIGNATURE}"
        words = ("--data.train", f"{train_url}{query}", "--data.val", f"{val_url}{query}")
        assert train(tmp_path, *words, "--run.save_every", "1 step") == 0
        assert files_with(SIGNATURE, tmp_path / "run", cache) == []
        recipe = load_recipe(str(tmp_path / "run" / "recipe.toml"))
        assert (recipe.data.train, recipe.data.val) == (train_url, val_url)
        newer = [word.replace("2026", "2027") for word in words]
        capsys.readouterr()
        assert train(tmp_path, *newer, "--run.save_every", "1 step", "--plain") == 0
        assert "is complete already" in capsys.readouterr().out


@pytest.mark.slow
def test_data_sets_that_are_written_name_their_source_without_secrets(
    shards: Path, tmp_path: Path, cache: Path, capsys: Capture
) -> None:
    """By processes of their own, which need the login too."""
    with GuardedServer(shards, "login") as server:
        log_in(tmp_path)
        url = server.url
        packing = ("data", "pack", url, tmp_path / "packed", "--format", "webdataset")
        assert run(*packing, "--processes", 1) == 0
        assert run("data", "verify", url, "--deep", "--json", "--processes", 1) == 2
        for command in (("data", "index"), ("data", "show")):
            assert run(*command, url, "--json") == 0
        assert run("bench", "loader", url, "--seconds", 1, "--size", 16, "--json") == 0
    said = capsys.readouterr()
    assert re.search(r'"not an image", "file": "http://127\.[^"]*/train-0\.tar"', said.out)
    assert PASSWORD not in said.out + said.err
    assert files_with(PASSWORD, tmp_path / "packed", cache) == []


# --- what a location becomes ---


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("https://host:80/x@y/a.tar", "https://host:80/x@y/a.tar"),
        ("https://host/a.h5?X-Amz-Signature=pw&x=1#val", "https://host/a.h5?x=1#val"),
        ("https://host/folder/?sig=pw", "https://host/folder/"),
        ("http://host?n={0..3}&sig=pw", "http://host?n={0..3}"),
        ("https://host/a.tar?x=(1)#val", "https://host/a.tar?x=(1)#val"),
        ("http://host/get?keyword=1&author=2&set=3&sid=4&st=5&key=a.tar",) * 2,
        ("http://host/a.tar?sv=1&se=2&sr=b&sp=r&sig=pw&set=x", "http://host/a.tar?set=x"),
        ("http://host/a.tar?Expires=1&Signature=pw&v=2", "http://host/a.tar?v=2"),
        ("http://[::1]:8000/data/v1@2024/train.tar", "http://[::1]:8000/data/v1@2024/train.tar"),
        ("http://host/my data/<a>.tar", "http://host/my data/<a>.tar"),
        ("s3://bucket/my data/a@b.tar", "s3://bucket/my data/a@b.tar"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        ("pipe:curl http://me:pw@host/a.tar", "pipe:curl http://host/a.tar"),
        ("pipe:curl 'http://host/a?n={0..3}&sig=pw'", "pipe:curl 'http://host/a?n={0..3}'"),
        ("a folder/what?.tar", "a folder/what?.tar"),
    ],
)
def test_a_name_has_no_secrets(location: str, name: str) -> None:
    assert take_secrets(location) == name
    assert take_secrets(name) == name  # once is enough
    recipe = load_recipe("debug", {"data.train": location, "data.val": [location]})
    assert (recipe.data.train, recipe.data.val) == (name, (name,))
    assert "pw" not in to_toml(recipe)


def test_requests_have_what_locations_were_given_with() -> None:
    place = find_place("http://host/a/x-{0..1}.tar?sig=1")
    assert [place.path(name) for name in place.names] == [
        f"http://host/a/x-{number}.tar" for number in (0, 1)
    ]
    assert with_secrets("http://host/a/x-1.tar") == "http://host/a/x-1.tar?sig=1"
    assert with_secrets("http://host/a/dataset.json") == "http://host/a/dataset.json"
    take_secrets("https://store/c/?sig=2")
    assert with_secrets("https://store/c/d/x.tar") == "https://store/c/d/x.tar?sig=2"
    assert with_secrets("https://store/d/x.tar") == "https://store/d/x.tar"
    take_secrets("pipe:curl http://me:pw@host/{0..1}.tar")
    assert with_secrets("pipe:curl http://host/1.tar") == "pipe:curl http://me:pw@host/1.tar"


def test_a_newer_signature_takes_the_place_of_an_older_one() -> None:
    for signature in ("X-Amz-Signature=1&v=3", "v=3&X-Amz-Signature=2"):
        take_secrets(f"https://host/a.tar?{signature}")
        assert with_secrets("https://host/a.tar?v=3").endswith(signature)


def test_signed_urls_of_two_versions_are_two_files() -> None:
    urls = [f"https://host/a.tar?versionId={number}&X-Amz-Signature=1" for number in range(2)]
    names = [take_secrets(url) for url in urls]
    assert [with_secrets(name) for name in names] == urls


@pytest.mark.parametrize("name", ["key", "set", "sid", "keyword", "author", "se"])
def test_two_urls_that_differ_in_their_queries_are_two_files(tmp_path: Path, name: str) -> None:
    """The last one was read for both: wrong images under the labels of another file."""

    class Query(FaultyServer):
        def answer(self, request: BaseHTTPRequestHandler) -> None:
            request.path = "/" + request.path.rpartition("=")[2]
            super().answer(request)

    with Query(tmp_path / "source") as server:
        for number in range(2):
            members = [("0.png", png(number)), ("0.cls", b"%d" % number)]
            write_tar(server.folder / f"{number}.tar", members)
        urls = [f"{server.url}/get?{name}={number}.tar" for number in range(2)]
        indices = [open_index(url) for url in urls]
        assert [Reader(index).read(0) for index in indices] == [png(0), png(1)]
        assert [index.label[0] for index in indices] == [0, 1]
        both = open_index(f"{server.url}/get?{name}={{0..1}}.tar")
        assert [both.locate(sample)[0] for sample in range(2)] == urls
        (found,) = open_images(
            [url.replace(".tar", ".png") for url in urls], tmp_path, lambda *_: None
        )
        assert found.names == [url.replace(".tar", ".png") for url in urls]


@pytest.mark.parametrize(
    ("location", "code", "fields"),
    [
        ("s3://key:pw@bucket/a.tar", "storage.login-in-url", {"scheme": "s3"}),
        ("gs://bucket/a.tar?X-Goog-Signature=pw", "storage.query-in-store-url", {"scheme": "gs"}),
        *(
            (f"http://{place}", "storage.login-in-url", {"scheme": "http"})
            for place in ("me:pw@host/a", "me:pw x@h/a", "me:<pw>@h/a", "[me:pw@h/a", "pw@h/a")
        ),
        ("http://me:pw/1@host/a.tar", "storage.invalid-url", {"url": "http://…"}),
        ("http://me:pw/1 x@host/a.tar", "storage.invalid-url", {"url": "http://…"}),
        ("http://host/get?sig={0..9}", "storage.braces-outside-path", {"url": "http://host/get"}),
        (
            "http://host/get?id=1&api_key=pw",
            *("storage.secret-in-url", {"url": "http://host/get?id=1", "name": "api_key"}),
        ),
        ("http://host/get?%74oken=pw", "storage.secret-in-url", {"name": "%74oken"}),
        ("http://host/get?key=AIpw0123456789abcdef", "storage.secret-in-url", {"name": "key"}),
        ("https://host/a.tar?sig=1 pw", "storage.unquoted-query", {"scheme": "https"}),
    ],
)
def test_secrets_that_cannot_be_taken_are_not_told(
    location: str, code: str, fields: dict[str, object]
) -> None:
    with raises(code, **fields):
        take_secrets(location)
    error = refused("train", "debug", "--data.train", location)
    check(error, code, **fields)
    assert "pw" not in str(error)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("http://me:pw@h/a.tar?sig=pw: the server", "http://h/a.tar: the server"),
        ("http://h/a.tar?v=1&sig=pw&n=2, and", "http://h/a.tar?v=1&n=2, and"),
        ('["http://h/a?pw=pw", "b@c"]', '["http://h/a", "b@c"]'),
        ("val = 'http://h/a?sig=pw', and", "val = 'http://h/a', and"),
        ("curl http://me:pw@host/x?sig=pw | tar x", "curl http://host/x | tar x"),
        ("http://host:80/a@b is no login", "http://host:80/a@b is no login"),
        ("http://[::1]:80/a@b is no login", "http://[::1]:80/a@b is no login"),
    ],
)
def test_a_text_as_people_may_see_it(text: str, seen: str) -> None:
    assert without_secrets(text) == seen


def test_images_to_predict_keep_what_tells_them_apart(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "get").write_bytes(png(1))
    with GuardedServer(folder, "signature") as server:
        urls = [f"{server.url}/get?id={number}&sig={SIGNATURE}" for number in (1, 2)]
        (found,) = open_images([*urls, f"{server.url}/get?id=3&sig=no"], tmp_path, lambda *_: None)
    assert found.names == [f"{server.url}/get?id={number}" for number in (1, 2, 3)]
    assert found.index.size.tolist() == [len(png(1))] * 2 + [0]
    assert SIGNATURE not in str(found)
    with raises("storage.unquoted-query", scheme="http"):
        open_images([f"http://host/get?sig=no {SIGNATURE}"], tmp_path, lambda *_: None)


# --- who else writes ---


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_launchers_that_write_commands_refuse_secrets(launcher: str) -> None:
    extra: tuple[object, ...] = ("--ranks", 1)
    if launcher == "kubernetes":
        extra = ("--image", "i", "--volume", "c:/runs", "--run", "/runs/a")
    words = ("launch", launcher, "debug", *extra, "--dry-run", "--data")
    for url, code in (
        ("http://me:pw@host/data", "storage.login-in-url"),
        ("http://host/data?sig=pw", "launch.signature-written"),
    ):
        error = refused(*words, url)
        check(error, code)
        assert "pw" not in str(error)
    assert run(*words, "http://host/data") == 0


def test_a_command_that_is_printed_has_no_secrets(shards: Path, capsys: Capture) -> None:
    with GuardedServer(shards, "signature") as server:
        url = f"{server.url}?sig={SIGNATURE}"
        said = shown(capsys, "launch", "local", "debug", "--data", url, "--dry-run")
        assert server.url in shlex.split(said)
        assert SIGNATURE not in said


def test_readers_fetch_signed_urls(shards: Path) -> None:
    with GuardedServer(shards, "signature") as server:
        url = f"{server.url}/val-0.tar"
        signed = f"{url}?sig={SIGNATURE}"
        index = open_index(signed)
        assert index.locate(0)[0] == url
        assert Reader(index).read(0) == png(200)
        assert all_splits(signed) == {"data": url}
        assert (
            find_splits(f"{server.url}?sig={SIGNATURE}")["val"] == f"{server.url}/val-{{0..0}}.tar"
        )
        assert len(fetch_image(signed)) == (shards / "val-0.tar").stat().st_size
