"""A pack that was killed, interrupted or ran out of space goes on, and ends with the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.command_line import Capture, complaint, run
from trainyard.data.storage.manifest import FILE_NAME

pytestmark = pytest.mark.slow

OPTIONS = ("--shard-samples", "15", "--workers", "2")
SHARDS = 96 + 25
JOURNAL = ".pack.jsonl"


def command(source: Path, destination: Path, format: str, *more: str) -> list[str]:
    words = [sys.executable, "-m", "trainyard", "data", "pack", str(source), str(destination)]
    return [*words, "--format", format, *OPTIONS, *more]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def undisturbed(
    digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, bytes]]:
    """What a pack that nothing happens to writes, by format."""
    trees: dict[str, dict[str, bytes]] = {}

    def get(format: str) -> dict[str, bytes]:
        if format not in trees:
            folder = tmp_path_factory.mktemp("undisturbed") / "out"
            subprocess.run(command(digits, folder, format), check=True, stdout=subprocess.DEVNULL)
            trees[format] = tree(folder)
        return trees[format]

    return get


@contextmanager
def packing(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A pack in a process group of its own, of which nothing may be left in the end."""
    process = subprocess.Popen(
        words,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        process.wait(60)
        assert ends(process.pid), "a process outlives the command"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ends(group: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def wait_for_shards(process: subprocess.Popen[str], destination: Path, count: int) -> None:
    """Until the journal names so many, or the command has ended."""
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if (destination / JOURNAL).read_bytes().count(b"\n") > count:
                return
        time.sleep(0.002)


@pytest.mark.parametrize("format", ["webdataset", "hdf5", "folder"])
def test_kills_do_not_change_what_is_written(
    digits: Path, tmp_path: Path, undisturbed: Callable[[str], dict[str, bytes]], format: str
) -> None:
    expected = undisturbed(format)
    destination = tmp_path / "out"
    moments = random.Random(format)
    seen = []
    for count in (0, 25, 70):
        with packing(command(digits, destination, format)) as process:
            wait_for_shards(process, destination, count)
            time.sleep(moments.uniform(0, 0.02))
            process.kill()
        assert (destination / JOURNAL).exists(), "killed too late to show anything"
        assert not (destination / FILE_NAME).exists()
        seen.append((destination / JOURNAL).read_bytes().count(b"\n"))
    assert seen == sorted(seen) and seen[-1] > seen[0]  # each went on from the one before
    subprocess.run(command(digits, destination, format), check=True, stdout=subprocess.DEVNULL)
    assert tree(destination) == expected


def test_a_kill_at_the_very_end_changes_nothing(
    digits: Path, tmp_path: Path, undisturbed: Callable[[str], dict[str, bytes]]
) -> None:
    expected = undisturbed("webdataset")
    manifest = json.loads(expected[FILE_NAME])
    lines = [{"plan": manifest["about"]["plan"], "settings": manifest["about"]}]
    for name, content in expected.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = (tmp_path / "imagenet-train-000000.tar").stat().st_mtime_ns
    subprocess.run(command(digits, tmp_path, "webdataset"), check=True, stdout=subprocess.DEVNULL)
    assert tree(tmp_path) == expected
    assert (tmp_path / "imagenet-train-000000.tar").stat().st_mtime_ns == before


def test_what_is_complete_is_not_written_again(digits: Path, tmp_path: Path) -> None:
    with packing(command(digits, tmp_path, "webdataset")) as process:
        wait_for_shards(process, tmp_path, 40)
        process.kill()
    journal = (tmp_path / JOURNAL).read_text().splitlines()[1:]
    names = [json.loads(line)["shard"]["name"] for line in journal]
    assert 40 <= len(names) < SHARDS
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in names}
    subprocess.run(command(digits, tmp_path, "webdataset"), check=True, stdout=subprocess.DEVNULL)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in names} == times


def test_a_shard_that_is_gone_or_cut_short_is_written_again(
    digits: Path, tmp_path: Path, undisturbed: Callable[[str], dict[str, bytes]]
) -> None:
    with packing(command(digits, tmp_path, "webdataset")) as process:
        wait_for_shards(process, tmp_path, 40)
        process.kill()
    journal = (tmp_path / JOURNAL).read_text().splitlines()[1:]
    first, second, *_ = (tmp_path / json.loads(line)["shard"]["name"] for line in journal)
    first.unlink()
    os.truncate(second, 100)
    with open(tmp_path / JOURNAL, "a") as file:
        file.write('{"shard": {"name": "torn')  # by a kill in the middle of a line
    subprocess.run(command(digits, tmp_path, "webdataset"), check=True, stdout=subprocess.DEVNULL)
    assert tree(tmp_path) == undisturbed("webdataset")


@pytest.mark.parametrize("format", ["webdataset", "hdf5", "folder"])
def test_ctrl_c_leaves_nothing_half_written(
    digits: Path, tmp_path: Path, undisturbed: Callable[[str], dict[str, bytes]], format: str
) -> None:
    expected = undisturbed(format)
    with packing(command(digits, tmp_path, format)) as process:
        wait_for_shards(process, tmp_path, 30)
        os.killpg(process.pid, signal.SIGINT)  # to all of the group, as a terminal does
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "trainyard: interrupted\n"
    found = tree(tmp_path)
    found.pop(JOURNAL)
    assert 0 < len(found) < len(expected)
    assert found.items() <= expected.items()
    subprocess.run(command(digits, tmp_path, format), check=True, stdout=subprocess.DEVNULL)
    assert tree(tmp_path) == expected


def test_two_at_once(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("data", "pack", digits, tmp_path, "--format", "webdataset", *OPTIONS)
    with packing(command(digits, tmp_path, "webdataset")) as process:
        wait_for_shards(process, tmp_path, 5)
        process.send_signal(signal.SIGSTOP)
        assert "another process is packing into it" in complaint(capsys, *words)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0
    assert len([name for name in tree(tmp_path) if name.endswith(".tar")]) == SHARDS


@pytest.mark.parametrize(
    ("format", "code", "words"),
    [
        ("webdataset", 2, "cannot be written (File too large: "),
        ("hdf5", 1, "perhaps out of memory or disk space"),  # the HDF5 library crashes
    ],
)
def test_a_full_disk(digits: Path, tmp_path: Path, format: str, code: int, words: str) -> None:
    size = ("--shard-samples", "100")
    subprocess.run(command(digits, tmp_path / "whole", format, *size), check=True)
    again = command(digits, tmp_path / "out", format, *size)
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *again]  # KiB that a file may have
    result = subprocess.run(limited, capture_output=True, text=True)
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert set(tree(tmp_path / "out")) == {JOURNAL}
    subprocess.run(again, check=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


# --- what is refused ---


@pytest.fixture
def unfinished(digits: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A source, and a destination at which a pack of it stopped at a sample it could not read."""
    source = tmp_path / "source"
    shutil.copytree(digits, source)
    assert run("data", "index", source) == 0
    last = source / "val" / "9" / sorted(os.listdir(source / "val" / "9"))[-1]
    with packing(command(source, tmp_path / "out", "webdataset")) as process:
        wait_for_shards(process, tmp_path / "out", 5)
        last.rename(tmp_path / "away.png")  # after the look at what has changed
        assert process.wait(60) == 2
        assert process.stderr is not None
        said = process.stderr.read()
    (tmp_path / "away.png").rename(last)
    assert str(last) in said
    assert "cannot be read" in said
    assert said.count("\n") == 1
    return source, tmp_path / "out"


def test_an_unreadable_sample_is_named_and_the_rest_goes_on(
    unfinished: tuple[Path, Path],
) -> None:
    source, destination = unfinished
    assert not [name for name in tree(destination) if name.endswith(".part")]
    subprocess.run(command(source, destination, "webdataset"), check=True)
    assert (destination / FILE_NAME).exists()


def test_other_settings_and_a_changed_source_are_refused(
    unfinished: tuple[Path, Path], capsys: Capture
) -> None:
    source, destination = unfinished
    before = tree(destination)
    words = ("data", "pack", source, destination, "--format", "webdataset", *OPTIONS)
    said = complaint(capsys, *words, "--seed", 3)
    assert "holds an unfinished pack made with seed 0 instead of 3" in said
    said = complaint(capsys, *words, "--name", "digits")
    assert "name 'imagenet' instead of 'digits'" in said
    (source / "train" / "9" / "new.png").write_bytes(b"new")
    assert "samples" in complaint(capsys, *words)
    (source / "train" / "9" / "new.png").unlink()
    one = next((source / "train" / "0").iterdir())
    one.write_bytes(one.read_bytes() + b"longer")
    assert run("data", "index", source) == 0
    assert "a source that has changed since" in complaint(capsys, *words)
    assert tree(destination) == before


def test_a_finished_data_set_with_a_shard_gone_is_not_called_finished(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ("data", "pack", digits, tmp_path, "--format", "hdf5", *OPTIONS)
    assert run(*words) == 0
    (tmp_path / "imagenet-train-00003.h5").unlink()
    assert "imagenet-train-00003.h5: is missing" in complaint(capsys, *words)
