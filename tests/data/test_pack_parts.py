"""A pack in parts, on machines that share a folder, writes the bytes of one machine."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.command_line import Capture, run, shown
from tests.data.tars import Patch
from tests.data.test_pack_restart import FEW, command, pack_until, tree, words
from tests.errors import check, refused
from trainyard.data.storage.manifest import FILE_NAME
from trainyard.datasets.pack.journal import Part, locked


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack that one machine writes. Tests only read it."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert run(*words(digits, folder, *FEW)) == 0
    return folder


def pack(source: Path, destination: Path, *more: object) -> int:
    return run(*words(source, destination, *FEW, *more))


@pytest.mark.slow
def test_three_at_once_and_a_join_are_one(digits: Path, tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "out"
    parts = [command(digits, out, *FEW, "--part", f"{n}/3") for n in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        for done in pool.map(lambda part: subprocess.run(part, capture_output=True), parts):
            assert done.returncode == 0, done.stderr
    assert not (out / FILE_NAME).exists()
    for more in ((), ("--part", "2/3"), ()):
        assert pack(digits, out, *more) == 0
        assert tree(out) == tree(whole)


@pytest.mark.parametrize("format", ["folder", "parquet"])
def test_more_parts_than_shards(format: str, digits: Path, tmp_path: Path) -> None:
    val = digits / "val"
    assert run(*words(val, tmp_path / "whole", *FEW, format=format)) == 0
    for more in (*(("--part", f"{number}/5") for number in range(1, 6)), ()):
        assert run(*words(val, tmp_path / "out", *FEW, *more, format=format)) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def times(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}


def test_a_killed_part_goes_on(
    digits: Path, tmp_path: Path, whole: Path, monkeypatch: Patch
) -> None:
    """It leaves the temporary files of the other parts alone."""
    out = tmp_path / "out"
    assert pack(digits, out, "--part", "2/2") == 0
    pack_until("add", monkeypatch, words(digits, out, *FEW, "--part", "1/2"), after=3)
    others = out / ".imagenet-train-000001.tar.0badcafe.part"
    others.write_bytes(b"of part 2, which is said to be at work again")
    lines = (out / ".pack-1-of-2.jsonl").read_text().splitlines()[1:]
    shards = {out / json.loads(line)["shard"]["name"] for line in lines}
    before = {path: time for path, time in times(out).items() if path in shards}
    assert len(before) == 3
    assert pack(digits, out, "--part", "1/2") == 0
    assert before.items() <= times(out).items()
    assert others.exists()
    assert pack(digits, out) == 0
    assert tree(out) == tree(whole)


def test_what_a_part_prints(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    part = words(digits, tmp_path, *FEW, "--part", "1/2", "--json")
    assert json.loads(shown(capsys, *part)) == {
        "destination": str(tmp_path),
        "part": "1/2",
        "samples": 897,
    }


def test_the_command_without_a_part_writes_what_is_left(
    digits: Path, tmp_path: Path, whole: Path
) -> None:
    """Of a part that never comes, whatever the number of parts. What is there stays as it is."""
    out = tmp_path / "out"
    for part in ("2/3", "1/4"):
        assert pack(digits, out, "--part", part) == 0
    shards = times(out)
    assert 0 < len(shards) < 19
    assert pack(digits, out) == 0
    assert shards.items() <= times(out).items()
    assert tree(out) == tree(whole)


def test_a_pack_of_one_machine_goes_on_in_parts(
    digits: Path, tmp_path: Path, whole: Path, monkeypatch: Patch
) -> None:
    out = tmp_path / "out"
    pack_until("add", monkeypatch, words(digits, out, *FEW), after=2)
    for more in (("--part", "1/2"), ("--part", "2/2"), ()):
        assert pack(digits, out, *more) == 0
    assert tree(out) == tree(whole)


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "1/0", "-1/4", "a/b", "1/4/4"])
def test_wrong_parts(text: str, digits: Path, tmp_path: Path) -> None:
    error = refused(*words(digits, tmp_path / "out", f"--part={text}"))
    check(error, "option.invalid", command="trainyard data pack")
    assert not (tmp_path / "out").exists()


def test_parts_that_do_not_belong_together(digits: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(digits, source)
    assert pack(source, out, "--part", "1/2") == 0
    before = tree(out)
    for more in ((), ("--part", "2/2")):
        error = refused(*words(source, out, *FEW, "--seed", 3, *more))
        check(error, "pack.settings-differ", changes="seed 0 instead of 3")
    image = next((source / "train" / "0").iterdir())
    image.write_bytes(image.read_bytes() + b"longer")
    assert run("data", "index", source) == 0
    error = refused(*words(source, out, *FEW, "--part", "2/2"))
    check(error, "pack.settings-differ", changes="a source that has changed since")
    assert tree(out) == before


def test_a_folder_with_other_files(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    error = refused(*words(digits, tmp_path, *FEW, "--part", "1/2"))
    check(error, "pack.destination-not-empty", path=tmp_path, name="notes.txt")
    assert set(tree(tmp_path)) == {"notes.txt"}


def test_a_part_that_is_at_work(digits: Path, tmp_path: Path) -> None:
    """Neither the same part, nor the whole, which would remove its files."""
    whole = words(digits, tmp_path, *FEW)
    first, second = ([*whole, "--part", part] for part in ("1/2", "2/2"))
    with locked(tmp_path, Part(1, 2)):
        check(refused(*first), "pack.part-in-use", path=tmp_path, part="1/2")
        check(refused(*whole), "pack.in-use", path=tmp_path)
        assert run(*second) == 0
    with locked(tmp_path):
        check(refused(*first), "pack.in-use", path=tmp_path)
    assert run(*whole) == 0


def test_a_journal_that_is_a_link_leads_nowhere(digits: Path, tmp_path: Path) -> None:
    """A link that came with a folder made a part cut and extend the user's files."""
    secret, out = tmp_path / "secret", tmp_path / "out"
    secret.write_text("a line\nno line end")
    out.mkdir()
    (out / ".pack-1-of-2.jsonl").symlink_to(secret)
    for part in (("--part", "1/2"), ("--part", "2/2"), ()):
        check(refused(*words(digits, out, *FEW, *part)), "file.is-link")
    assert secret.read_text() == "a line\nno line end"


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "no JSON",
        '{"odd": [], "image_bytes": 3}',
        '{"odd": [], "image_bytes": 3, "shard": {"colour": 3}}',
        '{"odd": 3, "image_bytes": 3, "shard": {}}',
        '{"odd": [], "image_bytes": 3, "shard": {"name": 3}}',
    ],
)
def test_a_damaged_journal(line: str, whole: Path, digits: Path, tmp_path: Path) -> None:
    """It was a traceback."""
    about = json.loads((whole / FILE_NAME).read_text())["about"]
    journal = tmp_path / ".pack-1-of-2.jsonl"
    journal.write_text(json.dumps({"plan": about["plan"], "settings": about}) + f"\n{line}\n")
    error = refused(*words(digits, tmp_path, *FEW))
    check(error, "pack.journal-damaged", path=journal)
