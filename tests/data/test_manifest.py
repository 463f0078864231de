"""dataset.json: what it may say, and whose it is."""

import json
import os
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Capture
from tests.data.streams import write_shards
from tests.data.tars import Patch
from tests.errors import raises
from tests.web import FaultyServer
from trainyard.data.formats.folder import scan
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import all_splits, find_splits, split_remarks, train_and_val
from trainyard.data.index.unlabelled import open_images
from trainyard.data.storage.location import expand_braces, find_place
from trainyard.data.storage.manifest import read_manifest
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote import retry

SHARD = {"name": "part-000.tar", "samples": 2, "bytes": 10, "sha256": "0"}


def written(folder: Path, **changes: Any) -> str:
    """A folder of two shards with a manifest, of which something is changed."""
    write_shards(folder, [2, 2], classes=2)
    shard = SHARD | {"bytes": (folder / "part-000.tar").stat().st_size}
    split = {"files": "part-{000..001}.tar", "shards": [shard]}
    tree = {"version": 1, "format": "webdataset", "classes": ["cat", "dog"], "about": {}}
    text = json.dumps(tree | {"splits": {"train": split, "val": split}} | changes)
    (folder / "dataset.json").write_text(text)
    return str(folder)


def with_files(folder: Path, files: str, name: str = "part-000.tar") -> str:
    split = {"files": files, "shards": [SHARD | {"name": name}]}
    return written(folder, splits={"train": split, "val": split})


@pytest.mark.parametrize(
    "name", ["../other/x.tar", "/etc/passwd", "a/../../x.tar", "http://host/x.tar", ".."]
)
def test_a_manifest_names_files_inside_its_folder_alone(tmp_path: Path, name: str) -> None:
    for folder in (with_files(tmp_path / "a", name), with_files(tmp_path / "b", "x.tar", name)):
        with raises("manifest.damaged", path=f"{folder}/dataset.json"):
            find_splits(folder)


def test_a_manifest_may_name_folders_below_its_own(tmp_path: Path) -> None:
    folder = with_files(tmp_path / "a", "train/..x-{0..1}.tar", "train/..x-0.tar")
    assert find_splits(folder)["train"] == f"{folder}/train/..x-{{0..1}}.tar"


def test_shards_that_a_manifest_does_not_list_are_told(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert split_remarks(folder) == []
    for number in (2, 3):
        (tmp_path / f"part-00{number}.tar").write_bytes(b"")
    (remark,) = split_remarks(folder)
    assert remark.startswith(f"{folder}/part-002.tar and 1 more: left out beside {folder}/")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("files", ["x-{0..999999999999}.tar", "{0..9999}/{0..9999}.tar"])
def test_a_brace_list_has_an_end(tmp_path: Path, files: str) -> None:
    place = find_splits(with_files(tmp_path, files))["train"]
    with raises("data.too-many-names", location=place, most=1000000):
        find_place(place)


def test_the_longest_brace_list() -> None:
    assert len(expand_braces("{0..999}/{000..999}.tar")) == 1_000_000


@pytest.mark.timeout(60)
def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dataset.json")
    assert read_manifest(str(tmp_path)) is None
    os.mkfifo(tmp_path / "x.jpg")
    for name in ("dataset.json", "x.jpg"):
        with pytest.raises(OSError, match="not a regular file"):
            open_source(str(tmp_path / name))
    with raises("image.not-a-file", path=f"{tmp_path}/x.jpg"):
        open_images([str(tmp_path / "x.jpg")], tmp_path, lambda *_: None)
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "1.jpg").write_bytes(b"1")
    os.mkfifo(tmp_path / "class" / "2.jpg")
    assert [row.path for row in scan(find_place(str(tmp_path))).rows] == ["class/1.jpg"]
    (images,) = open_images([str(tmp_path / "class")], tmp_path, lambda *_: None)
    assert len(images.index) == 1


# --- whose it is ---

FOREIGN = {
    "StyleGAN's": json.dumps({"labels": [["00000/img00000000.png", 6]]}),
    "a list": "[]",
    "text": "not JSON",
    "empty": "",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.parametrize("where", ["in it", "above it"])
def test_another_programs_file_is_passed_over(
    tmp_path: Path, text: str, where: str, capsys: Capture
) -> None:
    folder = tmp_path / "data"
    write_shards(folder / "train", [2, 2], classes=2)
    place = folder / "train" if where == "in it" else folder
    (place / "dataset.json").write_text(text)
    assert find_splits(str(folder)) == {"train": f"{folder}/train"}
    index = open_index(f"{folder}/train")
    assert (len(index), index.has_names) == (4, False)
    said = capsys.readouterr().err
    assert said == f"trainyard: {place}/dataset.json: not written by Trainyard; passed over\n"


NEGATIVE = {"val": {"files": "x", "shards": [SHARD | {"samples": -1}]}}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"splits": []}, "splits"),
        ({"splits": {"train": {"shards": []}}}, "splits.train.files"),
        ({"classes": "abc"}, "classes"),
        ({"classes": [1, 2]}, "classes.0"),
        ({"classes": ["cat", "cat"]}, "classes"),
        ({"splits": NEGATIVE}, "splits.val.shards.0.samples"),
        ({"version": None}, "version"),
    ],
)
def test_a_damaged_one_of_ours_is_named(
    tmp_path: Path, changes: dict[str, Any], place: str
) -> None:
    folder = written(tmp_path, **changes)
    with raises("manifest.damaged", path=f"{folder}/dataset.json") as caught:
        find_splits(folder)
    assert str(caught.value.fields["reason"]).startswith(f"{place}: ")


@pytest.mark.parametrize("text", ['{\n "version": 1,\n "form', '{"version": ' + "[" * 100_000])
def test_one_of_ours_that_is_cut_short_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with raises("manifest.damaged", path=f"{tmp_path}/dataset.json"):
        find_splits(str(tmp_path))


def test_one_of_a_later_version_is_named(tmp_path: Path) -> None:
    with raises("file.other-version", path=f"{tmp_path}/dataset.json", known=1):
        find_splits(written(tmp_path, version=2))


# --- on a server that refuses it, or fails with it ---


class Refusing(FaultyServer):
    """Answers requests for other files than shards with a status, or any request for a while."""

    def __init__(self, folder: Path, status: int) -> None:
        super().__init__(folder)
        self.status, self.refusal = status, self._refuse
        self.is_strict = False  # refuses the shards too
        self.away_until: float | None = None

    def _refuse(self, request: BaseHTTPRequestHandler) -> int:
        if self.away_until == 0 and request.path.endswith("dataset.json"):
            self.away_until = time.monotonic() + 0.6
        if self.away_until is not None:
            is_refused = time.monotonic() < self.away_until
        else:
            is_refused = self.is_strict or not request.path.endswith(".tar")
        return self.status if is_refused else 0


@pytest.fixture
def brief_waits(monkeypatch: Patch) -> None:
    monkeypatch.setattr(retry, "OPTIONAL_S", 0.2)


@pytest.mark.usefixtures("brief_waits")
@pytest.mark.parametrize("status", [400, 401, 403, 405, 429, 500, 501, 503])
def test_shards_are_read_without_files_that_a_server_refuses(
    tmp_path: Path, status: int, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("TRAINYARD_RETRY_S", "5")
    with Refusing(tmp_path / "served", status) as server:
        written(server.folder / "shards")
        url = f"{server.url}/shards/part-000.tar"
        assert all_splits(url) == {"data": url}
        assert len(open_index(url)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "waiting for" not in line]
    is_failure = status in (429, 500, 503)
    # Below the shard as if it were a folder, beside it, and above it.
    assert len(said) == (3 if is_failure else 0)
    assert all(line.endswith("gave up after 0.2 s; passed over") for line in said)


@pytest.mark.usefixtures("brief_waits")
def test_a_login_that_the_shards_want_is_asked_for(tmp_path: Path) -> None:
    with Refusing(tmp_path / "served", 401) as server:
        written(server.folder / "shards")
        server.is_strict = True
        for location in ("shards/part-000.tar", "shards"):
            url = f"{server.url}/{location}"
            with raises("storage.no-login", url=url):
                open_index(all_splits(url)["data"])
        with raises("storage.no-login", url=f"{url}/dataset.json"):
            train_and_val(f"{server.url}/shards")


@pytest.mark.usefixtures("brief_waits")
def test_a_server_that_is_away_for_a_while_takes_no_names_with_it(tmp_path: Path) -> None:
    """For longer than an optional file is tried: its shards are waited for, then it is read."""
    with Refusing(tmp_path / "served", 503) as server:
        written(server.folder / "shards")
        server.away_until = 0
        index = open_index(f"{server.url}/shards/part-000.tar")
        assert index.classes == ("cat", "dog")
        server.away_until = 0
        assert find_splits(f"{server.url}/shards").keys() == {"train", "val"}
