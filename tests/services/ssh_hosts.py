"""Hosts to log in to: real sshds, each in a network of its own with processes of its own.

Where such namespaces are forbidden they are two loopback addresses of this machine, whose cables
cannot be cut.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import FORBIDDEN
from tests.services.network import Host, Network, NetworkError, listening, network
from tests.web import free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
NAMES = ("a", "b")
_ROOT = Path(__file__).parents[2]  # hosts have the Trainyard that is tested
needs_ssh = pytest.mark.skipif(
    SSHD is None or not shutil.which("ssh") or not shutil.which("rsync"),
    reason="needs sshd, ssh, rsync: tests/services/install.sh, or "
    "apt-get install openssh-server openssh-client rsync",
)

_SSHD_CONFIG = """
Port {port}
ListenAddress {address}
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/user_key.pub"
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv "HOME={folder}" "PATH={folder}/bin-{name}:/usr/local/bin:/usr/bin:/bin"
"""
_HOST_CONFIG = """
Host {name}
  HostName {address}
  Port {port}
  IdentityFile "{folder}/{key}"
"""
_ALL_CONFIG = """
Host *
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile "{folder}/known_hosts"
  GlobalKnownHostsFile none
"""
# On one core each, as a rank alone on its host would compute in another order than one of two.
_BOOT = """
mount -t proc proc /proc && hostname {name} && mount --bind "{folder}/hosts" /etc/hosts || exit 1
exec taskset -c {core} {sshd} -D -e -f "{folder}/sshd-{name}"
"""


class SshHosts:
    """Two hosts, a and b, and a desk from which they are logged in to."""

    def __init__(self, folder: Path, addresses: Mapping[str, str], port: int) -> None:
        self.folder = folder
        self.config = folder / "ssh_config"
        self._port, self._addresses = port, addresses
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        _make_keys(folder)
        self._write_config()

    def on_desk(self, *command: str) -> list[str]:
        """The command line that runs a command where no host is."""
        raise NotImplementedError

    def kill(self, name: str) -> None:
        """Everything that runs on a host."""
        raise NotImplementedError

    def cut(self, name: str) -> None:
        """The cable of a host, so that nobody hears of it any more."""
        raise NotImplementedError

    def mend(self, name: str) -> None:
        raise NotImplementedError

    def listening(self, name: str) -> set[str]:
        """The addresses at which a host listens, but for loopback."""
        raise NotImplementedError

    def address(self, name: str) -> str:
        return self._addresses[name]

    def _boot(self, name: str) -> list[str]:
        """The command that runs sshd there, until it is killed."""
        raise NotImplementedError

    def start(self, name: str) -> None:
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            before = log.stat().st_size
            self._sshds[name] = subprocess.Popen(
                self._boot(name), stdout=file, stderr=file, start_new_session=True
            )
        deadline = time.monotonic() + 20
        while b"listening" not in log.read_bytes()[before:]:
            said = log.read_text()
            assert self._sshds[name].poll() is None and time.monotonic() < deadline, said
            time.sleep(0.02)

    def alias(self, name: str, of: str, key: str) -> None:
        """A second name for a host, that is logged in to by another key."""
        with self.config.open("a") as file:
            file.write(self._host_config(name, self._addresses[of], key))

    def python(self, name: str, *lines: str) -> str:
        """The Python of a host, found by its PATH, after these lines of shell."""
        folder = self.folder / f"bin-{name}"
        folder.mkdir(exist_ok=True)
        tested = f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{_ROOT}"'
        script = "\n".join(["#!/bin/sh", *lines, tested, f'exec "{sys.executable}" "$@"', ""])
        (folder / "python-there").write_text(script)
        (folder / "python-there").chmod(0o755)
        return "python-there"

    def close(self) -> None:
        for name in self._sshds:
            self.kill(name)
        for process in self._sshds.values():
            process.wait()

    def _host_config(self, name: str, address: str, key: str) -> str:
        return _HOST_CONFIG.format(
            name=name, address=address, port=self._port, folder=self.folder, key=key
        )

    def _write_config(self) -> None:
        folder = self.folder
        hosts = [self._host_config(*each, "user_key") for each in self._addresses.items()]
        self.config.write_text("".join([*hosts, _ALL_CONFIG.format(folder=folder)]))
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in self._addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        public = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"* {public}")
        for name, address in self._addresses.items():
            text = _SSHD_CONFIG.format(port=self._port, address=address, folder=folder, name=name)
            (folder / f"sshd-{name}").write_text(text)
            self.python(name)


def _make_keys(folder: Path) -> None:
    for key in ("host_key", "user_key", "wrong_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and its service may not run


class EmulatedHosts(SshHosts):
    """Each with a network and processes of its own."""

    def __init__(self, folder: Path, emulated: Network) -> None:
        self._network = emulated
        self._desk, *machines = emulated.hosts
        self._machines: dict[str, Host] = dict(zip(NAMES, machines, strict=True))
        addresses = {name: machine.address for name, machine in self._machines.items()}
        super().__init__(folder, addresses, 22)

    def on_desk(self, *command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._desk.pid}/ns/net", "--", *command]

    def kill(self, name: str) -> None:
        self._machines[name].run("sh", "-c", "kill -9 -1; :")
        self._sshds[name].wait()

    def cut(self, name: str) -> None:
        self._network._switch.run("ip", "link", "set", self._cable(name), "nomaster")

    def mend(self, name: str) -> None:
        self._network._switch.run("ip", "link", "set", self._cable(name), "master", "br0")

    def listening(self, name: str) -> set[str]:
        found = {address for address, _ in listening(self._machines[name])}
        return {f"{address}" for address in found if not address.is_loopback}

    def _cable(self, name: str) -> str:
        return f"host{self._machines[name].number}"

    def _boot(self, name: str) -> list[str]:
        core = sorted(os.sched_getaffinity(0))[NAMES.index(name) % len(os.sched_getaffinity(0))]
        script = _BOOT.format(name=name, folder=self.folder, core=core, sshd=SSHD)
        return self._machines[name].inside("unshare", "--mount", "--uts", "sh", "-c", script)


class LoopbackHosts(SshHosts):
    """Two addresses of this machine."""

    def __init__(self, folder: Path) -> None:
        addresses = {name: f"127.0.0.{number}" for number, name in enumerate(NAMES, 1)}
        super().__init__(folder, addresses, free_port())

    def on_desk(self, *command: str) -> list[str]:
        return list(command)

    def kill(self, name: str) -> None:
        killed = _descendants(self._sshds[name].pid)
        for process in (self._sshds[name].pid, *killed):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._sshds[name].wait()

    def cut(self, name: str) -> None:
        pytest.skip(f"no cable to cut: {FORBIDDEN}")

    def listening(self, name: str) -> set[str]:
        pytest.skip(f"no network of a host: {FORBIDDEN}")

    def _boot(self, name: str) -> list[str]:
        core = sorted(os.sched_getaffinity(0))[0]
        assert SSHD
        return ["taskset", "-c", str(core), SSHD, "-D", "-e", "-f", f"{self.folder}/sshd-{name}"]


def _descendants(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_descendants(child)]
    return found


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """Both are up."""
    try:
        with network(1 + len(NAMES)) as emulated:
            yield from _started(EmulatedHosts(folder, emulated))
    except NetworkError:
        yield from _started(LoopbackHosts(folder))


def _started(hosts: SshHosts) -> Iterator[SshHosts]:
    try:
        for name in NAMES:
            hosts.start(name)
        yield hosts
    finally:
        hosts.close()
