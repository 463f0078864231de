"""A run on several hosts through ssh, with an agent on each (see agent.py)."""

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from trainyard.children import has_ended, kill_group, wait_for
from trainyard.errors import InputError
from trainyard.launch.events import Events, Gone, answers, event_of, forget, passing_signals, pause
from trainyard.launch.host_agent import PING_S
from trainyard.launch.hosts import GivenHost
from trainyard.launch.job import Job, passed_on
from trainyard.launch.output import Printer
from trainyard.launch.preflight import as_text, differences, installed
from trainyard.launch.ranks import Share, shares_of
from trainyard.launch.supervisor import Host, HostsGone, Policy, Say, supervise
from trainyard.monitor.progress import counter

SILENT_S = 8
"""Seconds without an answer to a ping after which a host counts as gone."""
_ANSWER_S = 120  # for an agent to start, or to count its GPUs, with Python on a slow file system
_RETRY_S = 1.0
_CLOSE_S = 5
_OPTIONS = (
    "BatchMode=yes",  # ssh must not prompt
    "ConnectTimeout=10",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
    "ControlMaster=no",
)
_NO_FOLDER, _NO_PYTHON, _SSH_FAILED = 81, 82, 255  # exit codes of the script, and of ssh
_SCRIPT = (
    f'cd "$1" 2>/dev/null || exit {_NO_FOLDER}; '
    f'command -v "$2" >/dev/null || exit {_NO_PYTHON}; '
    'exec "$2" -P -m trainyard.launch.host_agent'
)
_LOGIN_FAILURES = {
    "Permission denied": "login refused: your public key is not in its authorized_keys",
    "Could not resolve hostname": "unknown host: no name service nor ssh config knows it",
    "Host key verification failed": "its host key is not known here: log in by hand once",
    "Connection refused": "nothing listens at its ssh port",
    "timed out|not responding|No route|unreachable": "it does not answer",
}
_NO_MODULE = re.compile(r"No module named '?trainyard|Error while finding module.*trainyard")
_NOT_COPIED = ("--filter=:- .gitignore", "--exclude=.git")
_NO_RSYNC = (127, 12)  # exit codes if the remote rsync does not answer


@dataclass(frozen=True)
class Login:
    """The ssh command, and the folder and Python on the host."""

    ssh: tuple[str, ...]
    """The ssh command with the user's options."""
    folder: str
    """Working directory on the host."""
    python: str

    @property
    def command(self) -> tuple[str, ...]:
        """The ssh words before the host."""
        return (*self.ssh, "-T", *(word for option in _OPTIONS for word in ("-o", option)))

    def agent_of(self, host: GivenHost) -> list[str]:
        """The command that runs an agent there."""
        script = f"exec sh -c {shlex.quote(_SCRIPT)} sh {shlex.join((self.folder, self.python))}"
        return [*self.command, "--", host.target, script]


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


def launch_ssh(job: Job, options: SshOptions, policy: Policy, say: Say) -> int:
    """Run a job on several hosts. Returns the exit code of the run.

    InputError, with a line per host, if hosts are not ready; then nothing was started.
    """
    events = Events()
    with passing_signals(events), closing(SshCluster(job.command, options, events)) as cluster:
        cluster.check()
        printer = Printer(cluster.hosts, as_they_are=options.is_json)
        return supervise(cluster, events, policy, show=printer.line, say=say)


def sync(hosts: Sequence[GivenHost], login: Login) -> None:
    """Copy the working directory to all hosts, except .git and files that .gitignore names.

    Nothing is deleted there. InputError, with a line for each host where it failed.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        copied = pool.map(lambda host: _copy(host, login), hosts)
        problems = {host.name: why for host, why in zip(hosts, copied, strict=True) if why}
    if problems:
        raise InputError(as_text(problems, len(hosts)))


def _copy(host: GivenHost, login: Login) -> str | None:
    """Copy to one host. Returns the reason of a failure, else None."""
    user, at, name = host.target.rpartition("@")
    target = f"{user}{at}[{name}]" if ":" in name else host.target
    there = f"mkdir -p {shlex.quote(login.folder)} && rsync"
    command = ["rsync", "-az", "--rsync-path", there, *_NOT_COPIED, "-e", shlex.join(login.command)]
    try:
        done = subprocess.run(
            [*command, "--", "./", f"{target}:{login.folder}/"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise InputError(f"--sync needs rsync here: {error.strerror}") from None
    said = done.stderr.strip().partition("\n")[0]
    question = ": is it installed there?" if done.returncode in _NO_RSYNC else ""
    return f"rsync failed ({said}){question}" if done.returncode else None


class SshCluster:
    """Hosts with an agent on each."""

    def __init__(self, command: Sequence[str], options: SshOptions, events: Events) -> None:
        self._command, self._options, self._events = command, options, events
        self._given = {host.name: host for host in options.hosts}
        self._remotes: dict[str, Remote] = {}
        self._slots: dict[str, int] = {}

    @property
    def hosts(self) -> Mapping[str, Host]:
        return {name: self._remotes[name] for name in self._given if name in self._remotes}

    def check(self) -> None:
        """Start an agent on each host. InputError, with a line for each host that is not ready."""
        facts, problems = self._connect(self._given)
        problems |= differences(facts, installed())
        problems = problems or self._count()
        if problems:
            in_order = {name: problems[name] for name in self._given if name in problems}
            raise InputError(as_text(in_order, len(self._given)))

    def _connect(self, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Start agents. Returns the facts of hosts that have one, and why the others have none."""
        for name in names:
            self._remotes[name] = Remote(self._given[name], self._options.login, self._events)
        found, problems = self._answers(list(names), "checking hosts")
        return {name: found[name] for name in self._given if name in found}, problems

    def _count(self) -> dict[str, str]:
        """Set the number of ranks of each host. Returns the problems of hosts that lack GPUs."""
        options = self._options
        given = {name: host.slots or options.ranks for name, host in self._given.items()}
        unknown = [name for name, count in given.items() if count is None or options.gpus]
        orders = {name: {"do": "devices"} for name in unknown}
        devices, problems = self._ask(orders, "counting GPUs")
        for name, count in given.items():
            self._slots[name] = count or options.gpus or max(devices.get(name, 0), 1)
        wanted = options.gpus or 0
        few = {name: count for name, count in devices.items() if count < wanted}
        lacks = {name: f"it has {count} GPUs, not {wanted}" for name, count in few.items()}
        return {**problems, **lacks}

    def shares(self) -> dict[str, Share]:
        self._check_gone()
        address, port = self._meeting_point(*self.hosts)
        self._check_gone()
        counts = {name: self._slots[name] for name in self.hosts}
        variables = passed_on(os.environ)
        return shares_of(self._command, counts, address=address, port=port, variables=variables)

    def _check_gone(self) -> None:
        gone = {name: remote.gone for name, remote in self._remotes.items() if remote.gone}
        if gone:
            raise HostsGone(gone)

    def leave_out(self, gone: Mapping[str, str]) -> None:
        remotes = [self._remotes.pop(name) for name in gone]
        with ThreadPoolExecutor(max(len(remotes), 1)) as pool:
            list(pool.map(Remote.close, remotes))

    def bring_back(self, gone: Mapping[str, str]) -> None:
        """Waits for these hosts, up to `wait_s`."""
        deadline = time.monotonic() + self._options.wait_s
        while gone:
            self.leave_out(gone)
            forget(self._events)
            facts, gone = self._connect(gone)
            if differ := differences(facts, installed()):
                raise InputError(as_text(differ, len(differ)))
            if gone and time.monotonic() > deadline:
                raise HostsGone({name: f"not back, {why}" for name, why in gone.items()})
            pause(self._events, _RETRY_S if gone else 0)

    def close(self) -> None:
        """End the agents."""
        self.leave_out(dict.fromkeys(self._remotes, ""))

    def _meeting_point(self, first: str, *others: str) -> tuple[str, int]:
        """An address of the first host that all others reach, and a free port there."""
        is_first = first == self._options.hosts[0].name
        wanted = self._options.master_addr if is_first else None  # it is that host's
        known = [wanted] if wanted else [self._remotes[first].address, first]
        towards = [] if wanted else [self._remotes[name].address for name in others]
        order = {"do": "listen", "names": [name for name in known if name], "towards": towards}
        bell = self._ask_all({first: order})[first]
        if wanted:
            bell["names"] = [wanted]
        if not others:
            return wanted or "127.0.0.1", bell["port"]
        reached = self._ask_all({name: {"do": "reach", **bell} for name in others})
        for address in reached[others[0]]["addresses"]:
            if all(address in found["addresses"] for found in reached.values()):
                return wanted or address, bell["port"]
        raise InputError(_unreached(first, bell["port"], reached))

    def _ask_all(self, orders: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The answer of each host. HostsGone if one is missing."""
        found, gone = self._ask(orders, "looking for a meeting point")
        if gone:
            raise HostsGone(gone)
        return found

    def _ask(
        self, orders: Mapping[str, dict[str, Any]], what: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        for name, order in orders.items():
            self._remotes[name].order(order)
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


class Remote:
    """A host's agent through an ssh connection; its messages become events.

    The first event is an Answer with the host's facts. If the agent does not start or is lost, the
    last event is Gone, and `gone` holds the reason.
    """

    def __init__(self, host: GivenHost, login: Login, events: Events) -> None:
        self.address = self.gone = ""
        self._name, self._login, self._events = host.name, login, events
        self._is_here = False
        self._why = ""
        self._heard = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        try:
            self._process = subprocess.Popen(
                login.agent_of(host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the launcher, which signals the ranks
            )
        except OSError as error:
            raise InputError(f"{login.ssh[0]} cannot be run here: {error.strerror}") from None
        self._closed = threading.Event()
        self._lock = threading.Lock()  # one order at a time
        self._ending = threading.Lock()  # killed or reaped, not both at once
        self._threads = [threading.Thread(target=each) for each in (self._listen, self._ping)]
        for thread in self._threads:
            thread.start()

    def start(self, share: Share) -> None:
        self.order({"do": "start", "share": asdict(share)})

    def signal(self, number: int) -> None:
        self.order({"do": "signal", "number": int(number)})

    def order(self, order: dict[str, Any]) -> None:
        """Send an order. Does not fail: a lost host puts Gone itself."""
        assert self._process.stdin
        with self._lock, suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the agent and its remaining ranks; the connection is killed after _CLOSE_S."""
        self._closed.set()
        assert self._process.stdin and self._process.stdout
        with self._lock, suppress(OSError):
            self._process.stdin.close()
        has_ended(self._process, _CLOSE_S)
        self._kill()
        for thread in self._threads:
            thread.join()
        self._process.stdout.close()
        self._errors.close()

    def _kill(self) -> None:
        """Kill ssh and its children: a ProxyCommand, say, may hold the output pipe open."""
        with self._ending:
            kill_group(self._process)

    def _ping(self) -> None:
        """Ping the agent, and kill a connection that has been silent for too long."""
        while not self._closed.wait(PING_S):
            if self._is_here and time.monotonic() - self._heard > SILENT_S:
                self._why = f"silent for {SILENT_S} s"
                self._kill()
            if self._is_here:
                self.order({"do": "ping"})

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._heard = time.monotonic()
            with suppress(ValueError):  # greeting of a login shell
                self._hear(json.loads(line))
        # WNOWAIT does not reap the process, so its pid is not reused.
        wait_for(self._process)
        with self._ending:
            kill_group(self._process)
            code = self._process.wait()
        if self._closed.is_set():
            return
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()[-20:]
        if self._is_here:
            self.gone = self._why or why_gone(code, said)
        else:
            login = self._login
            self.gone = why_not(code, said, folder=login.folder, python=login.python)
        self._events.put(Gone(self._name, self.gone))

    def _hear(self, message: Any) -> None:
        match message:
            case {"is": "leaving"}:
                self._why = f"its agent was told to end, by {signal.SIGTERM.name} say"
            case {"is": "hello", "addresses": addresses}:
                self._is_here, self.address = True, next(iter(addresses), "")
        if (event := event_of(message, self._name)) is not None:
            self._events.put(event)


def why_not(code: int, said: Sequence[str], *, folder: str, python: str) -> str:
    """The reason why no agent runs there, from ssh's exit code and stderr lines."""
    last = said[-1].strip() if said else ""
    if code == _NO_FOLDER:
        return f"there is no directory {folder} there: name it by --folder, or copy this by --sync"
    if code == _NO_PYTHON:
        return f"there is no {python} there: name its Python by --python"
    if code == _SSH_FAILED:
        found = (why for words, why in _LOGIN_FAILURES.items() if re.search(words, " ".join(said)))
        return f"{next(found, 'ssh failed')} ({last or 'ssh says nothing'})"
    if _NO_MODULE.search(" ".join(said)):
        return f"{python} there has no such trainyard: install it, or name another Python"
    return f"{python} there ended with exit code {code}: {last or 'it says nothing'}"


def why_gone(code: int, said: Sequence[str]) -> str:
    """The reason why an established connection ended."""
    last = said[-1].strip() if said else "connection closed"
    return last if code == _SSH_FAILED else f"its agent ended with exit code {code} ({last})"
