"""Streams: every sample once a pass, the same again when asked, and no silence when one breaks."""

import io
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import Capture
from tests.data.looks import opened
from tests.data.streams import ids_of, png, write_shards
from tests.data.tars import TAR_FORMATS, Patch, read_rows, write_tar
from tests.errors import raises
from tests.web import FaultyServer
from trainyard.data.config import DataConfig
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.device.join import StreamLoader
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.tar import SequentialReader
from trainyard.data.formats.webdataset import Streamed, streamed
from trainyard.data.stream.open_shard import open_shard
from trainyard.data.stream.shards import Stream, list_shards
from trainyard.data.stream.walk import Item, PassBatch, Room, StreamSpec, shards_of, shuffled, walk
from trainyard.errors import STOPS

SIZES = (3, 0, 7, 1, 40)
CLASSES = tuple("0123456789")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("shards"), SIZES)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: Patch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TRAINYARD_RETRY_S", "10")


def spec(location: str, **changes: Any) -> StreamSpec:
    config = DataConfig(train=location, order="join", samples=51)
    usual = StreamSpec(
        shards=list_shards(config),
        numbers=tuple(range(len(CLASSES))),
        seed=3,
        rank=0,
        size=1,
        share=4,
        first_pass=0,
        seen=0,
        num_passes=2,
        crop=RandomResizedCrop(seed=3, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0),
        image_size=16,
        interpolation="bilinear",
        threads=2,
    )
    return replace(usual, **changes)


def ids(batches: list[PassBatch], number: int) -> list[int]:
    return [item.id for batch in batches if batch.number == number for item in batch.items]


# --- the walk ---


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_sample_once_a_pass(shards: str, size: int) -> None:
    ranks = [list(walk(spec(shards, rank=rank, size=size))) for rank in range(size)]
    for number in (0, 1):
        seen = [ids(batches, number) for batches in ranks]
        assert sorted(chain(*seen)) == ids_of(SIZES)
        for rank, mine in enumerate(seen):
            assert {id_ >> 32 for id_ in mine} <= set(range(rank, len(SIZES), size))
    for batches in ranks:
        assert [batch.number for batch in batches if batch.is_last] == [0, 1]
        assert all(len(batch.items) == 4 for batch in batches if not batch.is_last)


def test_passes_differ_and_come_again_alike(shards: str) -> None:
    once, again = list(walk(spec(shards))), list(walk(spec(shards)))
    assert once == again
    assert ids(once, 0) != ids(once, 1)
    assert ids(once, 0) != ids(list(walk(spec(shards, seed=4))), 0)


def test_labels_are_those_that_names_replace(tmp_path: Path) -> None:
    """Label 0 was the first of the names beside the validation shards, in their sorted order."""
    names = ("dog", "ant", "cow")
    for split in ("train", "val"):
        members = []
        for number in range(3):
            tree = json.dumps({"label": number, "class_name": names[number]})
            members += [(f"{number}.jpg", b"%d" % number), (f"{number}.json", tree.encode())]
        write_tar(tmp_path / f"{split}-0.tar", members)
    data = opened(f"{tmp_path}/train-0.tar", f"{tmp_path}/val-0.tar", order="join", samples=3)
    assert isinstance(data.train, Stream)
    assert (data.train.classes, data.train.numbers) == (("ant", "cow", "dog"), (1, 2, 0))
    walked = walk(spec(f"{tmp_path}/train-0.tar", numbers=data.train.numbers, num_passes=1))
    found = {item.sample.image: item.sample.label for batch in walked for item in batch.items}
    assert found == {b"0": 2, b"1": 0, b"2": 1}
    assert [data.val.class_names(n) for n in range(3)] == [[name] for name in names]


@pytest.mark.parametrize("seen", [0, 1, 12, 13, 20])
def test_what_was_seen_is_passed_over(shards: str, seen: int) -> None:
    """51 samples are 12 batches of 4 and one of 3; beyond those nothing is left, and said so."""
    whole = list(walk(spec(shards)))
    first, second = whole[:13], whole[13:]
    rest = first[seen:] or [PassBatch(0, [], is_last=True)]
    assert list(walk(spec(shards, seen=seen))) == rest + second
    assert list(walk(spec(shards, first_pass=1))) == second


def test_shards_come_in_another_order_each_pass() -> None:
    orders = [shards_of(40, seed=0, number=number, rank=1, size=2) for number in range(3)]
    assert all(sorted(order) == list(range(1, 40, 2)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert shards_of(1, seed=0, number=0, rank=1, size=2) == []


def test_the_buffer_holds_back_no_more_than_it_may() -> None:
    """In samples, and in bytes; the order is a function of the samples alone."""
    out, held, _ = through_the_buffer([0] * 200, Room(20, 5))
    assert sorted(out) == list(range(200)) != out
    assert (held[0], max(held)) == (5, 20)
    room = Room(1000, 5, num_bytes=100)
    sizes = [1, 60, 30, 30, 1000, *[7] * 300]  # one sample may have more by itself
    out, _, held_bytes = through_the_buffer(sizes, room)
    assert through_the_buffer(sizes, room)[0] == out
    assert sorted(out) == list(range(len(sizes))) != out
    assert 90 < max(held_bytes) <= 100


def through_the_buffer(sizes: list[int], room: Room) -> tuple[list[int], list[int], list[int]]:
    """The order of samples of such sizes; samples held at each output, bytes at each input."""
    taken, num_bytes = 0, 0
    out: list[int] = []
    held: list[int] = []
    held_bytes: list[int] = []

    def items() -> Iterator[Item]:
        nonlocal taken, num_bytes
        for position, size in enumerate(sizes):
            held_bytes.append(num_bytes)
            taken, num_bytes = taken + 1, num_bytes + size
            yield Item(0, position, Streamed(str(position), 0, bytes(size), 0))

    for item in shuffled(items(), iter(np.random.default_rng(0).random, None), room):
        out.append(item.position)
        num_bytes -= len(item.sample.image)
        held.append(taken - len(out))
    return out, held, held_bytes


# --- tars that come once ---


@pytest.mark.parametrize("tar_format", TAR_FORMATS)
def test_a_stream_has_the_samples_of_an_index(tmp_path: Path, tar_format: int) -> None:
    members = []
    for number in range(5):
        key = f"{'long' * 30}/{number}" if tar_format else str(number)
        members += [(f"{key}.json", b'{"label": %d}' % number), (f"{key}.PNG", png(number))]
        members += [(f"{key}.txt", b"nothing" * 999)]
    path = write_tar(tmp_path / "x.tar", members, tar_format)
    with open(path, "rb") as file:
        found = list(streamed(SequentialReader("x", file), LeftOut()))
    assert [(sample.image, sample.label) for sample in found] == read_rows(path)
    content = path.read_bytes()
    assert all(content[sample.offset :].startswith(sample.image) for sample in found)


def test_a_stream_tells_what_all_its_shards_leave_out(tmp_path: Path, capsys: Capture) -> None:
    """The first shard at once, all of them after the first pass."""
    members = [(f"{key}.{kind}", b"1") for key in ("a", "b.0") for kind in ("cls", "png")]
    for name in ("x-0", "x-1", "x-2"):
        write_tar(tmp_path / f"{name}.tar", members if name != "x-0" else members[:2])
    batches = walk(spec(f"{tmp_path}/x-{{0..2}}.tar"))
    assert sum(len(batch.items) for batch in batches) == 2 * 3
    first, whole = capsys.readouterr().err.splitlines()
    assert "left out: 1 sample with a dot in the name" in first
    assert "left out of 3 shards: 2 samples with a dot in the name" in whole


def test_a_tar_that_is_cut_off_is_never_taken_for_whole(tmp_path: Path) -> None:
    content = write_tar(
        tmp_path / "x.tar", [("1.cls", b"1"), ("1.png", png(1)), ("2.png", png(2)), ("2.cls", b"1")]
    ).read_bytes()
    end = content.rindex(b"1" + bytes(511)) + 512  # behind the last label
    for length in (0, 100, 512, 1024, 1600, end - 1, end):
        with raises("tar.truncated", path="x"):
            list(streamed(SequentialReader("x", io.BytesIO(content[:length])), LeftOut()))
    assert (
        len(list(streamed(SequentialReader("x", io.BytesIO(content[: end + 512])), LeftOut()))) == 2
    )


def test_a_second_tar_behind_the_first_is_not_passed_over(tmp_path: Path) -> None:
    content = write_tar(tmp_path / "x.tar", [("1.cls", b"1"), ("1.png", png(1))]).read_bytes()
    with raises("tar.second-archive", path="x"):
        list(streamed(SequentialReader("x", io.BytesIO(content + content)), LeftOut()))


def test_a_size_that_cannot_be_is_not_waited_for(tmp_path: Path) -> None:
    content = bytearray(write_tar(tmp_path / "x.tar", [("1.png", b"")]).read_bytes())
    content[124:136] = b"%011o\0" % (1 << 32)
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    with raises("tar.damaged", reason="4,294,967,296 bytes are implausible"):
        list(streamed(SequentialReader("x", io.BytesIO(content)), LeftOut()))


@pytest.mark.parametrize(
    ("members", "code", "fields"),
    [
        ([("7.png", png(1))], "webdataset.incomplete-sample", {"sample": "7"}),
        ([("7.cls", b"1")], "webdataset.incomplete-sample", {"sample": "7"}),
        ([("7.png", png(1)), ("7.cls", b"many")], "webdataset.not-a-class-number", {"sample": "7"}),
        ([("7.png", png(1)), ("7.cls", b"10")], "stream.label-beyond-val", {"sample": "7"}),
    ],
)
def test_a_label_that_is_wrong_is_named(
    tmp_path: Path, members: list[tuple[str, bytes]], code: str, fields: dict[str, object]
) -> None:
    write_tar(tmp_path / "x.tar", members)
    with raises(code, **fields):
        list(walk(spec(f"{tmp_path}/x.tar")))


# --- pipes ---


def test_a_pipe_is_what_a_command_writes(shards: str) -> None:
    piped = list(walk(spec(f"pipe:cat < '{shards}' | cat")))
    assert piped == list(walk(spec(shards)))


@pytest.mark.parametrize("users_own", ["", "1"])
def test_a_script_in_a_pipe_imports_what_lies_beside_it(
    users_own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONSAFEPATH, which Trainyard sets for its own processes, was passed on to it."""
    monkeypatch.setenv("PYTHONSAFEPATH", users_own)
    (tmp_path / "beside.py").write_text("text = 'found'\n")
    (tmp_path / "script.py").write_text("import beside; print(beside.text)\n")
    script = f"pipe:'{sys.executable}' '{tmp_path}/script.py'"
    program = (
        "import sys; sys.argv = ['trainyard', 'recipes']\n"
        "from trainyard import __main__, command_line\n"
        "from trainyard.data.stream.open_shard import open_shard\n"
        f"location = {script!r}\n"
        "read = lambda: open_shard(location).read().decode()\n"
        "command_line.main = lambda: sys.stdout.write(read()) * 0\n"
        "__main__.command()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == ("" if users_own else "found\n")


@pytest.mark.parametrize(
    ("command", "code", "fields"),
    [
        ("false", "stream.pipe-failed", {"command": "pipe:false", "reason": "exit code 1"}),
        ("cat '{0}'; exit 3", "stream.pipe-failed", {"reason": "exit code 3"}),
        ("cat '{0}'; kill -9 $$", "stream.pipe-failed", {"reason": "signal 9"}),
        ("head -c 3000 '{0}'", "tar.truncated", {}),
        ("true", "tar.truncated", {"path": "pipe:true"}),
        ("no-such-command", "stream.pipe-failed", {"reason": "exit code 127"}),
    ],
)
def test_a_command_that_fails_is_named(
    shards: str, command: str, code: str, fields: dict[str, object]
) -> None:
    command = command.format(shards.replace("{000..004}", "004"))
    with raises(code, **fields):
        list(walk(spec(f"pipe:{command}")))


@pytest.mark.parametrize("end", ["closed", "killed", "trainer gone"])
def test_commands_end_with_who_reads_them(tmp_path: Path, end: str) -> None:
    """They write nothing, so they would never find out; and the shell that began them is gone."""
    note = tmp_path / "pid"
    loader = StreamLoader(spec(f"pipe:sleep 1000 & echo $! > '{note}'; wait"))
    command = os.pidfd_open(noted(note, loader))
    if end == "killed":
        loader._process.kill()
    if end == "trainer gone":
        loader._channel.close()
    else:
        loader.close()
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(command, select.POLLIN)
    assert poll.poll(20_000)
    os.close(command)
    loader._process.wait()


def noted(note: Path, loader: StreamLoader) -> int:
    """The process that a command writes down."""
    while not (note.exists() and note.read_text().endswith("\n")):
        assert loader._process.poll() is None
        time.sleep(0.01)
    return int(note.read_text())


# --- web servers ---


@pytest.fixture
def server(shards: str) -> Iterator[FaultyServer]:
    with FaultyServer(Path(shards).parent, has_ranges=False) as server:
        yield server


def test_a_server_without_ranges(server: FaultyServer, shards: str) -> None:
    remote = f"{server.url}/part-{{000..004}}.tar"
    assert list(walk(spec(remote))) == list(walk(spec(shards)))
    assert len(server.requests) == 2 * len(SIZES)


def test_a_transfer_that_breaks_is_begun_again(server: FaultyServer) -> None:
    server.faults = ["503", "cut", "cut", "500"]
    with open_shard(f"{server.url}/part-004.tar") as shard:
        whole = shard.read()
    assert len(server.requests) == 4 + 1
    with open_shard(f"{server.url}/part-004.tar") as shard:
        assert shard.read() == whole


@pytest.mark.parametrize("then", ["", "ranges", "unsized"])
def test_a_size_may_be_told_late(server: FaultyServer, shards: str, then: str) -> None:
    server.faults = ["chunked cut", then]
    with open_shard(f"{server.url}/part-004.tar") as shard:
        assert shard.read() == Path(shards.replace("{000..004}", "004")).read_bytes()
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("faults", "code", "fields"),
    [
        (["cut", "changed"], "storage.changed-while-read", {}),
        (["404"], "storage.failed", {"reason": "the server answers 404 Not Found"}),
        (["unsized cut"], "tar.truncated", {}),
        (["chunked cut", "cut", "longer"], "storage.changed-while-read", {}),
        (["cut"] * 9, "storage.gave-up", {"reason": "the transfer was interrupted"}),
    ],
)
def test_a_transfer_that_cannot_go_on_is_named(
    server: FaultyServer,
    faults: list[str],
    code: str,
    fields: dict[str, object],
    monkeypatch: Patch,
) -> None:
    server.faults = faults
    if len(faults) > 3:
        monkeypatch.setenv("TRAINYARD_RETRY_S", "0")
    with raises(code, **fields):
        list(walk(spec(f"{server.url}/part-004.tar")))


# --- the loader process ---


def test_the_loader_has_the_images(shards: str) -> None:
    config = spec(shards, num_passes=1)
    batch = next(walk(config))
    with StreamLoader(config) as loader:
        host, is_last = loader.take()
        assert not is_last
        assert host.ids.tolist() == [item.id for item in batch.items]
        assert host.labels.tolist() == [item.sample.label for item in batch.items]
        assert host.epochs.tolist() == [0] * 4
        assert host.weights.tolist() == [1] * 4
        for pixels, id_ in zip(host.images_BHWC, host.ids.tolist(), strict=True):
            number = (id_ >> 32) << 16 | id_ & 0xFFFF
            side = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
            assert np.array_equal(pixels, side)
        counts = [len(loader.take()[0].ids) for _ in range(12)]
    assert counts == [4] * 11 + [3]


def test_a_bad_image_is_named_by_shard_and_key(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("no.jpg", b"hello"), ("no.cls", b"1")])
    with StreamLoader(spec(str(path), num_passes=1)) as loader:
        host, is_last = loader.take()
    assert is_last
    assert host.weights.tolist() == [0]
    (bad,) = host.bad
    assert bad.file == str(path)
    assert path.read_bytes()[bad.offset :].startswith(b"hello")
    assert bad.reason == "sample 'no': not an image"


def test_an_error_comes_after_the_batches_before_it(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.png", png(1)), ("1.cls", b"1")])
    second = tmp_path / "second"
    once = f"pipe:test -e '{second}' && exit 1; touch '{second}'; cat '{path}'"
    with StreamLoader(spec(once, num_passes=3)) as loader:
        assert loader.take()[1]
        with raises("stream.pipe-failed", command=once, reason="exit code 1"):
            loader.take()


def test_signals_that_end_a_run_do_not_end_a_command(shards: str, tmp_path: Path) -> None:
    """A scheduler may send them to all processes; the trainer still wants its last batches."""
    shard, note, go = shards.replace("{000..004}", "004"), tmp_path / "pid", tmp_path / "go"
    wait = f"until test -e '{go}'; do sleep 0.01; done"
    with StreamLoader(
        spec(f"pipe:echo $$ > '{note}'; {wait}; cat '{shard}'", num_passes=1)
    ) as loader:
        shell = noted(note, loader)
        for number in STOPS:
            os.kill(shell, number)
        go.touch()
        assert len(loader.take()[0].ids) == 4


# --- what cannot be a stream ---


@pytest.mark.parametrize(
    ("keys", "code", "fields"),
    [
        ({"train": None}, "recipe.data-not-set", {"key": "data.train"}),
        ({"train": ("a", "b")}, "stream.several-locations", {}),
        ({"samples": None}, "stream.samples-not-set", {}),
        ({"locality": 9}, "stream.needs-index", {"key": "data.locality", "value": 9}),
        ({"repeats": 2}, "stream.needs-index", {"key": "data.repeats", "value": 2}),
        ({"weights": (2.0,)}, "stream.needs-index", {"key": "data.weights"}),
        ({"stage": "/tmp"}, "stream.needs-index", {"key": "data.stage", "value": "/tmp"}),
    ],
)
def test_keys_that_do_not_apply(keys: dict[str, Any], code: str, fields: dict[str, object]) -> None:
    usual: dict[str, Any] = {"train": "pipe:true", "order": "join", "samples": 1}
    with raises(code, **fields):
        list_shards(DataConfig(**usual | keys))


@pytest.mark.parametrize(
    ("location", "code", "fields"),
    [
        ("s3://bucket/x-{0..3}.tar", "stream.object-store", {}),
        ("/nowhere/x-{0..3}.tar", "data.not-found", {"path": "/nowhere/x-0.tar"}),
    ],
)
def test_places_that_are_none(location: str, code: str, fields: dict[str, object]) -> None:
    with raises(code, **fields):
        spec(location)


@pytest.mark.parametrize("name", ["train-1.tar.gz", "train-1.TAR"])
def test_a_shard_of_a_folder_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    for each in ("train-0.tar", name):
        (tmp_path / each).touch()
    config = DataConfig(train=str(tmp_path), order="join", samples=2)
    with raises("tar.passed-over", path=str(tmp_path / name)):
        list_shards(config)
