"""A pack that ended early goes on, and one in parts is joined, to the same bytes.

Ends at named points are exceptions in this process; one kill and one Ctrl-C are real.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Capture, run, shown
from tests.cuts import Killed
from tests.data.tars import Patch
from tests.errors import check, refused
from tests.tiers import tiered
from trainyard.data.storage.manifest import FILE_NAME
from trainyard.datasets.pack import pack, pool
from trainyard.datasets.pack.journal import Journal, Part, locked

JOURNAL = ".pack.jsonl"
FORMATS = ("webdataset", "hdf5", "folder", "packed", "parquet")
SHARDS = 96 + 25
FEW = ("--shard-samples", "100", "--processes", "1")  # 15 + 4 shards


def words(source: Path, destination: Path, *more: object, format: str = "webdataset") -> list[str]:
    given = ("data", "pack", source, destination, "--format", format, *more)
    return [str(word) for word in given]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def kill_at(point: str, patch: Patch, after: int = 0) -> None:
    """Ends a pack before a shard's rename, its line in the journal, the manifest or the end."""
    owner: Any = {"publish": pool, "add": Journal}.get(point, pack)
    real, calls = getattr(owner, point), 0

    def call(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Killed
        real(*given)

    patch.setattr(owner, point, call)


def pack_until(point: str, patch: Patch, arguments: list[str], after: int = 0) -> None:
    with patch.context() as inside, pytest.raises(Killed):
        kill_at(point, inside, after)
        run(*arguments)


OPTIONS = ("--shard-samples", "15", "--processes", "2")


def command(source: Path, destination: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "trainyard", *words(source, destination, *OPTIONS, *more)]


ELSEWHERE = {"publish": 2, "write_manifest": 0, "remove_journals": 0}
"""Points that no format has a part in, and the calls before the end."""


def complete(destination: Path) -> dict[Path, int]:
    """The shards in the journal, and when they were written."""
    lines = (destination / JOURNAL).read_text().splitlines()[1:]
    paths = [destination / json.loads(line)["shard"]["name"] for line in lines]
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.mark.parametrize("format", FORMATS)
def test_a_pack_that_ends_early_goes_on_to_the_same_bytes(
    format: str, digits: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Shards that are complete are not written again."""
    val = digits / "val"
    assert run(*words(val, tmp_path / "whole", *FEW, format=format)) == 0
    points = {"add": 2} | (ELSEWHERE if format == "webdataset" else {})
    for point, after in points.items():
        out = tmp_path / point
        again = words(val, out, *FEW, format=format)
        pack_until(point, monkeypatch, again, after)
        assert (out / FILE_NAME).exists() == (point == "remove_journals")
        before = complete(out)
        assert len(before) == (after or 4)
        assert run(*again) == 0
        assert before.items() <= {path: path.stat().st_mtime_ns for path in before}.items()
        assert tree(out) == tree(tmp_path / "whole")


def test_a_shard_that_is_gone_or_cut_short_is_written_again(
    digits: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    assert run(*words(digits, tmp_path / "whole", *FEW)) == 0
    pack_until("add", monkeypatch, words(digits, tmp_path / "out", *FEW), after=4)
    first, second, *_ = complete(tmp_path / "out")
    first.unlink()
    os.truncate(second, 100)
    with open(tmp_path / "out" / JOURNAL, "a") as file:
        file.write('{"shard": {"name": "torn')  # by a kill in the middle of a line
    assert run(*words(digits, tmp_path / "out", *FEW)) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


# --- real ends ---


@contextmanager
def packing(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A pack in a process group of its own, of which nothing may be left in the end."""
    process = subprocess.Popen(
        arguments,
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


@pytest.mark.slow
@pytest.mark.parametrize("end", tiered([signal.SIGKILL, signal.SIGINT], night=[signal.SIGKILL]))
def test_real_ends_leave_whole_shards_and_a_pack_that_goes_on(
    end: signal.Signals, digits: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(*words(digits, tmp_path / "whole", *OPTIONS)) == 0
    with packing(command(digits, out)) as process:
        wait_for_shards(process, out, 30)
        if end == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, end)  # to all of the group, as a terminal does
            assert process.wait(60) == 130
    found, whole = tree(out), tree(tmp_path / "whole")
    found.pop(JOURNAL)
    shards = {name: content for name, content in found.items() if not name.startswith(".")}
    assert len(shards) == len(found) or end == signal.SIGKILL
    assert 0 < len(shards) < SHARDS
    assert shards.items() <= whole.items()
    assert run(*words(digits, out, *OPTIONS)) == 0
    assert tree(out) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "code"),
    [
        ("webdataset", "pack.shard-unwritable"),
        ("hdf5", "pack.worker-died"),  # the HDF5 library crashes
    ],
)
def test_a_full_disk(digits: Path, tmp_path: Path, format: str, code: str) -> None:
    again = words(digits, tmp_path / "out", *FEW, format=format)
    assert run("data", "show", digits) == 0  # saves the index, which is larger than the limit
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash"]  # KiB that a file may have
    result = subprocess.run(
        [*limited, sys.executable, "-m", "trainyard", *again, "--json"],
        capture_output=True,
        text=True,
    )
    assert json.loads(result.stdout)["error"]["code"] == code, result.stderr
    assert result.stderr.count("\n") == 1
    assert set(tree(tmp_path / "out")) == {JOURNAL}
    assert run(*again) == 0
    assert run(*words(digits, tmp_path / "whole", *FEW, format=format)) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


# --- what is refused ---


@pytest.fixture
def changed(digits: Path, tmp_path: Path, monkeypatch: Patch) -> Callable[..., list[str]]:
    """The command of a pack that stopped at a sample that it could not read, with more options."""
    source = tmp_path / "source"
    shutil.copytree(digits, source)
    assert run("data", "index", source) == 0
    last = source / "val" / "9" / sorted(os.listdir(source / "val" / "9"))[-1]
    last.rename(tmp_path / "away.png")
    with monkeypatch.context() as patch:  # it went after the look at what has changed
        patch.setattr("trainyard.data.index.build.is_stale", lambda index: False)
        check(refused(*words(source, tmp_path / "out", *FEW)), "pack.sample-unreadable", path=last)
    (tmp_path / "away.png").rename(last)
    return lambda *more: words(source, tmp_path / "out", *FEW, *more)


def test_other_settings_and_a_changed_source_are_refused(
    changed: Callable[..., list[str]], tmp_path: Path
) -> None:
    """After an unreadable sample the rest goes on."""
    source, out = tmp_path / "source", tmp_path / "out"
    assert not [name for name in tree(out) if name.endswith(".part")]
    before = tree(out)
    settings = "pack.settings-differ"
    what = "an unfinished pack"
    check(refused(*changed("--seed", 3)), settings, what=what, changes="seed 0 instead of 3")
    name = "name 'imagenet' instead of 'digits'"
    check(refused(*changed("--name", "digits")), settings, changes=name)
    (source / "train" / "9" / "new.png").write_bytes(b"new")
    check(refused(*changed()), settings)
    (source / "train" / "9" / "new.png").unlink()
    assert tree(out) == before
    assert run(*changed()) == 0
    one = next((source / "train" / "0").iterdir())
    one.write_bytes(one.read_bytes() + b"longer")
    assert run("data", "index", source) == 0
    check(refused(*changed()), settings, changes="a source that has changed since")


def test_a_finished_data_set_with_a_shard_gone_is_not_called_finished(
    digits: Path, tmp_path: Path
) -> None:
    again = words(digits, tmp_path, *FEW, format="hdf5")
    assert run(*again) == 0
    gone = tmp_path / "imagenet-train-00003.h5"
    gone.unlink()
    check(refused(*again), "pack.shard-incomplete", path=gone)


# --- in parts, on machines that share a folder: the bytes of one machine ---


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack that one machine writes. Tests only read it."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert run(*words(digits, folder, *FEW)) == 0
    return folder


def pack_part(source: Path, destination: Path, *more: object) -> int:
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
        assert pack_part(digits, out, *more) == 0
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
    assert pack_part(digits, out, "--part", "2/2") == 0
    pack_until("add", monkeypatch, words(digits, out, *FEW, "--part", "1/2"), after=3)
    others = out / ".imagenet-train-000001.tar.0badcafe.part"
    others.write_bytes(b"of part 2, which is said to be at work again")
    lines = (out / ".pack-1-of-2.jsonl").read_text().splitlines()[1:]
    shards = {out / json.loads(line)["shard"]["name"] for line in lines}
    before = {path: time for path, time in times(out).items() if path in shards}
    assert len(before) == 3
    assert pack_part(digits, out, "--part", "1/2") == 0
    assert before.items() <= times(out).items()
    assert others.exists()
    assert pack_part(digits, out) == 0
    assert tree(out) == tree(whole)


def test_what_a_part_prints(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    part = words(digits, tmp_path, *FEW, "--part", "1/2", "--json")
    assert json.loads(shown(capsys, *part)) == {
        "destination": str(tmp_path),
        "part": "1/2",
        "samples": 897,
    }


def test_a_pack_of_one_machine_goes_on_in_parts_of_which_some_never_come(
    digits: Path, tmp_path: Path, whole: Path, monkeypatch: Patch
) -> None:
    """Whatever the number of parts. What is there stays as it is."""
    out = tmp_path / "out"
    pack_until("publish", monkeypatch, words(digits, out, *FEW), after=2)
    for part in ("2/3", "1/4"):
        assert pack_part(digits, out, "--part", part) == 0
    shards = times(out)
    assert 2 < len(shards) < 19
    assert pack_part(digits, out) == 0
    assert shards.items() <= times(out).items()
    assert tree(out) == tree(whole)


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "1/0", "-1/4", "a/b", "1/4/4"])
def test_wrong_parts(text: str, digits: Path, tmp_path: Path) -> None:
    error = refused(*words(digits, tmp_path / "out", f"--part={text}"))
    check(error, "option.invalid", command="trainyard data pack")
    assert not (tmp_path / "out").exists()


def test_parts_that_do_not_belong_together(digits: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(digits, source)
    assert pack_part(source, out, "--part", "1/2") == 0
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
