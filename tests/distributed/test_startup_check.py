"""Ranks start: either all are in within the time stated, or one line says which are not and why."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.distributed.started import Rank, Ranks, ranks
from trainyard.distributed import process_group, startup_check
from trainyard.world import World

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
ADDRESS = "127.0.0.1:{}"


def codes(started: Ranks) -> list[int]:
    return [rank.wait() for rank in started.all]


# --- those who do not come ---


def test_one_that_never_comes_is_named_by_the_first_rank(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, limit_s=4) as started:
        first, last = started.start(0, 2)
        assert codes(started) == [1, 1]
        first.check("rank.absent", ranks="rank 1", size=3, limit_s=4.0, hosts=HOST)
        assert last.said == ""


def test_without_the_first_rank_each_says_what_it_tried(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=1) as started:
        (rank,) = started.start(1)
        assert rank.wait() == 1
        where = {"address": ADDRESS.format(started.port), "reason": "Connection refused"}
        rank.check("rank.first-rank-unreachable", rank=1, host=HOST, pid=rank.pid, **where)


def test_a_name_that_cannot_be_resolved(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=2) as started:
        (rank,) = started.start(1, env={"MASTER_ADDR": "nowhere.invalid"})
        assert rank.wait() == 1
        rank.check("rank.first-rank-unreachable", address=f"nowhere.invalid:{started.port}")
        assert "Connection refused" not in rank.said


def _die_once_one_is_in() -> None:
    def wait_and_die(store: dist.Store, *_: object) -> None:
        store.wait(["arrival/1"])
        time.sleep(1)  # the other one waits for the answer by now
        os.kill(os.getpid(), signal.SIGKILL)

    vars(startup_check)["_await_others"] = wait_and_die


def test_a_first_rank_that_dies_is_missed_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        (first,) = started.start(0, prepare=_die_once_one_is_in)
        (second,) = started.start(1)
        assert first.wait() == -signal.SIGKILL
        assert second.wait(20) == 1
        second.check("rank.first-rank-gone", address=ADDRESS.format(started.port))


# --- those who differ ---


def test_one_that_differs_is_named(tmp_path: Path) -> None:
    facts, size = {"torch": "2.15", "optim.lr": "0.1"}, {"WORLD_SIZE": "4"}
    with ranks(tmp_path, 3) as started:
        (first, second) = started.start(0, 1, facts=facts)
        (third,) = started.start(
            2, facts={"torch": "2.11", "optim.lr": "0.2"}, env=size | {"LOCAL_WORLD_SIZE": "4"}
        )
        assert codes(started) == [2, 2, 2]
        changes = "number of ranks is 4, not 3; torch is 2.11, not 2.15; optim.lr is 0.2, not 0.1"
        first.check("rank.run-differs", rank=2, pid=third.pid, first_pid=first.pid, changes=changes)
        assert second.said == third.said == ""


def test_two_with_one_number(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        (first,) = started.start(0)
        pair = started.start(1, 1)
        time.sleep(5)  # for both to come
        (last,) = started.start(2)
        assert [first.wait(), last.wait()] == [0, 0]
        refused, accepted = sorted(pair, key=Rank.wait, reverse=True)
        assert [refused.wait(), accepted.wait()] == [2, 0]
        refused.check("rank.taken", rank=1, other_pid=accepted.pid, pid=refused.pid)


def test_one_of_a_larger_world(tmp_path: Path) -> None:
    """It ended with an IndexError."""
    with ranks(tmp_path, 2) as started:
        started.start(0, 1)
        (stranger,) = started.start(2, env={"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
        assert codes(started) == [0, 0, 2]
        stranger.check("rank.taken", rank=2, pid=stranger.pid)


def test_two_jobs_at_one_port(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=3) as started:
        (first,) = started.start(0, env={"TORCHELASTIC_RUN_ID": "one"})
        time.sleep(1)
        (stranger,) = started.start(1, env={"TORCHELASTIC_RUN_ID": "other"})
        assert [first.wait(), stranger.wait()] == [1, 1]
        first.check("rank.absent", ranks="rank 1", size=2)
        assert stranger.said.count("\n") == 1


# --- those who die ---


def _die_in_the_first_collective(world: World) -> None:
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def _be_many() -> None:
    """From so many on, ranks connect to others as they need them."""
    vars(process_group)["_MESH"] = 2


@pytest.mark.parametrize("prepare", [None, _be_many])
def test_one_that_dies_in_its_first_collective_is_named_once(
    prepare: Callable[[], None] | None, tmp_path: Path
) -> None:
    with ranks(tmp_path, 3) as started:
        work = _die_in_the_first_collective
        first, second, third = started.start(0, 1, 2, work=work, prepare=prepare)
        assert codes(started) == [1, 1, -signal.SIGKILL]
        assert f"rank 2 ({HOST}, process {third.pid})" in first.said and first.said.count("\n") == 1
        assert second.said == ""


def _have_a_broken_gpu() -> None:
    def fail(world: World) -> torch.device:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with")

    vars(process_group)["own_device"] = fail


def test_one_with_a_broken_gpu_does_not_blame_the_network(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=2) as started:
        (first,) = started.start(0)
        (second,) = started.start(1, prepare=_have_a_broken_gpu)
        assert codes(started) == [1, 1]
        reason = "CUDA error: uncorrectable ECC error encountered"
        second.check("rank.gpu-failed", rank=1, pid=second.pid, reason=reason)
        first.check("rank.absent", ranks="rank 1")


def test_no_way_between_the_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as started:
        started.start(0, 1, env={"GLOO_SOCKET_IFNAME": "wrong0"})
        assert codes(started) == [1, 1]
        blaming = [rank for rank in started.all if "wrong0" in rank.said]
        assert blaming  # the other one may only see that it is gone
        blaming[0].check("rank.cannot-connect", interface="wrong0", pid=blaming[0].pid)
        assert [rank.said.count("\n") for rank in started.all] == [1, 1]


# --- ways to meet ---


def test_by_ipv6(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as started:
        started.start(0, 1, env={"MASTER_ADDR": "::1"})
        assert codes(started) == [0, 0]


def test_again_by_the_store_of_an_agent_as_fewer(tmp_path: Path) -> None:
    """An elastic restart: the agent's store still has what the earlier start has left there."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hosted = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    for count, size in enumerate((3, 2, 3)):
        hosted["TORCHELASTIC_RESTART_COUNT"] = f"{count}"
        (tmp_path / f"{store.num_keys()}").mkdir()
        with ranks(tmp_path / f"{store.num_keys()}", size) as started:
            numbers = reversed(range(size))
            started.start(*numbers, env=hosted | {"MASTER_PORT": str(store.port)})
            assert codes(started) == [0] * size
