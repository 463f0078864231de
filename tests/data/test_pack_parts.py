"""A pack in parts, on machines that share a folder, writes the bytes of one machine."""

import json
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.command_line import Capture, complaint, run, shown
from tests.data.test_pack_restart import command, packing, tree
from trainyard.data.storage.manifest import FILE_NAME
from trainyard.datasets.pack.journal import Part, locked

FEW = ("--shard-samples", "100", "--workers", "1")  # 15 + 4 shards


def words(source: Path, destination: Path, *more: object) -> tuple[object, ...]:
    return ("data", "pack", source, destination, "--format", "webdataset", *FEW, *more)


@pytest.mark.parametrize("format", ["webdataset", "folder", "parquet"])
def test_three_at_once_and_a_join_are_one(digits: Path, tmp_path: Path, format: str) -> None:
    few = ("--shard-samples", "100", "--workers", "1")
    subprocess.run(command(digits, tmp_path / "whole", format, *few), check=True)
    parts = [command(digits, tmp_path / "out", format, *few, "--part", f"{n}/3") for n in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        for done in pool.map(lambda part: subprocess.run(part, capture_output=True), parts):
            assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out" / FILE_NAME).exists()
    subprocess.run(command(digits, tmp_path / "out", format, *few), check=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    for again in (parts[1], command(digits, tmp_path / "out", format, *few)):
        subprocess.run(again, check=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_killed_part_goes_on(digits: Path, tmp_path: Path) -> None:
    """It leaves the temporary files of the other parts alone."""
    out = tmp_path / "out"
    assert run(*words(digits, tmp_path / "whole")) == 0
    assert run(*words(digits, out, "--part", "2/2")) == 0
    with packing(command(digits, out, "webdataset", *FEW, "--part", "1/2")) as process:
        while process.poll() is None and len(list(out.glob("*.tar"))) < 9 + 3:
            pass
        process.kill()
    others = out / ".imagenet-train-000001.tar.0badcafe.part"
    others.write_bytes(b"of part 2, which is said to be at work again")
    lines = (out / ".pack-1-of-2.jsonl").read_text().splitlines()[1:]
    paths = [out / json.loads(line)["shard"]["name"] for line in lines]
    shards = {path: path.stat().st_mtime_ns for path in paths}
    assert 2 <= len(shards) <= 10  # all of them where it is faster than this process looks
    assert run(*words(digits, out, "--part", "1/2")) == 0
    assert shards.items() <= {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}.items()
    assert others.exists()
    assert run(*words(digits, out)) == 0
    assert tree(out) == tree(tmp_path / "whole")


def test_what_a_part_prints(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    said = shown(capsys, *words(digits, tmp_path / "out", "--part", "2/2"))
    assert said == "part 2/2: 900 samples; the same command without --part joins all\n"
    said = shown(capsys, *words(digits, tmp_path / "out", "--part", "1/2", "--json"))
    assert json.loads(said) == {
        "destination": str(tmp_path / "out"),
        "part": "1/2",
        "samples": 897,
    }


def test_more_parts_than_shards(digits: Path, tmp_path: Path) -> None:
    for number in range(1, 31):
        assert run(*words(digits, tmp_path / "out", "--part", f"{number}/30")) == 0
    assert run(*words(digits, tmp_path / "out")) == 0
    assert len(list((tmp_path / "out").glob("*.tar"))) == 19


def test_the_command_without_a_part_writes_what_is_left(digits: Path, tmp_path: Path) -> None:
    """Of a part that never comes, whatever the number of parts. What is there stays as it is."""
    out = tmp_path / "out"
    assert run(*words(digits, tmp_path / "whole")) == 0
    for part in ("2/3", "1/4"):
        assert run(*words(digits, out, "--part", part)) == 0
    shards = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert 0 < len(shards) < 19
    assert run(*words(digits, out)) == 0
    assert shards.items() <= {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}.items()
    assert tree(out) == tree(tmp_path / "whole")


def test_a_pack_of_one_machine_goes_on_in_parts(digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*words(digits, tmp_path / "whole")) == 0
    with packing(command(digits, out, "webdataset", *FEW)) as process:
        while process.poll() is None and not list(out.glob("*.tar")):
            pass
        process.kill()
    for more in (("--part", "1/2"), ("--part", "2/2"), ()):
        assert run(*words(digits, out, *more)) == 0
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "1/0", "-1/4", "a/b", "1/4/4"])
def test_wrong_parts(text: str, digits: Path, tmp_path: Path, capsys: Capture) -> None:
    said = complaint(capsys, *words(digits, tmp_path / "out", f"--part={text}"))
    assert f"{text!r} is no share; write 1/8" in said
    assert not (tmp_path / "out").exists()


Change = Callable[[Path, Path], tuple[object, ...]]


def other_seed(source: Path, out: Path) -> tuple[object, ...]:
    return words(source, out, "--seed", 3)


def other_seed_of_a_part(source: Path, out: Path) -> tuple[object, ...]:
    return words(source, out, "--seed", 3, "--part", "2/2")


def changed_source(source: Path, out: Path) -> tuple[object, ...]:
    image = next((source / "train" / "0").iterdir())
    image.write_bytes(image.read_bytes() + b"longer")
    assert run("data", "index", source) == 0
    return words(source, out, "--part", "2/2")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_seed, "holds an unfinished pack made with seed 0 instead of 3"),
        (other_seed_of_a_part, "holds an unfinished pack made with seed 0 instead of 3"),
        (changed_source, "a source that has changed since"),
    ],
)
def test_parts_that_do_not_belong_together(
    change: Change, reason: str, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(digits, source)
    assert run(*words(source, out, "--part", "1/2")) == 0
    before = tree(out)
    assert reason in complaint(capsys, *change(source, out))
    assert tree(out) == before


def test_a_folder_with_other_files(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in complaint(capsys, *words(digits, tmp_path, "--part", "1/2"))
    assert set(tree(tmp_path)) == {"notes.txt"}


def test_a_part_that_is_at_work(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    """Neither the same part, nor the whole, which would remove its files."""
    with locked(tmp_path, Part(1, 2)):
        said = complaint(capsys, *words(digits, tmp_path, "--part", "1/2"))
        assert "another process is packing into it, part 1/2: wait for it" in said
        said = complaint(capsys, *words(digits, tmp_path))
        assert "another process is packing into it: wait for it" in said
        assert run(*words(digits, tmp_path, "--part", "2/2")) == 0
    with locked(tmp_path):
        said = complaint(capsys, *words(digits, tmp_path, "--part", "1/2"))
        assert "another process is packing into it: wait for it" in said
    assert run(*words(digits, tmp_path)) == 0


def test_a_journal_that_is_a_link_leads_nowhere(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A link that came with a folder made a part cut and extend the user's files."""
    secret, out = tmp_path / "secret", tmp_path / "out"
    secret.write_text("a line\nno line end")
    out.mkdir()
    (out / ".pack-1-of-2.jsonl").symlink_to(secret)
    for part in (("--part", "1/2"), ("--part", "2/2"), ()):
        assert complaint(capsys, *words(digits, out, *part)).endswith(": a link: remove it\n")
    assert secret.read_text() == "a line\nno line end"


DAMAGED = {
    "a list": "[1]",
    "no JSON": "no JSON",
    "no shard": '{"odd": [], "image_bytes": 3}',
    "another shard": '{"odd": [], "image_bytes": 3, "shard": {"colour": 3}}',
    "a number for oddities": '{"odd": 3, "image_bytes": 3, "shard": {}}',
    "a shard of a wrong kind": '{"odd": [], "image_bytes": 3, "shard": {"name": 3}}',
}


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_journal(line: str, digits: Path, tmp_path: Path, capsys: Capture) -> None:
    """It was a traceback."""
    out = tmp_path / "out"
    assert run(*words(digits, out, "--part", "1/2")) == 0
    journal = out / ".pack-1-of-2.jsonl"
    with journal.open("a") as file:
        file.write(f"{DAMAGED[line]}\n")
    said = complaint(capsys, *words(digits, out))
    assert said.endswith(f"{journal}: damaged: remove it\n")
