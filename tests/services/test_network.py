"""The emulated network is what it says, and replicas agree across it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command_line import SHORT
from tests.services.network import Host, Link, Network, NetworkError, listening, network

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMES = 20

# Takes a connection, says so, and reads to its end.
RECEIVER = """
import socket, sys
with socket.create_server(("", 9000)) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
    connection.sendall(b"x")
    while connection.recv(2**20):
        pass
    connection.sendall(b"x")
"""
# Prints the seconds of a round trip, and those of so many bytes.
SENDER = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
begun = time.perf_counter()
connection = socket.create_connection((address, 9000))
connection.recv(1)
there = time.perf_counter()
connection.sendall(bytes(size))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(there - begun, time.perf_counter() - there)
"""


@pytest.fixture(scope="module")
def emulated() -> Iterator[Network]:
    try:
        with network(3) as made:
            yield made
    except NetworkError as error:
        pytest.skip(str(error))


def python(host: Host, program: str, *arguments: object) -> "subprocess.Popen[str]":
    command = (sys.executable, "-c", program, *map(str, arguments))
    return host.start(*command, stdout=subprocess.PIPE, text=True)


def seconds(sender: Host, receiver: Host, size: int) -> tuple[float, float]:
    """Of connecting and the first answer, two round trips; and of sending so many bytes."""
    with python(receiver, RECEIVER) as server:
        assert server.stdout and server.stdout.readline() == "ready\n"
        with python(sender, SENDER, receiver.address, size) as client:
            assert client.stdout
            trips, sending = client.stdout.readline().split()
    return float(trips), float(sending)


def connects_within(limit_s: float, sender: Host, receiver: Host) -> bool:
    """Once, of some times: other work may hold it up."""
    return any(seconds(sender, receiver, 1)[0] < limit_s for _ in range(TIMES))


def sends_within(limit_s: float, sender: Host, receiver: Host, size: int) -> bool:
    return any(seconds(sender, receiver, size)[1] < limit_s for _ in range(TIMES))


@pytest.mark.night
def test_a_host_sends_at_its_rate(emulated: Network) -> None:
    size, mbit = 2_000_000, 20.0
    least = size * 8 / (mbit * 1e6)
    burst = 2**17 * 8 / (mbit * 1e6)  # goes at once
    first, second, third = emulated.hosts
    emulated.set(Link())
    assert sends_within(least, first, second, size)
    emulated.set(Link(mbit))
    assert seconds(first, second, size)[1] > least - burst
    emulated.set(Link(), slow={0: Link(mbit)})
    assert seconds(first, second, size)[1] > least - burst
    assert sends_within(least, third, second, size)


@pytest.mark.night
def test_packets_come_in_late(emulated: Network) -> None:
    first, second, _ = emulated.hosts
    emulated.set(Link())
    assert connects_within(0.4, first, second)
    emulated.set(Link(delay_ms=100))
    assert seconds(first, second, 1)[0] > 0.4  # two round trips
    emulated.set(Link(), slow={1: Link(delay_ms=200)})
    assert seconds(first, second, 1)[0] > 0.4  # one way only
    emulated.set(Link())
    assert connects_within(0.4, first, second)


def test_trainyard_trains_across_hosts(emulated: Network, digits: Path, tmp_path: Path) -> None:
    """By the command line, which gives each host its rank."""
    between = ["--mbit", "500", "--delay", "1", "2"]
    # Each rank would take all cores, as its host has no other.
    on_one_core = ["sh", "-c", 'exec taskset -c $((RANK % $(nproc))) "$@"', "sh"]
    train = ["-m", "trainyard", "train", "debug", "--data", str(digits), *SHORT, "--json"]
    command = [sys.executable, "-m", "tests.services.network", *between, *on_one_core]
    command += [sys.executable, *train, "--run", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["step"] == 2


def test_a_stranger_reaches_no_server_of_a_local_launch(
    emulated: Network, digits: Path, tmp_path: Path
) -> None:
    """The launcher's store ran what was written to it, and listened on all interfaces."""
    here, other = emulated.hosts[:2]
    words = ["launch", "local", "debug", "--ranks", "2", "--data", str(digits)]
    words += ["--data.threads", "1", "--run", str(tmp_path / "run"), "--run.length", "100000 steps"]
    own_proc = 'mount -t proc proc /proc && exec "$@"'  # a host has processes of its own
    command = ["unshare", "--mount", "sh", "-c", own_proc, "sh"]
    command += [sys.executable, "-m", "trainyard", *words]
    with here.start(*command, cwd=tmp_path, stdout=subprocess.DEVNULL) as launch:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "run" / "metrics.jsonl").exists():
                assert launch.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            ports = {port for _, port in listening(here)}
            assert ports  # the store of the ranks, on loopback
            probe = f"import socket\nfor port in {sorted(ports)}:\n"
            probe += f"    code = socket.socket().connect_ex(({here.address!r}, port))\n"
            probe += "    print(port, code)"
            answers = other.run(sys.executable, "-c", probe).split()
            assert set(answers[1::2]) == {str(errno.ECONNREFUSED)}
        finally:
            launch.send_signal(signal.SIGTERM)
            launch.wait(60)


HOLDER = """
import os, signal
from tests.services.network import network
with network(2) as made:
    made.hosts[1].start("sleep", "1000")
    print(*(os.readlink(f"/proc/{host.pid}/ns/net") for host in made.hosts), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.night
def test_nothing_stays_of_a_network_whose_process_was_killed(emulated: Network) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    networks = set(done.stdout.split())
    assert len(networks) == 2
    deadline = time.monotonic() + 30
    while networks & networks_in_use():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def networks_in_use() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            found.add(os.readlink(process / "ns" / "net"))
    return found


def test_a_command_that_fails_says_so(emulated: Network) -> None:
    with pytest.raises(NetworkError, match="does-not-exist"):
        emulated.hosts[0].run("ip", "link", "show", "does-not-exist")
