"""`trainyard predict`: images from anywhere, and what is said of them."""

import csv
import io
import json
import shutil
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from tests.web import LocalServer
from trainyard.classifier import Guess
from trainyard.cli.predict import Row, _one_by_one
from trainyard.data.storage.remote import http

pytestmark = pytest.mark.slow


class Album(LocalServer):
    """Images, and all that can be wrong with a server."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path
        if path.startswith("/moved/"):
            there = f"{self.url}/{path.removeprefix('/moved/')}"
            self._say(request, 302, **{"Location": there, "Content-Length": "0"})
        elif path == "/local":
            self._say(request, 302, Location="file:///etc/hostname")
        elif path == "/huge":
            self._say(request, 200, **{"Content-Length": str(1 << 40)})
        elif path == "/endless":
            self._say(request, 200)
            try:
                while True:
                    request.wfile.write(bytes(1 << 16))
            except OSError:
                pass
        elif (file := self.folder / path.lstrip("/").partition("?")[0]).is_file():
            content = file.read_bytes()
            self._say(request, 200, **{"Content-Length": str(len(content))})
            request.wfile.write(content)
        else:
            self._say(request, 404, **{"Content-Length": "0"})

    def _say(self, request: BaseHTTPRequestHandler, status: int, **headers: str) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()


@pytest.fixture
def image(digits: Path) -> Path:
    return min((digits / "val" / "3").iterdir())


def predicted(capsys: Capture, *arguments: object, left_out: str = "") -> list[dict[str, object]]:
    capsys.readouterr()
    assert run("predict", *arguments, "--json") == 0
    out, err = capsys.readouterr()
    assert err == (f"left out: {left_out}\n" if left_out else "")
    images: list[dict[str, object]] = json.loads(out)["images"]
    return images


def test_a_folder_is_predicted_as_it_is_evaluated(
    finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    lines = tmp_path / "lines.csv"
    assert run("evaluate", finished, "--out", lines, "--json") == 0
    with open(lines, newline="") as file:
        expected = {row["file"]: row for row in csv.DictReader(file)}
    found = predicted(capsys, finished, digits / "val")
    assert [entry["image"] for entry in found] == sorted(expected)
    for entry in found:
        own, guesses = expected[str(entry["image"])], entry["guesses"]
        assert isinstance(guesses, list)
        assert guesses[0]["class"] == own["guess"]
        assert guesses[0]["probability"] == pytest.approx(float(own["confidence"]), abs=2e-6)
        assert len(guesses) == 5


@pytest.mark.parametrize("views", [("--flip",), ("--flip", "--scales", "1,1.15")])
def test_views_count_as_in_the_evaluation(
    views: tuple[str, ...], finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    lines = tmp_path / "lines.csv"
    assert run("evaluate", finished, *views, "--out", lines, "--json") == 0
    with open(lines, newline="") as file:
        expected = {row["file"]: row for row in csv.DictReader(file)}
    found = predicted(capsys, finished, digits / "val", *views)
    for entry in found:
        own, (first, *_) = expected[str(entry["image"])], as_guesses(entry)
        assert (entry["class"], first["class"]) == (own["guess"], own["guess"])
        assert first["probability"] == pytest.approx(float(own["confidence"]), abs=2e-6)
    plain = predicted(capsys, finished, digits / "val")
    assert as_guesses(plain[0])[0]["probability"] != as_guesses(found[0])[0]["probability"]


def as_guesses(entry: dict[str, object]) -> list[dict[str, Any]]:
    guesses = entry["guesses"]
    assert isinstance(guesses, list)
    return guesses


def test_images_are_unknown_below_a_probability(
    finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    plain = predicted(capsys, finished, digits / "val")
    least = sorted(as_guesses(entry)[0]["probability"] for entry in plain)[99]
    found = predicted(capsys, finished, digits / "val", "--unknown-below", least)
    unknown = [as_guesses(entry)[0]["probability"] < least for entry in found]
    assert 0 < sum(unknown) < len(found)
    for entry, is_unknown in zip(found, unknown, strict=True):
        assert entry["class"] == ("unknown" if is_unknown else as_guesses(entry)[0]["class"])
    many = shown(capsys, "predict", finished, digits, "--unknown-below", 1)
    assert "unknown" in many and many.count("%") == 1
    few = shown(capsys, "predict", finished, digits / "val" / "3", "--unknown-below", 1)
    assert few.count("unknown") == 37
    file = tmp_path / "said.csv"
    one = next((digits / "val" / "3").iterdir())
    assert "unknown" in shown(capsys, "predict", finished, one, "--unknown-below", 1, "--out", file)
    with open(file, newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert (row["class"], row["path"]) == ("unknown", str(one)) and row["class_1"].isdigit()


def test_files_folders_globs_and_data_sets_in_the_order_given(
    finished: Path, image: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    tar = tmp_path / "shards"
    assert run("data", "pack", digits / "val", tar, "--format", "webdataset") == 0
    deep = tmp_path / "pictures" / "a" / "b"
    deep.mkdir(parents=True)
    for name in ("1.PNG", "2.png", ".hidden.png", "notes.txt"):
        shutil.copy(image, deep / name)
    shutil.copy(image, tmp_path / "without-a-suffix")
    found = predicted(
        capsys,
        *(finished, image, tmp_path / "pictures", tmp_path / "pic*/**/b/?.png"),
        *(tar, tmp_path / "without-a-suffix"),
        left_out=f"1 hidden ({deep}/.hidden.png), 1 file ending in .txt ({deep}/notes.txt)",
    )
    first = [str(image), str(deep / "1.PNG"), str(deep / "2.png"), str(deep / "2.png")]
    assert [entry["image"] for entry in found[:4]] == first
    assert len(found) == 4 + 364 + 1
    assert found[-1]["image"] == str(tmp_path / "without-a-suffix")
    assert {entry["image"] for entry in found[4:-1]} == {str(next(tar.glob("*.tar")))}
    assert len({entry["offset"] for entry in found[4:-1]}) == 364
    whole = predicted(capsys, finished, digits / "val")
    key = "guesses"
    tops = sorted(str(entry[key]) for entry in whole)
    inside = sorted(str(entry[key]) for entry in found[4:-1])
    assert [text[:30] for text in tops] == [text[:30] for text in inside]
    assert len({str(entry[key])[:30] for entry in (*found[:4], found[-1])}) == 1


def test_a_link_to_a_folder_that_holds_it_is_not_followed_for_ever(
    finished: Path, image: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "deep").mkdir()
    shutil.copy(image, tmp_path / "deep" / "a.png")
    (tmp_path / "deep" / "round").symlink_to(tmp_path)
    loop = f"1 link to a folder above ({tmp_path}/deep/round)"
    assert len(predicted(capsys, finished, tmp_path, left_out=loop)) == 1


def test_images_come_from_web_servers(
    finished: Path, image: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copy(image, tmp_path / "three.png")
    with Album(tmp_path, protocol="HTTP/1.1") as server:
        names = [
            f"{server.url}/{name}"
            for name in (
                *("three.png", "three.png?size=8", "moved/three.png"),
                *("three.png?author=1&keyword=cat", "three.png?key=cat.jpg"),
            )
        ]
        found = predicted(capsys, finished, image, *names)
    assert [entry["image"] for entry in found] == [str(image), *names]
    assert len({str(entry["guesses"]) for entry in found}) == 1


def test_a_url_with_a_token_is_refused(finished: Path) -> None:
    """Both predictions had one name, since tokens are not written."""
    names = [f"http://127.0.0.1:1/get?token={token}" for token in "ab"]
    check(refused("predict", finished, *names), "storage.secret-in-url")


@pytest.mark.parametrize("path", ["/gone.png", "/text.png", "/huge", "/endless", "/local"])
def test_what_a_server_does_wrong(
    path: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.png").write_text("no image")
    if path == "/endless":
        monkeypatch.setattr(http, "MAX_BYTES", 1 << 20)
    with Album(tmp_path, protocol="HTTP/1.0") as server:
        error = refused("predict", finished, f"{server.url}{path}")
    check(error, "image.unreadable", name=f"{server.url}{path}")
    assert str(error).count(server.url) == 1


def test_other_schemes_are_not_fetched(finished: Path) -> None:
    check(
        refused("predict", finished, "ftp://host/image.png"), "storage.unknown-scheme", scheme="ftp"
    )


def test_a_bad_image_is_named_and_the_others_go_on(
    finished: Path, image: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name in ("b.png", "c.png"):
        (tmp_path / name).write_text("no image")
    shutil.copy(image, tmp_path / "a.png")
    (tmp_path / "d.png").symlink_to("nowhere")
    capsys.readouterr()
    assert run("predict", finished, tmp_path, "--json", "--out", tmp_path / "out.csv") == 0
    out, err = capsys.readouterr()
    images = json.loads(out)["images"]
    assert ["error" in entry for entry in images] == [False, True, True, True]
    assert images[1]["error"] == "not an image"
    assert all(f"{tmp_path}/{name}.png" in err for name in "bcd")
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["error"][:6] for row in rows] == ["", "not an", "not an", "[Errno"]
    assert [row["path"] for row in rows] == [f"{tmp_path}/{name}.png" for name in "abcd"]
    assert [row["class"] for row in rows] == [rows[0]["class_1"], "", "", ""]
    assert rows[0]["class_1"] == images[0]["guesses"][0]["class"]
    assert float(rows[0]["probability_5"]) == pytest.approx(
        images[0]["guesses"][4]["probability"], abs=1e-6
    )
    for name in ("a.png", "out.csv"):
        (tmp_path / name).unlink()
    check(refused("predict", finished, tmp_path), "image.none-readable", num_images=3)


@pytest.mark.quick
def test_what_a_person_sees(finished: Path, image: Path, digits: Path, capsys: Capture) -> None:
    one = shown(capsys, "predict", finished, "--top", "3", image)
    assert image.name in one.replace("\n", "")
    assert one.count("%") == 3
    some = shown(capsys, "predict", finished, digits / "val" / "3")
    assert some.count(".png") == 37
    many = shown(capsys, "predict", finished, digits)
    assert "share" in many
    assert ".png" not in many


@pytest.mark.quick
def test_an_unknown_image_has_its_likeliest_classes_beside_it() -> None:
    guesses = [Guess("cat", 0.4), Guess("dog", 0.3), Guess("eel", 0.2)]
    console = Console(file=io.StringIO(), width=100)
    for answer, others in (("cat", "dog 30.0%, eel 20.0%"), ("unknown", "cat 40.0%, dog 30.0%")):
        with console.capture() as captured:
            console.print(_one_by_one([Row("a.png", {}, None, guesses, answer)]))
        assert others in captured.get()


def test_classes_may_be_called_anything(
    finished: Path, image: Path, tmp_path: Path, capsys: Capture
) -> None:
    name = tmp_path / "[red] image.png"
    shutil.copy(image, name)
    assert "[red] image.png" in shown(capsys, "predict", finished, name).replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nothing.png",), "data.not-found"),
        (("*.gif",), "data.no-match"),
        (("",), "data.empty-location"),
        (("{image}", "--top", "0"), "option.invalid"),
        (("{image}", "--unknown-below", "1.5"), "option.invalid"),
        (("{image}", "--out", "out.txt"), "option.wrong-suffix"),
        (("{image}", "--optim.lr", "1"), "recipe.key-without-effect"),
        (("{image}", "--ema"), "checkpoint.no-average"),
        (("{folder}",), "data.no-images"),
        (("{image}", "--out", "{folder}/none/out.csv"), "option.file-unwritable"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], code: str, finished: Path, image: Path, tmp_path: Path
) -> None:
    words = [word.replace("{image}", str(image)) for word in arguments]
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    check(refused("predict", finished, *words), code)


def test_nothing_is_written_where_the_images_are(
    finished: Path, image: Path, tmp_path: Path
) -> None:
    shutil.copy(image, tmp_path / "a.png")
    assert run("predict", finished, tmp_path) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
