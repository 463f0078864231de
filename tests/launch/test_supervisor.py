"""Restarts of all ranks on several hosts; the hosts are made up."""

import os
import signal
from collections.abc import Mapping

import pytest

from trainyard.errors import Stopped, TrainyardError
from trainyard.launch import supervisor
from trainyard.launch.events import (
    Answer,
    Event,
    Events,
    Gone,
    Signal,
    answers,
    event_of,
    forget,
    passing_signals,
)
from trainyard.launch.ranks import End, Line, Share, shares_of
from trainyard.launch.supervisor import Policy, supervise


class MadeUp:
    """A host of one rank."""

    def __init__(self, name: str, cluster: "MadeUpCluster") -> None:
        self.name, self._cluster = name, cluster
        self.rank, self.size = 0, 0

    def start(self, share: Share) -> None:
        self.rank, self.size = share.first, share.size
        self._cluster.begin(self)

    def signal(self, number: int) -> None:
        self._cluster.signals.append((self.name, number))
        self._cluster.events.put(End(self.rank, 1 if number != signal.SIGUSR1 else 75))


class MadeUpCluster:
    """Hosts a and b; each attempt goes as its line in the script says."""

    def __init__(self, events: Events, *script: dict[str, list[Event]]) -> None:
        self.events, self._script = events, list(script)
        self.signals: list[tuple[str, int]] = []
        self.back: list[str] = []
        self._hosts = {name: MadeUp(name, self) for name in "ab"}
        self._going: dict[str, list[Event]] = {}

    @property
    def hosts(self) -> Mapping[str, MadeUp]:
        return self._hosts

    def shares(self) -> dict[str, Share]:
        self._going = self._script.pop(0)
        return shares_of(("x",), dict.fromkeys(self._hosts, 1), address="a", port=1)

    def begin(self, host: MadeUp) -> None:
        for event in self._going.get(host.name, []):
            self.events.put(event)

    def leave_out(self, gone: Mapping[str, str]) -> None:
        for name in gone:
            del self._hosts[name]

    def bring_back(self, gone: Mapping[str, str]) -> None:
        self.back += gone


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "NOTICE_S", 0.05)


def played(policy: Policy, *script: dict[str, list[Event]]) -> tuple[int, list[str], MadeUpCluster]:
    events = Events()
    said: list[str] = []
    cluster = MadeUpCluster(events, *script)
    with passing_signals(events):
        code = supervise(cluster, events, policy, show=lambda *_: None, say=said.append)
    return code, said, cluster


DONE: dict[str, list[Event]] = {"a": [Line(0, "hello"), End(0, 0)], "b": [End(1, 0)]}
KILLED: dict[str, list[Event]] = {"a": [], "b": [End(1, -9)]}
GONE: dict[str, list[Event]] = {"a": [], "b": [Gone("b", "closed")]}


def test_a_finished_run_does_not_restart() -> None:
    assert played(Policy(restarts=3), DONE)[:2] == (0, [])


def test_failures_are_limited_and_the_first_cause_is_named() -> None:
    code, said, cluster = played(Policy(restarts=1), KILLED, DONE)
    assert code == 0 and cluster.signals == [("a", signal.SIGTERM)]
    assert said[0].startswith("host b: rank 1 was killed by signal 9")
    assert said[0].endswith("starting again (1 of 1)")
    with pytest.raises(TrainyardError, match="host b: rank 1 was killed by signal 9") as caught:
        played(Policy(restarts=1), KILLED, KILLED)
    assert caught.value.exit_code == 137


@pytest.mark.parametrize("code", [2, 3, 75, 130])
def test_final_exit_codes(code: int) -> None:
    script: dict[str, list[Event]] = {"a": [End(0, code)], "b": [End(1, code)]}
    assert played(Policy(restarts=1), script)[:2] == (code, [])


def test_a_rank_killed_by_the_users_hand_is_final() -> None:
    script: dict[str, list[Event]] = {"a": [End(0, -15)], "b": [End(1, -15)]}
    with pytest.raises(TrainyardError, match="host a: rank 0 was killed by signal 15") as caught:
        played(Policy(restarts=1), script)
    assert caught.value.exit_code == 130


def test_a_lost_host_is_left_out_or_waited_for() -> None:
    told = ["host b is gone: closed"]
    code, said, cluster = played(Policy(restarts=1), GONE, DONE)
    assert (code, said, cluster.back) == (0, [*told, "starting again (1 of 1)"], ["b"])
    rest: dict[str, list[Event]] = {"a": [End(0, 0)]}
    code, said, cluster = played(Policy(min_hosts=1), GONE, rest)
    assert (code, said, cluster.back) == (0, [*told, "going on with a"], [])
    with pytest.raises(TrainyardError, match="giving up: no restarts are left"):
        played(Policy(min_hosts=2), GONE)


def test_a_rank_killed_with_its_host_counts_as_a_lost_host() -> None:
    script: dict[str, list[Event]] = {"a": [], "b": [End(1, -9), Gone("b", "closed")]}
    rest: dict[str, list[Event]] = {"a": [End(0, 0)]}
    assert played(Policy(min_hosts=1), script, rest)[0] == 0
    told: dict[str, list[Event]] = {"a": [End(0, 130)], "b": [End(1, 130), Gone("b", "closed")]}
    assert played(Policy(min_hosts=1), told, rest)[0] == 0


def test_a_stop_that_could_not_save_is_a_failure_without_a_restart() -> None:
    """It ended with 130, which says that all is saved: the ranks have ended with 1."""
    script: dict[str, list[Event]] = {"a": [Signal(signal.SIGTERM)], "b": []}
    with pytest.raises(TrainyardError, match="not saved: rank 0 has ended with exit code 1") as it:
        played(Policy(restarts=1), script)
    assert it.value.exit_code == 1


def test_answers_come_from_the_hosts_asked() -> None:
    events = Events()
    for event in (Gone("b", "closed"), Answer("a", 2)):
        events.put(event)
    assert answers(events, ["a"], 30, lambda _: None) == ({"a": 2}, {})
    events.put(Gone("a", "closed"))
    forget(events)
    assert events.empty()
    events.put(Signal(signal.SIGTERM))
    with pytest.raises(Stopped):
        forget(events)


def test_messages_of_an_agent() -> None:
    assert event_of({"is": "line", "rank": 1, "text": "x", "is_error": True}, "a") == Line(
        1, "x", True
    )
    assert event_of({"is": "end", "rank": 1, "code": 3}, "a") == End(1, 3)
    assert event_of({"is": "hello", "facts": {}, "addresses": []}, "a") == Answer("a", {})
    assert event_of({"is": "pong"}, "a") is event_of(42, "a") is None


def test_a_signal_is_passed_on_and_is_final() -> None:
    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    events = Events()
    cluster = MadeUpCluster(events, {"a": [Line(0, "ready")]})
    with passing_signals(events):
        code = supervise(cluster, events, Policy(restarts=9), show=interrupt, say=interrupt)
    assert code == 75
    assert sorted(cluster.signals) == [("a", signal.SIGUSR1), ("b", signal.SIGUSR1)]
