"""Ranks start: either all are in within the time stated, or one line says which are not and why."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.distributed.started import Ranks, ranks, wait_for
from trainyard.distributed import process_group, startup_check
from trainyard.distributed.launcher_variables import MeetingPoint
from trainyard.distributed.process_info import ProcessInfo
from trainyard.distributed.startup_check import Start, check_start
from trainyard.errors import PeerError
from trainyard.world import World

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


def test_its_host_is_named_if_the_launcher_tells(tmp_path: Path) -> None:
    with ranks(tmp_path, 4, limit_s=4) as started:
        nodes = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TRAINYARD_HOSTS": "a.lan,b.lan"}
        (first,) = started.start(0, env=nodes | {"LOCAL_RANK": "0", "GROUP_RANK": "0"})
        (second,) = started.start(1, env=nodes | {"LOCAL_RANK": "1", "GROUP_RANK": "0"})
        assert codes(started) == [1, 1]
        assert "ranks 2 on b.lan, 3 on b.lan of 4 did not come" in one_line(first.said)
        assert second.said == ""


def test_without_the_first_rank_each_says_what_it_tried(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=1) as started:
        (rank,) = started.start(1)
        assert rank.wait() == 1
        assert one_line(rank.said) == (
            f"rank 1 {rank.name} did not reach rank 0 at 127.0.0.1:{started.port} within 1 s: "
            "nothing listens there (rank 0 was not started, has failed, or is on another host)"
        )


def test_a_name_that_cannot_be_resolved(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=2) as started:
        (rank,) = started.start(1, env={"MASTER_ADDR": "nowhere.invalid"})
        assert rank.wait() == 1
        assert "nowhere.invalid" in rank.said and "cannot be resolved" in one_line(rank.said)


def test_another_service_at_the_port(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=2) as started, silent(started.port):
        (rank,) = started.start(1)
        assert rank.wait() == 1
        assert "is not rank 0: another service uses that port" in one_line(rank.said)
        (first,) = started.start(0)
        assert first.wait() == 2
        assert f"cannot listen at 127.0.0.1:{started.port} (Address already" in one_line(first.said)


def silent(port: int) -> socket.socket:
    """A server that accepts and says nothing."""
    return socket.create_server(("127.0.0.1", port))


def _be_told_to_end_once_in() -> None:
    """SIGTERM comes while this rank waits for the answer of rank 0."""
    wait = startup_check._answer

    def note_and_wait(*arguments: Any) -> Any:
        Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return wait(*arguments)

    vars(startup_check)["_answer"] = note_and_wait


def test_a_signal_ends_one_who_waits_and_the_first_one_misses_it(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        (first,) = started.start(0)
        (second,) = started.start(1, prepare=_be_told_to_end_once_in)
        assert second.wait() == -signal.SIGTERM
        assert first.wait(20) == 1
        assert one_line(first.said) == (
            f"rank 1 {second.name} ended while others were still to come; see its output"
        )


def _die_once_one_is_in() -> None:
    look = startup_check._FirstRank._look

    def look_and_die(self: Any) -> None:
        look(self)
        if self._arrivals:
            time.sleep(1)  # the other one waits for the answer by now
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(startup_check._FirstRank, "_look", look_and_die)  # noqa: B010


def test_a_first_rank_that_dies_is_missed_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        (first,) = started.start(0, prepare=_die_once_one_is_in)
        (second,) = started.start(1)
        assert first.wait() == -signal.SIGKILL
        assert second.wait(20) == 1
        assert one_line(second.said) == (f"rank 0 {first.name} is gone; see its output")


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
        wait_for(lambda: any(rank.process.exitcode is not None for rank in pair))
        refused, accepted = sorted(pair, key=lambda rank: rank.process.exitcode is None)
        assert refused.wait() == 2
        assert one_line(refused.said).startswith(f"rank 1 {accepted.name} has joined already")
        (last,) = started.start(2)
        assert [first.wait(), accepted.wait(), last.wait()] == [0, 0, 0]


def test_two_jobs_at_one_port(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, limit_s=3) as started:
        (first,) = started.start(0, env={"TORCHELASTIC_RUN_ID": "one"})
        time.sleep(1)
        (stranger,) = started.start(1, env={"TORCHELASTIC_RUN_ID": "other"})
        assert [first.wait(), stranger.wait()] == [1, 1]
        assert "rank 1 of 2 did not come" in one_line(first.said)
        assert "rank 0 " in one_line(stranger.said)


# --- those who come back ---


class Hosts:
    """Ranks in threads, which take themselves for processes on several hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._local = threading.local()
        me = classmethod(lambda cls: self._local.me)
        monkeypatch.setattr(ProcessInfo, "current", me)

    def start(self, rank: int, size: int, pid: int, limit_s: float = 20) -> Future[Start]:
        def run() -> None:
            self._local.me = ProcessInfo(f"host{rank}", "", pid, "0")
            store = dist.TCPStore("127.0.0.1", self.store.port, wait_for_workers=False)
            world, point = World(rank, size), MeetingPoint("127.0.0.1", self.store.port)
            try:
                found.set_result(check_start(store, world, {}, point=point, limit_s=limit_s))
            except Exception as error:
                found.set_exception(error)

        found: Future[Start] = Future()
        threading.Thread(target=run, daemon=True).start()
        return found


def pids(start: Future[Start]) -> list[int]:
    return [process.pid for process in start.result(timeout=30).processes]


def test_a_rank_that_restarts_before_the_first_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = Hosts(monkeypatch)
    first, second = hosts.start(0, 2, 1), hosts.start(1, 2, 2)
    assert pids(first) == pids(second) == [1, 2]
    second = hosts.start(1, 2, 4)
    time.sleep(1)
    assert not second.done()
    first = hosts.start(0, 2, 3)
    assert pids(first) == pids(second) == [3, 4]
    with pytest.raises(PeerError, match=r"rank 0 did not come .*; rank 0 \(host0, .* has started"):
        hosts.start(1, 2, 5, limit_s=1).result(timeout=30)


def test_a_rank_replaces_one_that_was_lost_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = Hosts(monkeypatch)
    first, second = hosts.start(0, 3, 1), hosts.start(2, 3, 3)
    number, _ = json.loads(hosts.store.get("start"))
    hosts.store.add(f"{number}/arrivals/1", 1)  # and nothing more is heard of it
    again = hosts.start(1, 3, 2)
    assert pids(first) == pids(second) == pids(again) == [1, 2, 3]


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


def test_by_a_file_also_one_that_was_left_behind(tmp_path: Path) -> None:
    (tmp_path / "said").mkdir()
    place = (tmp_path / "meeting").as_uri()
    with ranks(tmp_path / "said", 2) as started:
        (first,) = started.start(0, env={"TRAINYARD_RENDEZVOUS": place})
        wait_for((tmp_path / "meeting").exists)
        time.sleep(0.5)
        first.process.kill()
        first.wait()
        (late,) = started.start(1, env={"TRAINYARD_RENDEZVOUS": place})
        time.sleep(1)
        (first,) = started.start(0, env={"TRAINYARD_RENDEZVOUS": place})
        assert [late.wait(), first.wait()] == [0, 0]
        assert late.said == first.said == ""


def test_again_by_the_store_of_an_agent_as_fewer(tmp_path: Path) -> None:
    """An elastic restart: the agent's store still has what the earlier start has left there."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hosted = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    for size in (3, 2, 3):
        (tmp_path / f"{store.num_keys()}").mkdir()
        with ranks(tmp_path / f"{store.num_keys()}", size) as started:
            numbers = reversed(range(size))
            started.start(*numbers, env=hosted | {"MASTER_PORT": str(store.port)})
            assert codes(started) == [0] * size
