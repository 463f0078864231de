"""The hosts of `trainyard launch ssh`: checks before the start, and the meeting point of ranks."""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from trainyard.errors import InputError
from trainyard.launch.agent import PING_S
from trainyard.launch.answers import answers, forget, pause
from trainyard.launch.attempts import Host, HostsGone, passed_on
from trainyard.launch.events import Events
from trainyard.launch.hosts import GivenHost
from trainyard.launch.ranks import Share, shares_of
from trainyard.launch.readiness import as_text, differences, installed
from trainyard.launch.ssh_remote import Login, Remote
from trainyard.monitor.progress import counter

_ANSWER_S = 120  # for an agent to start, or to count its GPUs, with Python on a slow file system
_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    hosts: Sequence[GivenHost]
    login: Login
    ranks: int | None = None
    """Ranks per host without a number of its own; by default one per GPU, or one."""
    gpus: int | None = None
    """GPUs that each host must have."""
    master_addr: str | None = None
    wait_s: float = 300
    """Seconds to wait for a lost host to come back."""
    is_json: bool = False


@contextmanager
def connected(
    command: Sequence[str], options: SshOptions, events: Events
) -> "Iterator[SshCluster]":
    """An SshCluster whose agents end at the end."""
    cluster = SshCluster(command, options, events)
    ended = threading.Event()

    def ping() -> None:
        while not ended.wait(PING_S):
            for remote in list(cluster.remotes.values()):
                remote.ping()

    pinger = threading.Thread(target=ping)
    pinger.start()
    try:
        yield cluster
    finally:
        ended.set()
        pinger.join()
        cluster.close(list(cluster.remotes))


class SshCluster:
    """Hosts with an agent on each."""

    def __init__(self, command: Sequence[str], options: SshOptions, events: Events) -> None:
        self._command, self._options, self._events = command, options, events
        self.remotes: dict[str, Remote] = {}
        self._left_out: set[str] = set()
        self._slots: dict[str, int] = {}

    @property
    def hosts(self) -> Mapping[str, Host]:
        names = (host.name for host in self._options.hosts)
        return {name: self.remotes[name] for name in names if name not in self._left_out}

    # --- before anything starts ---

    def check(self) -> None:
        """Start an agent on each host. InputError, with a line for each host that is not ready."""
        hosts = {host.name: host for host in self._options.hosts}
        found, problems = self._connect(hosts.values())
        facts = {name: found[name] for name in hosts if name in found}
        problems = {**problems, **(differences(facts, installed()) if facts else {})}
        if not problems:
            problems = self._count()
        if problems:
            in_order = {name: problems[name] for name in hosts if name in problems}
            raise InputError(as_text(in_order, len(hosts)))

    def _connect(
        self, hosts: Iterable[GivenHost]
    ) -> tuple[dict[str, dict[str, str]], Mapping[str, str]]:
        """Start agents. Returns the facts of hosts that have one, and why the others have none."""
        names = []
        for host in hosts:
            self.remotes[host.name] = Remote(host, self._options.login, self._events)
            names.append(host.name)
        return self._answers(names, "checking hosts")

    def _count(self) -> Mapping[str, str]:
        """Set the number of ranks of each host. Returns the problems of hosts that lack GPUs."""
        options = self._options
        given = {host.name: host.slots or options.ranks for host in options.hosts}
        unknown = [name for name, count in given.items() if count is None or options.gpus]
        devices, problems = self._ask(
            {name: {"do": "devices"} for name in unknown}, "counting GPUs"
        )
        for name, count in given.items():
            self._slots[name] = count or options.gpus or max(devices.get(name, 0), 1)
        wanted = options.gpus or 0
        few = {name: count for name, count in devices.items() if count < wanted}
        lacks = {name: f"it has {count} GPUs, not {wanted}" for name, count in few.items()}
        return {**problems, **lacks}

    # --- called by `supervise` ---

    def shares(self) -> dict[str, Share]:
        names = list(self.hosts)
        counts = {name: self._slots[name] for name in names}
        self._check_gone(names)
        address, port = self._meeting_point(names)
        self._check_gone(names)
        variables = passed_on(os.environ)
        return shares_of(self._command, counts, address=address, port=port, variables=variables)

    def _check_gone(self, names: Sequence[str]) -> None:
        gone = {name: self.remotes[name].gone for name in names}
        if any(gone.values()):
            raise HostsGone({name: why for name, why in gone.items() if why})

    def leave_out(self, gone: Mapping[str, str]) -> None:
        self._left_out |= gone.keys()
        self.close(gone)

    def bring_back(self, gone: Mapping[str, str]) -> None:
        """Waits for these hosts, up to `wait_s`."""
        deadline = time.monotonic() + self._options.wait_s
        hosts = {host.name: host for host in self._options.hosts if host.name in gone}
        while hosts:
            self.close(hosts)
            forget(self._events)
            facts, problems = self._connect(hosts.values())
            if differ := differences(facts, installed()) if facts else {}:
                raise InputError(as_text(differ, len(differ)))
            hosts = {name: host for name, host in hosts.items() if name in problems}
            if hosts and time.monotonic() > deadline:
                raise HostsGone({name: f"not back, {why}" for name, why in problems.items()})
            pause(self._events, _RETRY_S if hosts else 0)

    def close(self, names: Iterable[str]) -> None:
        """End these agents."""
        remotes = [self.remotes[name] for name in names]
        with ThreadPoolExecutor(max(len(remotes), 1)) as pool:
            list(pool.map(Remote.close, remotes))

    # --- where the ranks meet ---

    def _meeting_point(self, names: Sequence[str]) -> tuple[str, int]:
        """An address of the first host that all others reach, and a free port there."""
        first, *others = names
        is_first = first == self._options.hosts[0].name
        wanted = self._options.master_addr if is_first else None  # it is that host's
        known = [wanted] if wanted else [self.remotes[first].address, first]
        towards = [] if wanted else [self.remotes[name].address for name in others]
        order = {"do": "listen", "names": [n for n in known if n], "towards": towards}
        bell = self._sure({first: order})[first]
        if wanted:
            bell["names"] = [wanted]
        if not others:
            return wanted or "127.0.0.1", bell["port"]
        reached = self._sure({name: {"do": "reach", **bell} for name in others})
        for address in reached[others[0]]["addresses"]:
            if all(address in found["addresses"] for found in reached.values()):
                return wanted or address, bell["port"]
        raise InputError(_unreached(first, bell["port"], reached))

    # --- questions and answers ---

    def _sure(self, orders: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Each host's answer. HostsGone if one is missing."""
        answers, gone = self._ask(orders, "looking for a meeting point")
        if gone:
            raise HostsGone(gone)
        return answers

    def _ask(
        self, orders: Mapping[str, dict[str, Any]], what: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        for name, order in orders.items():
            self.remotes[name].order(order)
        return self._answers(list(orders), what)

    def _answers(self, names: Sequence[str], what: str) -> tuple[dict[str, Any], dict[str, str]]:
        with counter(Console(stderr=True), what, len(names)) as show:
            return answers(self._events, names, _ANSWER_S, show)


def _unreached(first: str, port: int, reached: Mapping[str, Any]) -> str:
    problems = {
        host: f"it does not reach host {first} at port {port} ({'; '.join(found['problems'])})"
        for host, found in reached.items()
        if not found["addresses"]
    } or {host: f"it reaches host {first} at {found}" for host, found in reached.items()}
    advice = "open the ports between the hosts, or give an address that leads there: --master-addr"
    return f"{as_text(problems, len(reached) + 1)}: {advice}"
