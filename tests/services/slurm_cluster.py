"""A Slurm of our own: several nodes on this machine, in a folder, on loopback alone."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.test_cli_signals import wait_for
from tests.web import free_port

NODES = ("yard1", "yard2", "yard3", "yard4")
_HOSTS = Path("/etc/hosts")
_MARK = "# of Trainyard's tests"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
_SEARCH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

needs_slurm = pytest.mark.skipif(
    any(shutil.which(name, path=_SEARCH) is None for name in _PROGRAMS) or os.geteuid() != 0,
    reason="needs root, and Slurm: tests/services/install.sh, or apt-get install slurmctld slurmd "
    "slurm-client munge",
)

_CONF = """\
ClusterName=yard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=30
ReturnToService=2
KillWait=20
{nodes}
PartitionName=day Nodes=yard[3-4] Default=YES
PartitionName=low Nodes=yard[1-2] PriorityTier=1 GraceTime=20
PartitionName=high Nodes=yard[1-2] PriorityTier=10 PreemptMode=OFF
PartitionName=day-low Nodes=yard[3-4] PriorityTier=1 GraceTime=20
PartitionName=day-high Nodes=yard[3-4] PriorityTier=10 PreemptMode=OFF
"""
# cred_expire: a job that is requeued waits for so long. config_overrides: nodes claim more cores
# than the machine has.
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def wait_long_for(condition: Callable[[], object], what: str) -> None:
    """Asking now and then: it costs a process each time."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.25)


class SlurmCluster:
    """To be asked with Slurm's own commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons_end = ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def ask(self, *command: object) -> str:
        """What a command says that succeeds."""
        words = [str(word) for word in command]
        env = os.environ | self.env
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """What Slurm knows of a job: its Restarts or JobState, say."""
        words = self.ask("scontrol", "show", "job", job, "-o").split()
        return dict(word.split("=", 1) for word in words if "=" in word)[name]

    def wait_for_end(self, job: str) -> str:
        """The state that a job ends in."""
        wait_long_for(lambda: self.field(job, "JobState") in _ENDED, f"job {job} to end")
        return self.field(job, "JobState")

    def _write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        nodes = [_NODE.format(name=name, host=host, port=free_port()) for name in NODES]
        text = _CONF.format(folder=self.folder, host=host, port=free_port(), nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        # Named, it is not looked for: a machine may have none.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _daemons(self) -> list[list[str]]:
        folder = self.folder
        munge = {"key-file": "key", "socket": "sock", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={folder}/munge.{end}" for option, end in munge.items()]
        return [
            ["munged", "--foreground", "--force", *files, f"--pid-file={folder}/munge.pid"],
            ["slurmctld", "-D", "-c"],
            *(["slurmd", "-D", "-N", name] for name in NODES),
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """All daemons in the foreground, as this process's children; none outlives it."""
        self._write_configuration()
        with self._daemons_end as stack:
            stack.enter_context(_known_hosts())
            for command in self._daemons():
                stack.enter_context(self._daemon(command))
                if "munged" in command:
                    wait_for((self.folder / "munge.sock").exists, "munged")
            wait_long_for(self._is_up, "all nodes to be idle")
            stack.callback(self._cancel_all)
            yield

    @contextmanager
    def _daemon(self, command: list[str]) -> Iterator[None]:
        cores = ",".join(map(str, _cores_of(command[-1])))
        with subprocess.Popen(
            ["taskset", "--cpu-list", cores, "setpriv", "--pdeathsig", "KILL", *command],
            env=os.environ | self.env | {"PATH": _SEARCH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            self._running[command[-1]] = process
            try:
                yield
            finally:
                process.terminate()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()

    @contextmanager
    def lost(self, node: str) -> Iterator[None]:
        """Inside, a node and the tasks on it are gone, as by a reboot. Their ends are reported."""
        self._running[node].kill()
        self._running[node].wait()
        mark = f"SLURMD_NODENAME={node}\0".encode()
        for pid in self.processes():
            with suppress(OSError):  # it has just ended
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        yield
        self._daemons_end.enter_context(self._daemon(["slurmd", "-D", "-N", node]))

    def _is_up(self) -> bool:
        said = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"],
            env=os.environ | self.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return set(said.stdout.splitlines()) == {f"{name} idle" for name in NODES}

    def _cancel_all(self) -> None:
        for job in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", "--signal=KILL", "--full", job)
            self.ask("scancel", job)
        wait_long_for(lambda: not self.ask("squeue", "-h"), "the last job to end")
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Those that jobs have started, and what watches over them: all have its configuration."""
        token = f"SLURM_CONF={self.folder}/".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                is_ours = token in path.read_bytes() and b"SLURM_JOB_ID=" in path.read_bytes()
            except OSError:
                continue
            if is_ours:
                found.append(int(path.parent.name))
        return found


def _cores_of(name: str) -> list[int]:
    """A core of its own for each node, as far as there are any; all for what is no node."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[NODES.index(name) % len(cores)]] if name in NODES else cores


@contextmanager
def _known_hosts() -> Iterator[None]:
    """The nodes' names, by which ranks look for one another, lead to this machine."""
    ours = [f"127.0.0.1 {name} {_MARK} {os.getpid()}" for name in NODES]
    _HOSTS.write_text("\n".join((*_lines_of_others(), *ours)) + "\n")
    try:
        yield
    finally:
        _HOSTS.write_text("\n".join(_lines_of_others()) + "\n")


def _lines_of_others() -> list[str]:
    """Those of other tests under way too, but not of those that were killed."""
    kept = []
    for line in _HOSTS.read_text().splitlines():
        _, mark, process = line.partition(f" {_MARK} ")
        is_alive = Path(f"/proc/{process}").exists() and process != str(os.getpid())
        if not mark or is_alive:
            kept.append(line)
    return kept
