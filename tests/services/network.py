"""Hosts on an emulated network, all on one machine.

python -m tests.services.network [--mbit 100] [--delay 5] [--slow HOST:MBIT ...] HOSTS COMMAND ...

runs COMMAND once on each host, with RANK and the like set as torchrun does for one rank a host:

python -m tests.services.network --mbit 100 --delay 5 4 trainyard train digits --run runs/slow

Needs Linux, root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2. A host is a network namespace
with one link to a bridge. What a host sends is limited to a rate (tc's tbf); what it receives is
late by a delay: by tc's netem where the kernel has it, else by delay.py.

Namespaces have no names, and live as long as the processes in them: however this process ends, the
hosts' standard inputs are closed, so they end, and with them the kernel ends all that runs on them
and removes their network.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
PORT = 29500
BURST = "128kb"  # at a limited rate; not below the 64 kB that are sent at a time
LONGEST_QUEUE = "50ms"  # of a sender at a limited rate
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"


class NetworkError(Exception):
    """No network can be emulated here; the text says what is missing."""


@dataclass(frozen=True)
class Link:
    """Between a host and the bridge to all others."""

    mbit: float | None = None  # a second, of what the host sends; None is as fast as it goes
    delay_ms: float = 0.0  # of what it receives: a round trip takes that of both its ends


@dataclass(frozen=True)
class Host:
    """A network, and a space of processes: what runs on it ends with it."""

    number: int
    pid: int  # of the process that keeps the namespaces

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command on this host."""
        spaces = f"/proc/{self.pid}/ns"
        return ["nsenter", f"--net={spaces}/net", f"--pid={spaces}/pid_for_children", *command]

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[Any]":
        return subprocess.Popen(self.inside(*command), **options)

    def run(self, *command: str) -> str:
        """What a command prints. NetworkError, with its own error, if it fails."""
        return _run(*self.inside(*command))


class Network:
    """Hosts that reach each other; the links can be changed at any time."""

    def __init__(self, hosts: Sequence[Host], switch: Host, delay: "_Delay") -> None:
        self.hosts, self._switch, self._delay = hosts, switch, delay

    def set(self, link: Link, slow: Mapping[int, Link] | None = None) -> None:
        """Every host's link, but for the `slow` ones, by number."""
        links = [(slow or {}).get(host.number, link) for host in self.hosts]
        for host, each in zip(self.hosts, links, strict=True):
            _limit(host, each.mbit)
        self._delay.set([each.delay_ms for each in links])

    def rank_variables(self, number: int, port: int = PORT) -> dict[str, str]:
        """The environment of one rank a host, as torchrun sets it."""
        size = str(len(self.hosts))
        return {
            "RANK": str(number),
            "WORLD_SIZE": size,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(number),
            "GROUP_WORLD_SIZE": size,
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,  # the machine's name is of no use on these hosts
        }


@contextmanager
def network(size: int, link: Link | None = None) -> Iterator[Network]:
    """As many hosts, numbered from 0; gone at the end, with all that runs on them.

    NetworkError where that is not permitted, or a tool is missing.
    """
    if missing := [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]:
        raise NetworkError(f"needs {' and '.join(missing)}: apt-get install iproute2 util-linux")
    with ExitStack() as stack:
        switch, *hosts = [stack.enter_context(_host(number)) for number in range(-1, size)]
        switch.run("ip", "link", "add", "br0", "type", "bridge")
        switch.run("ip", "link", "set", "br0", "up")
        for host in hosts:
            _plug_in(host, switch)
        delay = stack.enter_context(_delay(hosts, switch))
        emulated = Network(hosts, switch, delay)
        emulated.set(link or Link())
        yield emulated


def bytes_sent() -> int:
    """By the host on which this is called, since it began."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise NetworkError(f"there is no {INTERFACE} here: not one of the emulated hosts")


# --- how it is built ---


@contextmanager
def _host(number: int) -> Iterator[Host]:
    keep = "echo && exec cat > /dev/null"  # until its input is closed
    keeper = subprocess.Popen(
        ["unshare", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", keep],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the commands, which may want to end in order
    )
    with keeper:  # closes its pipes, and waits until all is gone
        assert keeper.stdout and keeper.stderr
        if not keeper.stdout.readline():
            said = keeper.stderr.read().strip()
            raise NetworkError(
                f"no namespaces of its own: be root in a machine or container that "
                f"permits them (docker run --privileged): {said}"
            )
        host = Host(number, keeper.pid)
        host.run("ip", "link", "set", "lo", "up")
        yield host


def _plug_in(host: Host, switch: Host) -> None:
    port = _port(host)
    here, there = str(host.pid), str(switch.pid)
    _run(*f"ip link add {INTERFACE} netns {here} type veth peer name {port} netns {there}".split())
    switch.run("ip", "link", "set", port, "master", "br0", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
    host.run("ip", "link", "set", INTERFACE, "up")
    host.run("sh", "-c", f"echo reno > {CONGESTION}")  # permitted everywhere; bbr costs much time


def _port(host: Host) -> str:
    return f"host{host.number}"


def _limit(host: Host, mbit: float | None) -> None:
    tbf = f"tbf rate {mbit}mbit burst {BURST} latency {LONGEST_QUEUE}" if mbit else "noqueue"
    host.run(*f"tc qdisc replace dev {INTERFACE} root {tbf}".split())


class _Delay:
    def set(self, delays_ms: Sequence[float]) -> None:
        """Of what each host receives."""
        raise NotImplementedError


class _Netem(_Delay):
    def __init__(self, hosts: Sequence[Host], switch: Host) -> None:
        self._hosts, self._switch = hosts, switch

    def set(self, delays_ms: Sequence[float]) -> None:
        for host, delay_ms in zip(self._hosts, delays_ms, strict=True):
            netem = f"netem delay {delay_ms}ms limit 100000" if delay_ms else "noqueue"
            self._switch.run(*f"tc qdisc replace dev {_port(host)} root {netem}".split())


class _Queues(_Delay):
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def set(self, delays_ms: Sequence[float]) -> None:
        assert self._process.stdin and self._process.stdout
        print(*delays_ms, file=self._process.stdin, flush=True)
        if not self._process.stdout.readline():
            raise NetworkError("delay.py has ended: what it printed says why")


@contextmanager
def _delay(hosts: Sequence[Host], switch: Host) -> Iterator[_Delay]:
    if _has_netem(switch, hosts[0]):
        yield _Netem(hosts, switch)
        return
    program = str(Path(__file__).with_name("delay.py"))
    process = subprocess.Popen(
        [sys.executable, program, *(str(host.pid) for host in hosts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        yield _Queues(process)


def _has_netem(switch: Host, host: Host) -> bool:
    try:
        switch.run("tc", "qdisc", "replace", "dev", _port(host), "root", "netem")
    except NetworkError:
        return False
    return True


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


_LISTEN = "0A"


def listening(host: Host) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Where the processes of a host listen, from /proc/net/tcp and tcp6 (proc(5))."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in host.run("cat", table).splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTEN:
                digits, _, port = local.partition(":")
                words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                packed = b"".join(word.to_bytes(4, "little") for word in words)
                found.add((ip_address(packed), int(port, 16)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, help="a second, of what each host sends")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds, one way")
    parser.add_argument("--slow", action="append", default=[], metavar="HOST:MBIT")
    parser.add_argument("hosts", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    slow = {}
    for each in options.slow:
        host, _, mbit = each.partition(":")
        slow[int(host)] = Link(float(mbit), options.delay)
    with network(options.hosts) as emulated:
        emulated.set(Link(options.mbit, options.delay), slow)
        ranks = [
            host.start(*options.command, env=os.environ | emulated.rank_variables(host.number))
            for host in emulated.hosts
        ]
        codes: list[int | None] = [None]
        while None in codes and not any(codes):  # those that wait for a failed one end with it
            time.sleep(0.05)
            codes = [rank.poll() for rank in ranks]
        sys.exit(max(abs(code or 0) for code in codes))


if __name__ == "__main__":
    main()
