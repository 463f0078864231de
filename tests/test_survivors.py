"""A rank dies: the others notice, name it, save what they have done, and a restart goes on."""

import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import distributed as dist

from tests.command_line import newest, run
from tests.spawn import launch
from tests.web import Talk
from trainyard.__main__ import end
from trainyard.averaging.allreduce import AllReduce
from trainyard.errors import DiskError, LoaderError, PeerError
from trainyard.rendezvous import Watch, member, sleeper
from trainyard.survivors.estate import Estate, _Survivor
from trainyard.survivors.meeting import Meeting
from trainyard.training.checkpoint import find_problem
from trainyard.training.update import Update, Updated
from trainyard.world import World, is_lost_peer, opening

SIZE, NUM_STEPS = 4, 8
AT = 4  # the step, counted from 0, in which a rank is lost
MESSAGE = 2**24  # float32: no socket takes as much at once
SAVED = f"the others have saved step {AT + 1}: the same command goes on from there"
OPTIONS = {
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "3 steps",
    "run.eval_every": "0 steps",
    "run.log_every": "1 step",
    "batch.size": "16",
    "data.threads": "1",
}


# --- no room to meet ---


def test_no_room_to_meet() -> None:
    """Survivors tell each other by files of the run directory, which is full."""

    def is_full(*_: object, **__: object) -> None:
        raise DiskError(errno.ENOSPC, "No space left on device", "00001.json")

    state, quarantine = SimpleNamespace(step=3), SimpleNamespace(noted=[])
    survivor = _Survivor(
        cast(Estate, SimpleNamespace(state=state, quarantine=quarantine)),
        World(rank=1, size=2),
        cast(Watch, SimpleNamespace(hung=[], reason="rank 0 is gone")),
        cast(Meeting, SimpleNamespace(decide=is_full)),
        keep=1,
    )
    said = "rank 0 is gone; nothing was saved (00001.json: No space left on device; free some "
    assert str(survivor.divide()).startswith(said)


# --- noticing ---


def _wait_for_each_other(world: World) -> None:
    """The last rank dies while each of the others waits for another one than that."""
    with member(world) as watch:
        survivors = range(world.size - 1)
        pairs = [[rank, (rank + 1) % len(survivors)] for rank in survivors]
        with opening():
            groups: list[Any] = [dist.new_group(pair) for pair in pairs]
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.zeros(1), group=groups[world.rank])
        except RuntimeError as error:
            assert is_lost_peer(error)
            watch.alarm()
            (name,) = watch.lost
            assert name.startswith(f"rank {world.size - 1} ({socket.gethostname()}, process ")
        else:
            raise AssertionError("it came")


def test_those_who_wait_for_each_other_notice_too() -> None:
    assert launch(_wait_for_each_other, SIZE) == [0, 0, 0, -signal.SIGKILL]


def _talk_to_others(world: World) -> None:
    """A database, say, before the ranks meet, and a tracker, after that."""
    database = Talk()
    with member(world) as watch:
        tracker = Talk()
        dist.barrier()
        if world.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            watch.alarm()
            assert database.works() and tracker.works()
        else:
            raise AssertionError("it came")


def test_a_caller_s_own_connections_outlive_a_rank() -> None:
    assert launch(_talk_to_others, 2) == [0, -signal.SIGKILL]


def _leave(world: World) -> None:
    with member(world) as watch:
        if world.rank:
            watch.close(in_peace=True)
        dist.barrier()
        assert not watch.has_alarm


def test_leaving_is_not_dying() -> None:
    assert launch(_leave, SIZE) == [0] * SIZE


def _die_at(message: torch.Tensor) -> None:
    """In another thread: when some of a message has come."""

    def die() -> None:
        while not message[0]:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    Thread(target=die, daemon=True).start()


def _compute_backward(world: World) -> None:
    """For longer than a thread that waits for others is given to come back."""
    vars(sleeper)["_WAKE_S"] = 1
    matrix = torch.eye(1000, requires_grad=True)
    product = matrix
    with member(world) as watch:
        watch.entrust(lambda: None)
        dist.barrier()
        if world.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        while time.monotonic() < begun + 4:  # backward takes twice as long
            product = product @ matrix
        torch.autograd.backward(product.sum())
        assert watch.has_alarm
        watch.alarm()


def test_who_computes_is_not_taken_to_wait() -> None:
    assert launch(_compute_backward, 2) == [0, -signal.SIGKILL]


def _leave_a_message(world: World) -> None:
    message = torch.zeros(MESSAGE)
    with suppress(PeerError), member(world) as watch:
        if world.rank:
            _die_at(message)
        else:
            message += 1
        dist.broadcast(message, 0, async_op=True)
        while not watch.has_alarm:
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")


def test_who_leaves_does_not_wait_for_what_is_under_way() -> None:
    assert launch(_leave_a_message, 2) == [0, -signal.SIGKILL]


# --- saving ---


def train(
    world: World, folder: Path, words: list[str], victim: int | None = None, how: str = ""
) -> None:
    """`trainyard train`, in which the victim ends once all ranks are to make the update AT."""
    os.dup2(os.open(folder.with_name(f"said-{world.rank}"), os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    update = Update.__call__

    def update_or_end(self: Update, step: int, parts: Any = None) -> Updated:
        if step == AT and victim is not None:
            folder.with_name(f"is-there-{world.rank}").touch()
            while world.rank == victim and len([*folder.parent.glob("is-there-*")]) < SIZE:
                time.sleep(0.01)
            if world.rank == victim and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == victim:
                raise LoaderError("no more data here")
        return update(self, step, parts)

    if how == "in the midst of a message":
        _cut_short(world, victim)
    else:
        Update.__call__ = update_or_end  # type: ignore[method-assign]
    end(run(*words))


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


def lose(folder: Path, words: list[str], victim: int, how: str = "killed") -> str:
    """Train until a rank ends; what one of the others has to say of that, after who it was."""
    ends = launch(train, SIZE, folder, words, victim, how)
    has_error = how == "an error of its own"
    assert ends.pop(victim) == (1 if has_error else -signal.SIGKILL)
    assert ends == [1] * (SIZE - 1)
    assert said(folder, victim) == (["no more data here"] if has_error else [])
    (message,) = [line for rank in range(SIZE) if rank != victim for line in said(folder, rank)]
    report = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (report["event"], report["message"]) == ("rank gone", message)
    who, _, rest = message.partition(") is gone; ")
    assert who.startswith(f"rank {victim} ({os.uname().nodename}, process ")
    return rest


def progress(folder: Path) -> int:
    path = newest(folder)
    assert find_problem(path) is None
    step: int = json.loads((path / "progress.json").read_text())["step"]
    return step


def test_equal_replicas_go_on_as_if_nothing_had_been(digits: Path, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert launch(train, SIZE, undisturbed, words_of(digits, undisturbed)) == [0] * SIZE
    words = words_of(digits, disturbed)
    assert lose(disturbed, words, victim=2) == SAVED
    assert progress(disturbed) == AT + 1

    assert launch(train, SIZE, disturbed, words) == [0] * SIZE

    assert progress(disturbed) == NUM_STEPS
    ours, theirs = newest(disturbed), newest(undisturbed)
    assert load(ours) == load(theirs)
    assert not list(disturbed.glob(".survivors-*"))


def test_a_message_that_is_cut_short_keeps_nobody(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = words_of(digits, folder)
    saved = f"the others have saved step {AT}: the same command goes on from there"
    assert lose(folder, words, victim=1, how="in the midst of a message") == saved
    assert progress(folder) == AT
    (decision,) = folder.glob(".survivors-*/decision.json")
    assert [*json.loads(decision.read_text())["steps"]] == ["0", "2", "3"]


def load(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def check_mean(path: Path) -> None:
    """The weights are the mean of those of the three replicas that are left, which differ."""
    states = [torch.load(file, weights_only=True) for file in sorted(path.glob("replicas/*.pt"))]
    own = [state["averager"]["own"][0] for state in states]
    assert len(own) == SIZE - 1
    for name, mean in load_file(path / "model.safetensors").items():
        expected = torch.stack([weights[name].double() for weights in own]).mean(dim=0)
        assert torch.equal(mean, expected.to(mean.dtype))
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0])


def test_gossip_saves_the_mean_of_those_that_are_left(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = words_of(digits, folder, name="gossip", topology="ring")
    assert lose(folder, words, victim=0, how="an error of its own") == SAVED
    assert progress(folder) == AT + 1
    check_mean(newest(folder))


def test_a_period_that_cannot_end_is_trained_all_the_same(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = words_of(digits, folder, name="periodic", every=str(AT + 1))
    assert lose(folder, words, victim=3) == SAVED
    assert progress(folder) == AT + 1
    check_mean(newest(folder))


def test_of_a_sharded_model_a_part_is_lost(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reason = "a part of the weights is gone too: the same command goes on from step-00000003"
    assert lose(folder, words_of(digits, folder, name="sharded"), victim=1) == reason
    assert progress(folder) == 3
