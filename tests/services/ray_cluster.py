"""A Ray cluster on this machine: a head and more nodes, each at a loopback address of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.web import free_port

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # where much else runs
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",  # and a node is given up after 5 of them
}
_TOKEN = "RAY_CLUSTER_OF_TESTS"


@dataclass
class RayNodes:
    folder: Path
    port: int = field(default_factory=free_port)

    @property
    def environment(self) -> dict[str, str]:
        """For what uses it."""
        return ENVIRONMENT | {"RAY_ADDRESS": f"127.0.0.1:{self.port}"}

    def add(self, number: int) -> str:
        """Start a node; its address. The first one, number 1, is the head."""
        address = f"127.0.0.{number}"
        words = [f"--address=127.0.0.1:{self.port}"]
        if number == 1:
            words = ["--head", f"--port={self.port}", "--include-dashboard=false"]
            words += ["--disable-usage-stats"]
        cores = sorted(os.sched_getaffinity(0))
        # On one core each, as a rank alone on its node would compute in another order than one of
        # two.
        core = cores[number % len(cores)]
        done = subprocess.run(
            [
                *("taskset", "--cpu-list", str(core), sys.executable, "-m", "ray.scripts.scripts"),
                *("start", f"--node-ip-address={address}", "--num-cpus=2", "--num-gpus=0"),
                *("--object-store-memory=100000000", f"--temp-dir={self.folder}/{number}", *words),
            ],
            env=os.environ | ENVIRONMENT | {_TOKEN: f"{self.folder}/{address}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        # After a node's death the head's server fills a core until the ranks of the others have
        # ended (Ray 2.60); on their only core they would wait for it.
        for process in self.members(address):
            if b"gcs_server" in _content(process, "cmdline"):
                for thread in os.listdir(f"/proc/{process}/task"):
                    os.sched_setaffinity(int(thread), cores)
        return address

    def drain(self, address: str, seconds: int) -> None:
        """Announce that a node will be taken back."""
        import ray

        ray.init(f"127.0.0.1:{self.port}", logging_level="ERROR")
        nodes = {
            node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]
        }
        ray.shutdown()
        words = [f"--address=127.0.0.1:{self.port}", f"--node-id={nodes[address]}"]
        words += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=taken back"]
        words += [f"--deadline-remaining-seconds={seconds}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def ranks(self, address: str) -> list[int]:
        """The ranks of a node."""
        processes = sorted(self.members(address))
        return [each for each in processes if b"trainyard\0train" in _content(each, "cmdline")]

    def members(self, address: str = "") -> set[int]:
        """The processes of a node, and all that came of them; of all nodes if none is given."""
        end = f"/{address}\0" if address else "/127.0.0."
        token = f"{_TOKEN}={self.folder}{end}".encode()
        found = {process for process in _processes() if token in _content(process, "environ")}
        parents = {process: _state(process)[1] for process in _processes()}
        while more := {child for child, parent in parents.items() if parent in found} - found:
            found |= more  # those that have given themselves a title have lost their environment
        return found

    def ours(self) -> set[int]:
        """Those that run code of ours: actors, agents, ranks."""
        ours = (b"ray::RayTrainWorker", b"trainyard\0launch\0agent", b"trainyard\0train")
        return {
            process
            for process in self.members()
            if any(name in _content(process, "cmdline") for name in ours)
        }

    def kill(self, address: str = "") -> None:
        """As if its power had failed."""
        deadline = time.monotonic() + 30
        while processes := [each for each in self.members(address) if _state(each)[0] not in "ZX"]:
            assert time.monotonic() < deadline, f"{processes} cannot be killed"
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _content(process: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def _state(process: int) -> tuple[str, int]:
    """And its parent; see proc(5)."""
    state, parent, *_ = _content(process, "stat").rpartition(b")")[2].split() or (b"X", b"0")
    return state.decode(), int(parent)


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """A head alone."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # names of sockets are short
    nodes = RayNodes(folder)
    try:
        nodes.add(1)
        yield nodes
    finally:
        nodes.kill()
        shutil.rmtree(folder, ignore_errors=True)
