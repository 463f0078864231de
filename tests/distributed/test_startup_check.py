"""Ranks start: either all are in within the time stated, or one line says which are not and why."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.distributed.started import Rank, Ranks, ranks
from trainyard.distributed import process_group, startup_check
from trainyard.world import World

pytestmark = pytest.mark.slow

HOST = socket.gethostname()


def one_line(text: str) -> str:
    assert text.startswith("trainyard: ") and text.count("\n") == 1, text
    return text.removeprefix("trainyard: ").strip()


def codes(started: Ranks) -> list[int]:
    return [rank.wait() for rank in started.all]


# --- those who do not come ---


def test_one_that_never_comes_is_named_by_the_first_rank(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, limit_s=4) as started:
        first, last = started.start(0, 2)
        assert codes(started) == [1, 1]
        assert one_line(first.said).startswith(
            f"rank 1 of 3 did not come within 4 s; there are ranks from {HOST}. Either they were "
            f"not started or failed before (see their output), or they cannot reach 127.0.0.1:"
        )
        assert last.said == ""


def test_without_the_first_rank_each_says_what_it_tried(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=1) as started:
        (rank,) = started.start(1)
        assert rank.wait() == 1
        assert one_line(rank.said) == (
            f"rank 1 {rank.name} did not reach rank 0 at 127.0.0.1:{started.port} within 1 s: "
            "Connection refused"
        )


def test_a_name_that_cannot_be_resolved(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=2) as started:
        (rank,) = started.start(1, env={"MASTER_ADDR": "nowhere.invalid"})
        assert rank.wait() == 1
        assert "nowhere.invalid" in rank.said and "Name or service not known" in one_line(rank.said)


def _die_once_one_is_in() -> None:
    load = startup_check._loaded

    def load_and_die(*arguments: Any) -> Any:
        if load(*arguments):
            time.sleep(1)  # the other one waits for the answer by now
            os.kill(os.getpid(), signal.SIGKILL)

    vars(startup_check)["_loaded"] = load_and_die


def test_a_first_rank_that_dies_is_missed_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        (first,) = started.start(0, prepare=_die_once_one_is_in)
        (second,) = started.start(1)
        assert first.wait() == -signal.SIGKILL
        assert second.wait(20) == 1
        assert one_line(second.said) == (
            f"rank 0 at 127.0.0.1:{started.port} is gone or does not answer; see its output"
        )


# --- those who differ ---


FACTS = {"torch": "2.15.0", "optim.lr": "0.1"}


@pytest.mark.parametrize(
    ("facts", "env", "said"),
    [
        ({"torch": "2.11.0"}, {}, "torch is 2.11.0, not 2.15.0"),
        ({"optim.lr": "0.2"}, {}, "optim.lr is 0.2, not 0.1"),
        ({}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "number of ranks is 4, not 3"),
    ],
)
def test_one_that_differs_is_named(
    facts: dict[str, str], env: dict[str, str], said: str, tmp_path: Path
) -> None:
    with ranks(tmp_path, 3) as started:
        (first, second) = started.start(0, 1, facts=FACTS)
        (third,) = started.start(2, facts=FACTS | facts, env=env)
        assert codes(started) == [2, 2, 2]
        who = f"rank 2 {third.name} does not run what rank 0 {first.name} runs: "
        assert one_line(first.said) == f"{who}{said}"
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
        assert one_line(refused.said).startswith(f"rank 1 {accepted.name} has joined, so ")


def test_two_jobs_at_one_port(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=3) as started:
        (first,) = started.start(0, env={"TORCHELASTIC_RUN_ID": "one"})
        time.sleep(1)
        (stranger,) = started.start(1, env={"TORCHELASTIC_RUN_ID": "other"})
        assert [first.wait(), stranger.wait()] == [1, 1]
        assert "rank 1 of 2 did not come" in one_line(first.said)
        assert "rank 0 " in one_line(stranger.said)


# --- those who die ---


def _die_in_the_first_collective(world: World) -> None:
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def test_one_that_dies_in_its_first_collective_is_named_once(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        first, second, third = started.start(0, 1, 2, work=_die_in_the_first_collective)
        assert codes(started) == [1, 1, -signal.SIGKILL]
        assert one_line(first.said) == f"rank 2 {third.name} is gone; see its output"
        assert second.said == ""


def _have_a_broken_gpu() -> None:
    def fail(world: World) -> torch.device:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with")

    vars(process_group)["own_device"] = fail


def test_one_with_a_broken_gpu_does_not_blame_the_network(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=4) as started:
        (first,) = started.start(0)
        (second,) = started.start(1, prepare=_have_a_broken_gpu)
        assert codes(started) == [1, 1]
        assert one_line(second.said) == (
            f"rank 1 {second.name} cannot use its GPU: CUDA error: uncorrectable ECC error "
            "encountered"
        )
        assert "rank 1 of 2 did not come within 4 s" in one_line(first.said)


def test_no_way_between_the_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as started:
        started.start(0, 1, env={"GLOO_SOCKET_IFNAME": "wrong0"})
        assert codes(started) == [1, 1]
        for rank in started.all:
            assert "the interface wrong0: set GLOO_SOCKET_IFNAME" in rank.said or (
                "is gone" in rank.said
            )
            one_line(rank.said)
        assert "wrong0" in started.all[0].said + started.all[1].said


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
