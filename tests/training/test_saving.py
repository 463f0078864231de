"""Checkpoints are written beside training: as of their step, one at a time, and never half."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.command_line import newest
from tests.errors import raises
from tests.runs import assert_same_end, command, ended, events, exit_code, words
from tests.spawn import spawn
from tests.steps import save_checkpoint
from tests.training.test_checkpoint import backward, state_at
from trainyard.config import load_recipe
from trainyard.errors import TrainyardError
from trainyard.files import sha256
from trainyard.training import saver as saving
from trainyard.training.checkpoint import find_problem, load_checkpoint, read_progress
from trainyard.training.saver import HostCopies, Saver, Snapshot
from trainyard.training.stop import StopSignal
from trainyard.world import World


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No checkpoint is written before it is set."""
    opened, begin = threading.Event(), saving.begin

    def wait_and_begin(final: Path) -> Path:
        assert opened.wait(60)
        return begin(final)

    monkeypatch.setattr(saving, "begin", wait_and_begin)
    return opened


def saver_of(folder: Path, **options: Any) -> Saver:
    return Saver(folder, World(), keep=9, **options)


def files(path: Path) -> dict[str, str]:
    """The checksums of all but the clock's."""
    timed = ("progress.json", "manifest.json")
    return {file.name: sha256(file) for file in path.iterdir() if file.name not in timed}


# --- what is written ---


def test_a_checkpoint_is_of_the_step_at_which_it_was_asked_for(
    tmp_path: Path, gate: threading.Event
) -> None:
    """Though weights, moments and average are others by the time they are written."""
    gate.set()
    at_once = save_checkpoint(state_at(1, emas=["ema"]), tmp_path / "at once", keep=9)
    gate.clear()
    state = state_at(1, emas=["ema"])
    with saver_of(tmp_path / "beside") as saver:
        saver.save(state)
        backward(state.model)
        state.optimizer.step()
        for tensor in state.emas["ema"].state_dict().values():
            tensor.zero_()
        state.step, state.last = 2, {"step": 2, "top1": 0.5}
        assert not (tmp_path / "beside").exists()
        gate.set()
        saver.wait()
    assert files(tmp_path / "beside" / at_once.name) == files(at_once)
    progress = read_progress(tmp_path / "beside" / at_once.name)
    assert (progress["step"], progress["last"]) == (1, {})
    assert (tmp_path / "beside" / "latest").resolve().name == at_once.name


def test_memory_is_used_again_and_layouts_stay(tmp_path: Path) -> None:
    state = state_at(1)
    with saver_of(tmp_path) as saver:
        saver.save(state)
        saver.wait()
        buffers = [tensor.data_ptr() for tensor in saver._copies._buffers]
        state.step = 2
        saver.save(state)
        saver.wait()
        assert [tensor.data_ptr() for tensor in saver._copies._buffers] == buffers
    loaded = state_at(5, seed=1)
    load_checkpoint(loaded, tmp_path / "step-00000002")
    moments = [own["momentum_buffer"] for own in loaded.optimizer.state.values()]
    ours = [own["momentum_buffer"] for own in state.optimizer.state.values()]
    assert [m.stride() for m in moments] == [m.stride() for m in ours]
    assert all(map(torch.equal, moments, ours))


def test_copies_share_nothing_with_what_they_are_of() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    given = {"a": [tensor, (tensor.t(), 7)], "b": torch.tensor(3.5), "c": "text"}
    copies = HostCopies()
    made = copies(given)
    tensor.zero_()
    assert torch.equal(made["a"][0], torch.arange(6.0).view(2, 3))
    assert torch.equal(made["a"][1][0], torch.arange(6.0).view(2, 3).t())
    assert (made["a"][1][1], float(made["b"]), made["c"]) == (7, 3.5, "text")


def test_other_shapes_get_other_memory() -> None:
    copies = HostCopies()
    first = copies([torch.ones(2), torch.ones(3)])
    copies.begin()
    second = copies([torch.ones(2), torch.ones(4), torch.ones(5)])
    assert second[0].data_ptr() == first[0].data_ptr()
    assert [len(tensor) for tensor in second] == [2, 4, 5]
    copies.begin()
    copies([torch.ones(2)])
    copies.begin()
    assert len(copies._buffers) == 1


# --- one at a time ---


def test_the_next_save_waits_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most, finish = [0], [0], saving.finish

    def slow(*arguments: Any, **options: Any) -> None:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.2)
        finish(*arguments, **options)
        under_way[0] -= 1

    monkeypatch.setattr(saving, "finish", slow)
    with saver_of(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step))
    assert most == [1]
    assert find_problem(tmp_path / "step-00000003") is None  # leaving waits as well


def _messages(world: World, folder: Path) -> int:
    """The collectives of the second of two saves, on this rank."""
    real, sent = dist.all_gather_object, 0

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal sent
        sent += 1
        real(*arguments, **options)

    with Saver(folder, world, keep=1) as saver:
        saver.save(state_at(1))
        dist.all_gather_object = counted
        saver.save(state_at(2))
        dist.all_gather_object = real
    return sent


def test_ranks_agree_once_on_a_save(tmp_path: Path) -> None:
    """They waited for the last one twice, and agreed three times."""
    assert spawn(_messages, 2, tmp_path) == [1, 1]


# --- failures ---


def test_a_failure_is_told_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "write_files", no_room)
    with saver_of(tmp_path) as saver, StopSignal(World(), saver=saver) as stop:
        assert stop.poll() is None
        saver.save(state_at(1))
        assert saver._thread is not None
        saver._thread.join()
        with raises("disk.full", path=tmp_path / "step-00000001"):
            stop.poll()
        assert stop.poll() is None
    assert list(tmp_path.glob("*")) == []


def no_room(*arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save_without_room(world: World, folder: Path) -> tuple[str, int]:
    """The error's code on a rank if the first one cannot write a checkpoint, and when it comes."""
    if world.is_first:
        vars(saving)["write_files"] = no_room
    saver = Saver(folder, world, keep=1)
    polls = 0
    with saver as saver, StopSignal(world, saver=saver) as stop:
        saver.save(state_at(1))
        try:
            while polls < 1000:
                polls += 1
                stop.poll()
                time.sleep(0.005 * world.rank)
        except TrainyardError as error:
            return error.code, polls
    return "", polls


def test_all_ranks_hear_of_a_failure_after_the_same_step(tmp_path: Path) -> None:
    codes, polls = zip(*spawn(_save_without_room, 3, tmp_path / "checkpoints"), strict=True)
    assert len(set(polls)) == 1
    assert codes == ("disk.full", "rank.failed", "rank.failed")
    assert list((tmp_path / "checkpoints").glob("*")) == []


# --- by the time ---


def test_a_checkpoint_is_due_by_the_first_rank_s_clock(tmp_path: Path) -> None:
    saver, by_steps = saver_of(tmp_path, every_s=0.3), saver_of(tmp_path)
    other = Saver(tmp_path, World(rank=1, size=2), keep=1, every_s=0.001)
    overdue = [saver.is_overdue]
    time.sleep(0.3)
    overdue.append(saver.is_overdue)
    with saver:
        saver.save(state_at(1))
        overdue.append(saver.is_overdue)
    assert overdue == [False, True, False]
    assert not other.is_overdue
    assert not by_steps.is_overdue


def _saves(world: World, lag: int, folder: Path) -> tuple[list[int], float]:
    """The steps, 10 ms each or more, at which ranks with clocks of their own save every 100 ms.

    And the seconds of all steps.
    """
    saver, saved, began = Saver(folder, world, keep=1, every_s=0.1), [], time.monotonic()
    with saver, StopSignal(world, lag, saver) as stop:
        for step in range(100):
            time.sleep(0.01)
            stop.poll()
            if stop.due(step):
                saver._started_s = time.monotonic()
                stop.saved()
                saved.append(step)
    return saved, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 8])
def test_all_ranks_save_after_the_same_step(lag: int, tmp_path: Path) -> None:
    (first, first_s), (second, _) = spawn(_saves, 2, lag, tmp_path)
    assert first == second
    assert 4 <= len(first) <= first_s / 0.1 + 1
    assert min(b - a for a, b in pairwise(first)) > lag


# --- ends ---

SECOND_INTERRUPT = """
import io, threading, time, torch
from trainyard.command_line import end
from trainyard.files import WRITER

class Slow(io.BytesIO):
    def write(self, content):
        time.sleep(0.05)
        return super().write(content)

state = {f"{number}": torch.ones(1000) for number in range(1000)}
threading.Thread(target=torch.save, args=(state, Slow()), name=WRITER, daemon=True).start()
time.sleep(0.5)
end(130)
"""


@pytest.mark.slow
def test_a_second_interrupt_while_a_checkpoint_is_written_ends_with_its_code() -> None:
    """The interpreter must not be taken down under a thread that is inside torch."""
    ended = subprocess.run([sys.executable, "-c", SECOND_INTERRUPT], timeout=60, check=False)
    assert ended.returncode == 130


def test_the_newest_end_of_a_pass_is_kept(tmp_path: Path) -> None:
    """Though the steps of the run and those of its stream differ after going back."""
    for step, seen in ((3, 0), (4, 64), (5, 128), (6, 192)):
        state = state_at(step)
        state.stream = {"ends": [2], "seen": seen}
        save_checkpoint(state, tmp_path, keep=1)
    assert {path.name[-1] for path in tmp_path.glob("step-*")} == {"3", "6"}


# --- whole runs ---


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(digits: Path, tmp_path: Path) -> None:
    """The first one is not written before step 7 is made, and is of step 5."""
    folder = tmp_path / "run"
    assert ended(_wait_for_step_7, words(digits, folder)) == 0
    notes = json.loads((folder / "notes.json").read_text())
    assert notes == {"written": 5, "during": True}
    assert find_problem(folder / "checkpoints" / "step-00000024") is None


def _wait_for_step_7(arguments: list[str]) -> None:
    folder, write = Path(arguments[arguments.index("--run") + 1]), saving.write_checkpoint

    def late(taken: Snapshot, *others: Any, **options: Any) -> None:
        if taken.step == 5:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not has_step_7(folder):
                time.sleep(0.01)
            notes = {"written": taken.step, "during": has_step_7(folder)}
            (folder / "notes.json").write_text(json.dumps(notes))
        write(taken, *others, **options)

    vars(saving)["write_checkpoint"] = late
    command(arguments)


def has_step_7(folder: Path) -> bool:
    return '"step": 7,' in (folder / "metrics.jsonl").read_text()


def _write_slowly_and_stop(arguments: list[str]) -> None:
    write = vars(saving)["write_files"]

    def slow(*others: Any) -> Any:
        time.sleep(1)
        return write(*others)

    vars(saving)["write_files"] = slow
    command(arguments, stop_at=7, number=signal.SIGTERM)


@pytest.mark.slow
def test_a_stop_waits_for_the_checkpoint(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert ended(_write_slowly_and_stop, words(digits, folder)) == 130
    assert newest(folder).name == "step-00000007"
    assert find_problem(newest(folder)) is None
    assert list((folder / "checkpoints").glob(".*")) == []


@pytest.mark.slow
def test_a_run_that_saves_by_the_time_ends_as_one_by_steps(digits: Path, tmp_path: Path) -> None:
    by_time = {"run.save_every": "0.2 seconds", "run.eval_every": "8 steps"}
    assert exit_code(words(digits, tmp_path / "steps")) == 0
    folder = tmp_path / "time"
    arguments = words(digits, folder, by_time)
    assert exit_code(arguments, stop_at=17, number=signal.SIGKILL) == -signal.SIGKILL
    assert exit_code(arguments) == 0
    (resumed,) = events(folder, "resumed")
    assert 0 < resumed["step"] < 17
    assert_same_end(folder, tmp_path / "steps")


@pytest.mark.parametrize("text", ["10 moons", "0 minutes", "minutes"])
def test_intervals_that_make_no_sense(text: str) -> None:
    with raises("recipe.invalid-value", key="run.save_every", value=f'"{text}"'):
        load_recipe("digits", {"run.save_every": text})
