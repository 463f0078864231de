"""A rank dies: the others notice and name it, and the same command resumes from a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.command_line import newest, run
from tests.runs import assert_same_end
from tests.spawn import launch
from tests.test_cli_signals import has_saved
from tests.tiers import tiered
from trainyard.averaging.allreduce import AllReduce
from trainyard.command_line import end
from trainyard.distributed import Watchdog, init_distributed
from trainyard.distributed.process_info import ProcessInfo
from trainyard.errors import LoaderError
from trainyard.training import saver
from trainyard.training.checkpoint import find_problem
from trainyard.training.update import Update, Updated
from trainyard.world import World

pytestmark = pytest.mark.slow

SIZE, NUM_STEPS = 3, 8
AT = 4  # the step, counted from 0, in which a rank is lost
MESSAGE = 2**24  # float32: no socket takes as much at once
SAVED = "step-00000003"
OPTIONS = {
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "3 steps",
    "run.eval_every": "0 steps",
    "run.log_every": "1 step",
    "batch.size": "16",
    "data.threads": "1",
}


# --- noticing ---


def _wait_for_each_other(world: World) -> None:
    """The last rank dies while each of the others waits for another one than that."""
    with init_distributed(world):
        survivors = range(world.size - 1)
        pairs = [[rank, (rank + 1) % len(survivors)] for rank in survivors]
        groups: list[Any] = [dist.new_group(pair) for pair in pairs]
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1), group=groups[world.rank])


def test_those_who_wait_for_each_other_end_too() -> None:
    assert launch(_wait_for_each_other, 4) == [1, 1, 1, -signal.SIGKILL]


def _fail(world: World, error: type[Exception]) -> None:
    with init_distributed(world):
        if world.rank == 1:
            raise error("of its own")
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("error", [KeyError, RuntimeError])
def test_an_error_of_one_ends_all(error: type[Exception]) -> None:
    assert launch(_fail, 3, error) == [1, 1, 1]


SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""


@pytest.mark.night
def test_closing_does_not_wait_for_a_store_that_is_stopped() -> None:
    """It took the 300 s of the store."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout
            port = int(server.stdout.readline())
            store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
            watchdog = Watchdog(store, World(1, 2), {0: ProcessInfo.current()})
            server.send_signal(signal.SIGSTOP)
            time.sleep(2)  # for a beat that waits for an answer
            closing = threading.Thread(target=watchdog.close, daemon=True)
            closing.start()
            closing.join(60)
            assert not closing.is_alive()
        finally:
            server.kill()


def test_no_thread_is_inside_torch_after_the_end() -> None:
    """Python's end aborted the process at times, where messages to the store took a while."""
    is_asked = threading.Event()

    class Slow(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            is_asked.set()
            time.sleep(1)
            return super().check(keys)

    watchdog = Watchdog(Slow(), World(1, 2))
    assert is_asked.wait(30)
    watchdog.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "beat"]


def _leave(world: World) -> None:
    with init_distributed(world) as watchdog:
        if world.rank:
            watchdog.close()
        time.sleep(3)
        dist.barrier()


def test_leaving_is_not_dying() -> None:
    assert launch(_leave, SIZE) == [0] * SIZE


def _die_at(message: torch.Tensor) -> None:
    """In another thread: when some of a message has come."""

    def die() -> None:
        while not message[0]:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


# --- saving ---


def train(
    world: World, folder: Path, words: list[str], victim: int | None = None, how: str = ""
) -> None:
    """`trainyard train`, in which the victim ends once all ranks are to make the update AT."""
    os.dup2(os.open(folder.with_name(f"said-{world.rank}"), os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    update = Update.__call__

    def update_or_end(self: Update, step: int, *others: Any, **named: Any) -> Updated:
        if step == AT and victim is not None:
            folder.with_name(f"is-there-{world.rank}").touch()
            while world.rank == victim and not (are_all_there(folder) and has_saved(folder)):
                time.sleep(0.01)
            if world.rank == victim and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == victim:
                raise LoaderError("pack.no-samples", split="train")
        return update(self, step, *others, **named)

    if how == "in the midst of a message":
        _cut_short(world, victim)
    elif how == "while a checkpoint is written":
        _write_slowly(world, folder, victim)
    else:
        Update.__call__ = update_or_end  # type: ignore[method-assign]
    end(run(*words))


def _write_slowly(world: World, folder: Path, victim: int | None) -> None:
    """The first rank's checkpoint takes seconds: another rank is lost, a launcher sends SIGTERM."""
    write, update = vars(saver)["write_files"], Update.__call__

    def slow(*arguments: Any) -> Any:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)
        return write(*arguments)

    def update_or_end(self: Update, step: int, *others: Any, **named: Any) -> Updated:
        if step == AT and world.rank == victim:
            while not [*folder.glob("checkpoints/.step-*")]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, step, *others, **named)

    vars(saver)["write_files"] = slow
    Update.__call__ = update_or_end  # type: ignore[method-assign]


def are_all_there(folder: Path) -> bool:
    return len([*folder.parent.glob("is-there-*")]) == SIZE


def _cut_short(world: World, victim: int | None) -> None:
    """While the ranks compute the gradient of step AT, one has begun to send something to another.

    Which dies when some of it has come. Gloo never tells the sender.
    """
    divisor, steps = AllReduce.divisor, count()
    message = torch.zeros(MESSAGE)

    def and_message(found: Callable[[], torch.Tensor]) -> torch.Tensor:
        if world.rank == victim:
            _die_at(message)
            dist.recv(message, 0)
        elif world.is_first:
            dist.send(message + 1, victim)
        return found()

    def divisor_and_message(self: AllReduce, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
        found = divisor(self, weight)
        return partial(and_message, found) if next(steps) == AT else found

    AllReduce.divisor = divisor_and_message  # type: ignore[method-assign]


def words_of(digits: Path, folder: Path, **average: str) -> list[str]:
    options = OPTIONS | {f"average.{key}": value for key, value in average.items()}
    keys = [word for key, value in options.items() for word in (f"--{key}", value)]
    return ["train", "debug", "--data", str(digits), "--run", str(folder), *keys]


def said(folder: Path, rank: int) -> list[str]:
    """The errors that a rank printed."""
    lines = folder.with_name(f"said-{rank}").read_text().splitlines()
    return [line.removeprefix("trainyard: ") for line in lines if line.startswith("trainyard: ")]


def lose(folder: Path, words: list[str], victim: int, how: str = "killed") -> None:
    """Train until a rank ends. One of the others names it, and a checkpoint that is whole."""
    ends = launch(train, SIZE, folder, words, victim, how)
    has_error = how == "an error of its own"
    assert ends.pop(victim) == (1 if has_error else -signal.SIGKILL)
    assert ends == [1] * (SIZE - 1)
    assert len(said(folder, victim)) == has_error
    (message,) = [line for rank in range(SIZE) if rank != victim for line in said(folder, rank)]
    report = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (report["event"], report["message"]) == ("rank gone", message)
    assert message.startswith(f"rank {victim} ({os.uname().nodename}, process ")
    assert newest(folder).name in message
    assert find_problem(newest(folder)) is None


def test_a_run_that_loses_a_rank_ends_as_one_that_does_not(digits: Path, tmp_path: Path) -> None:
    """A real kill -9, and the same command again: equal weights, and a line for each step."""
    undisturbed, disturbed = tmp_path / "undisturbed" / "run", tmp_path / "disturbed" / "run"
    for folder in (undisturbed, disturbed):
        folder.parent.mkdir()
    assert launch(train, SIZE, undisturbed, words_of(digits, undisturbed)) == [0] * SIZE
    words = words_of(digits, disturbed)
    lose(disturbed, words, victim=2)
    assert newest(disturbed).name == SAVED
    assert launch(train, SIZE, disturbed, words) == [0] * SIZE
    assert_same_end(disturbed, undisturbed, NUM_STEPS)
    assert not list(disturbed.glob("checkpoints/.*"))


def test_an_error_of_one_rank_ends_the_others(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lose(folder, words_of(digits, folder), victim=0, how="an error of its own")
    assert newest(folder).name == SAVED


AVERAGERS = {
    "gossip": {"name": "gossip", "topology": "ring"},
    "periodic": {"name": "periodic", "every": "2"},
    "sharded": {"name": "sharded"},
}


@pytest.mark.parametrize("name", tiered(AVERAGERS, night=["periodic", "sharded"]))
def test_replicas_that_differ_and_parts_end_too(name: str, digits: Path, tmp_path: Path) -> None:
    """That they go on from what is saved is in training/test_resume_ranks.py."""
    folder = tmp_path / "run"
    lose(folder, words_of(digits, folder, **AVERAGERS[name]), victim=1)
    assert newest(folder).name == SAVED


def test_a_checkpoint_under_way_is_written_to_its_end(digits: Path, tmp_path: Path) -> None:
    """The first of equal replicas writes, and needs nobody else for it."""
    folder = tmp_path / "run"
    how = "while a checkpoint is written"
    lose(folder, words_of(digits, folder), victim=2, how=how)
    assert newest(folder).name == SAVED


def test_a_message_that_is_cut_short_keeps_nobody(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lose(folder, words_of(digits, folder), victim=1, how="in the midst of a message")


def _leave_and_end(world: World) -> None:
    with init_distributed(world) as watchdog:
        if world.rank:
            watchdog.close()
            os._exit(0)
        time.sleep(4)  # for some looks at the processes of this host


def test_a_rank_that_has_ended_in_peace_is_not_lost() -> None:
    assert launch(_leave_and_end, SIZE) == [0] * SIZE
