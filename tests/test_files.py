"""Files that are complete or absent, lines that survive a kill, and where the cache is."""

import errno
import hashlib
import json
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHORT, run
from tests.errors import check, raises
from tests.full_disk import full_disk
from trainyard.errors import DiskError, TrainyardError
from trainyard.files import (
    JsonLines,
    RunDirectory,
    atomic_write,
    cache_folder,
    disk_error,
    json_object,
    sha256,
    sole_write,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("old", [None, "old"])
def test_a_file_appears_only_when_complete(old: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if old:
        write_text(path, old)
    with atomic_write(path) as file:
        file.write(b"one")
        file.flush()
        assert path.read_text() == old if old else not path.exists()
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"half")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_file_that_one_process_writes_is_not_taken_from_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with sole_write(path) as file:
        file.write(b"one")
        with pytest.raises(BlockingIOError), sole_write(path):
            pass
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["file"]


def test_what_a_killed_process_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".file.part").write_bytes(b"half of it")
    with sole_write(tmp_path / "file") as file:
        file.write(b"all")
    assert (tmp_path / "file").read_bytes() == b"all"
    with pytest.raises(ValueError), sole_write(tmp_path / "file"):
        raise ValueError
    assert names(tmp_path) == ["file"]


def test_a_rename_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def refuse(source: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_content_is_on_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        done.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        fsync(fd)

    def watched_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_text(tmp_path / "file", "text")
    assert done == ["fsync .part", "rename", "fsync "]  # the last: the folder


def test_text_is_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "größe")
    assert (tmp_path / "file").read_bytes() == "größe".encode()


def test_sha256(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000  # longer than any buffer
    (tmp_path / "file").write_bytes(content)
    assert sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


# --- JSON lines ---


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    JsonLines(path)
    assert not path.exists()  # nothing to say yet
    JsonLines(path).append({"a": 1})
    lines = JsonLines(path)
    lines.append({"b": "ü\n"})
    assert read(path) == [{"a": 1}, {"b": "ü\n"}]
    lines.append({"c": [1.5, None]})
    assert read(path) == [{"a": 1}, {"b": "ü\n"}, {"c": [1.5, None]}]


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ('{"a": 1}\n{"b": ', [{"a": 1}]),
        ('{"a": 1}\n', [{"a": 1}]),
        ('{"a"', []),
        ("", []),
    ],
)
def test_a_line_that_a_kill_cut_short_is_dropped(
    found: str, kept: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(found)
    JsonLines(path).append({"new": 2})
    assert read(path) == [*kept, {"new": 2}]


def test_a_file_of_whole_lines_is_not_cut(tmp_path: Path) -> None:
    """The watchdog's thread opens it while the main thread may append: that line would go."""
    path = tmp_path / "lines.jsonl"
    JsonLines(path).append({"a": 1})
    os.utime(path, (1, 1))
    JsonLines(path)
    assert path.stat().st_mtime == 1


def test_a_long_file_of_lines_is_not_read_into_memory(tmp_path: Path) -> None:
    """A run with 1 GB of metrics needed as much memory to go on."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": "%s"}\n' % (b"a" * 1000) * 10_000 + b'{"b"')
    tracemalloc.start()
    JsonLines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size == 10_000 * 1010 and peak < 1e6


# --- places ---


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TRAINYARD_CACHE", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/trainyard")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert cache_folder() == Path("/scratch/cache/trainyard")
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a user number of its own: every command ended with a traceback."""
    for name in ("HOME", "XDG_CACHE_HOME", "TRAINYARD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with raises("file.no-home", user=54321):
        cache_folder()


def test_the_files_of_a_run_are_as_promised() -> None:
    run = RunDirectory(Path("runs/x"))
    assert [str(path) for path in (run.recipe, run.environment, run.metrics, run.quarantine)] == [
        "runs/x/recipe.toml",
        "runs/x/environment.json",
        "runs/x/metrics.jsonl",
        "runs/x/quarantine.jsonl",
    ]
    assert str(run.checkpoints) == "runs/x/checkpoints"


# --- a full disk ---


def test_a_full_disk_is_told_of_with_the_bytes_needed_and_free(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with full_disk(1000), pytest.raises(DiskError) as caught:
        write_text(path, "n" * 5000)
    assert "5,000 bytes" in str(caught.value)
    assert isinstance(caught.value, TrainyardError | OSError)
    assert (caught.value.exit_code, caught.value.errno) == (1, errno.EFBIG)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_of_a_file_of_unknown_size_it_is_told_how_much_was_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with full_disk(1000), raises("disk.full", path=path), atomic_write(path) as file:
        file.write(bytes(5000))
    assert names(tmp_path) == []


def test_a_line_for_which_there_is_no_room_leaves_none(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines")
    lines.append({"step": 1})
    with full_disk(20), raises("disk.full", path=tmp_path / "lines"):
        lines.append({"step": 2, "message": "no room"})
    assert (tmp_path / "lines").read_text() == '{"step": 1}\n'
    lines.append({"step": 2})
    assert (tmp_path / "lines").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_device_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "lines")
    monkeypatch.setattr("trainyard.files.open_own", lambda _, flags: os.open("/dev/full", flags))
    with raises("disk.full", path=tmp_path / "lines"):
        lines.append({"step": 1})


def test_a_read_only_disk(tmp_path: Path) -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "part"))
    found = disk_error(error, tmp_path / "a")
    assert found is not None
    check(found, "disk.read-only", path=tmp_path / "a")


def test_other_errors_are_not_those_of_a_disk(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    hidden = RuntimeError("unexpected pos 1")
    hidden.__context__ = full
    rust = ValueError("I/O error: No space left on device (os error 28)")
    assert all(disk_error(error, tmp_path) for error in (full, hidden, rust))
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert disk_error(denied, tmp_path) is None
    assert disk_error(ValueError("(os error 13)"), tmp_path) is None
    with pytest.raises(PermissionError) as caught, atomic_write(tmp_path / "file"):
        raise denied
    assert caught.value is denied


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_all_files_of_a_run_have_the_mode_that_the_umask_says(
    umask: int, digits: Path, tmp_path: Path
) -> None:
    """Weights were the owner's alone and the lock never the group's, who could not go on."""
    where = ("--data", digits, "--run", tmp_path / "run")
    before = os.umask(umask)
    try:
        assert run("train", "debug", *where, *SHORT, "--model.ema_decay", "0.9", "--quiet") == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}
    assert {"model.safetensors", "ema.safetensors", ".lock", "report.html"} <= modes.keys()
    assert {*modes.values()} == {0o666 & ~umask}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_of_json_that_is_not_finite_is_missing(number: str) -> None:
    assert json_object(f'{{"a": [{number}, 1.5, -2]}}') == {"a": [None, 1.5, -2]}


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 20, "9" * 5000, "1e101", "-1e308"])
def test_a_number_of_json_that_no_run_has_is_refused(number: str) -> None:
    with pytest.raises(ValueError):
        json_object(f'{{"a": {{"b": {number}}}}}')
