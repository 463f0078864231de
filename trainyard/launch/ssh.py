"""A run on several hosts by ssh: `trainyard launch agent` on each (see agent.py, joining.py).

The agents find each other, and lost hosts, by themselves. An ssh connection carries the output of a
host to this process, and signals to the host: a number on a line. A host whose connection ends
leaves the run after a checkpoint; there is no other sign of life, so a launcher may sleep.
"""

import argparse
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import IO

from trainyard.arguments import positive
from trainyard.children import kill_group, wait_for
from trainyard.errors import STOPS, InputError, TrainyardError
from trainyard.launch.exit_codes import GRACE_S, LEFT, first_cause, is_stop
from trainyard.launch.hosts import GivenHost, read_hosts
from trainyard.launch.job import Job, Say, passed_on, shown
from trainyard.launch.launcher import (
    Launcher,
    add_ranks,
    add_restarts,
    add_wait,
    record_of,
)
from trainyard.launch.output import Printer
from trainyard.launch.signals import REQUEUE_SIGNALS, handling, next_event, stopped_by
from trainyard.printable import how_many, print_line

READY = "@trainyard-agent "
"""Begins an agent's first line, which ends with the endpoint of the store if it is there."""
_LOST = 255, LEFT  # ssh has lost the host, or the host goes down
_RETRY_S, _LOOK_S = 2.0, 0.2
_NOTICE_S = 10.0  # for agents to notice that another one has ended
_READ_S = 5.0  # for the last output; a ProxyCommand may hold the pipe open
_OPTIONS = (
    "BatchMode=yes",  # ssh must not prompt
    "ConnectTimeout=10",
    "ServerAliveInterval=30",  # a network may be away for ten minutes
    "ServerAliveCountMax=20",
    "ControlMaster=no",
)
_NOT_COPIED = ("--filter=:- .gitignore", "--exclude=.git")
_NO_RSYNC = (127, 12)  # exit codes if the remote rsync does not answer


class Ssh(Launcher):
    summary = "hosts that you can log in to"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        where = parser.add_argument_group("where to train")
        add_ranks(where, "each host")
        add = where.add_argument
        add(
            "--hosts",
            required=True,
            metavar="A,B:4|FILE",
            help="names that ssh knows, user@a, a:4 for 4 ranks, or a file of these with one a "
            "line",
        )
        add("--folder", metavar="DIR", help="working directory there (as this one)")
        add("--python", metavar="PATH", help="the Python there (at this one's path)")
        add("--ssh", metavar="COMMAND", default="ssh", help="such as 'ssh -p 2222'")
        add("--ssh-config", metavar="FILE", help="in place of ~/.ssh/config")
        add("--master-addr", metavar="ADDRESS", help="of the first host, for the others")
        add("--sync", action="store_true", help="copy this directory there first, by rsync")
        text = "go on without hosts that are gone, after a restart"
        add("--min-hosts", type=positive, metavar="N", help=text)
        add_restarts(where)
        add_wait(where, "a host to come back, before a restart")

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        ssh = _options(options)
        commands = [agent_command(job, ssh, number, "RUN") for number in range(len(ssh.hosts))]
        return "".join(f"{shown(command)}\n" for command in commands)

    def run(self, job: Job, options: argparse.Namespace) -> int:
        ssh = _options(options)
        if options.sync:
            print_line(f"copying this directory to {how_many(len(ssh.hosts), 'host')}")
            sync(ssh.hosts, ssh.login)
        return launch_ssh(job, ssh, print_line)


@dataclass(frozen=True)
class Login:
    """The ssh command, and the folder and Python on the hosts."""

    ssh: tuple[str, ...]
    """The ssh command with the user's options."""
    folder: str
    """Working directory on the hosts."""
    python: str

    @property
    def command(self) -> tuple[str, ...]:
        """The ssh words before the host."""
        return (*self.ssh, "-T", *(word for option in _OPTIONS for word in ("-o", option)))


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    hosts: Sequence[GivenHost]
    login: Login
    ranks: int | None = None
    """Ranks per host without a number of its own; by default one per GPU, or one."""
    gpus: int | None = None
    """GPUs that each host must have."""
    restarts: int = 0
    min_hosts: int | None = None
    """The run goes on with so many hosts; all, if not given."""
    master_addr: str | None = None
    wait_s: int = 300
    """Seconds to wait for a lost host to come back."""
    is_json: bool = False


def _options(options: argparse.Namespace) -> SshOptions:
    if options.min_hosts and not options.restarts:
        raise InputError(
            "launch.min-hosts-without-restarts",
            "--min-hosts needs --restarts: a lost host uses up one of them",
        )
    config = ("-F", options.ssh_config) if options.ssh_config else ()
    login = Login(
        ssh=(*shlex.split(options.ssh), *config),
        folder=options.folder or os.getcwd(),
        python=options.python or Job.python,
    )
    hosts = read_hosts(options.hosts)
    return record_of(SshOptions, options, hosts=hosts, login=login, is_json=options.json)


def agent_command(job: Job, options: SshOptions, number: int, run: str) -> list[str]:
    """The command that runs the agent of a host, the first of which has number 0."""
    host, login = options.hosts[number], options.login
    agent = replace(job, python=login.python).of_agent(
        hosts=f"{options.min_hosts or len(options.hosts)}:{len(options.hosts)}",
        run_id=f"{run}-{number}",
        restarts=options.restarts,
        wait=options.wait_s,
        gpus=options.gpus if host.slots is None else None,
        ranks=host.slots or options.ranks,
        listen=(options.master_addr or "") if number == 0 else None,
    )
    folder = shlex.quote(login.folder)
    script = f"cd {folder} || exit {InputError.exit_code}; exec {shlex.join(agent.command)}"
    return [*login.command, "--", host.target, script]


def launch_ssh(job: Job, options: SshOptions, say: Say) -> int:
    """Run a job on several hosts. Returns the exit code of the run."""
    printer = Printer((host.name for host in options.hosts), as_they_are=options.is_json)
    run, token = Run(options, printer, say), token_hex(8)
    hosts = [
        Connection(number, agent_command(job, options, number, token), run)
        for number in range(len(options.hosts))
    ]
    try:
        with handling(STOPS, lambda number, frame: run.events.put(number)):
            return _await(hosts, run)
    finally:
        run.is_over.set()
        for host in hosts:
            host.kill()


class Run:
    """Options, events and output of all hosts."""

    def __init__(self, options: SshOptions, printer: Printer, say: Say) -> None:
        self.options, self.printer, self.say = options, printer, say
        self.endpoint = ""
        self.is_met = threading.Event()
        """Set once the endpoint of the store is known."""
        self.is_over = threading.Event()
        """Set once hosts are not started again."""
        self.events: queue.SimpleQueue[Connection | int] = queue.SimpleQueue()
        """Hosts that have ended, and numbers of signals."""


def _await(hosts: "Sequence[Connection]", run: Run) -> int:
    """Wait for the end of all hosts, and end the others with the first that matters."""
    received: int | None = None
    codes: dict[int, int] = {}
    left = list(hosts)  # those whose end has not been handled
    to_send: list[tuple[float, int]] = []  # times, and numbers of signals

    def end_others(*waits_s: float) -> None:
        run.is_over.set()
        numbers = (signal.SIGINT, signal.SIGKILL)[-len(waits_s) :]
        to_send[:] = to_send or [
            (time.monotonic() + sum(waits_s[: position + 1]), number)
            for position, number in enumerate(numbers)
        ]

    while left:
        limit_s = max(to_send[0][0] - time.monotonic(), 0) if to_send else math.inf
        try:
            event = next_event(run.events, limit_s)
        except queue.Empty:
            event = to_send.pop(0)[1]
            for host in left:
                host.signal(event)
            continue
        if isinstance(event, int):
            received = event
            end_others(GRACE_S + _NOTICE_S)
            for host in left:  # SIGTERM would mean that this host leaves the run
                host.signal(event if event in REQUEUE_SIGNALS else signal.SIGINT)
            continue
        left.remove(event)
        if event.is_left_out(len(left)):
            run.say(f"going on without host {event.name}")
        else:
            if event.code not in _LOST or not codes:  # else it was lost while all end
                codes[event.number] = event.code_of_run
            is_saving = event.code and is_stop(event.code)
            end_others(GRACE_S if is_saving else _NOTICE_S, GRACE_S if event.code else _NOTICE_S)
    _, code = first_cause(codes)
    return stopped_by(received).exit_code if received and code and is_stop(code) else code


class Connection:
    """A host by ssh, from a thread of its own; it is tried again if it is lost.

    `code` is the exit code of its agent, or of ssh, once it has ended for good.
    """

    code: int | None = None

    def __init__(self, number: int, command: Sequence[str], run: Run) -> None:
        self.number, self.name = number, run.options.hosts[number].name
        self._command, self._run = command, run
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = self._is_ready = False
        self._why = ""  # the last line on stderr
        self._lock = threading.Lock()  # killed or reaped, not both at once
        threading.Thread(target=self._keep, daemon=True).start()

    @property
    def code_of_run(self) -> int:
        """The exit code of a run that ends because of this host."""
        assert self.code is not None
        if self.code not in _LOST:
            return self.code
        return TrainyardError.exit_code if self._was_ready else InputError.exit_code

    def is_left_out(self, num_left: int) -> bool:
        """True if the run goes on without this host, on those that are left."""
        low = self._run.options.min_hosts
        is_lost = self.code in _LOST and self._was_ready and not self._run.is_over.is_set()
        return is_lost and self.number > 0 and low is not None and num_left >= low

    def signal(self, number: int) -> None:
        """Have the agent signal its ranks; SIGKILL is for ssh, and makes the host leave the run."""
        if number == signal.SIGKILL:
            self.kill()
        else:
            self._send(f"{int(number)}")

    def kill(self) -> None:
        """Kill ssh and its children: a ProxyCommand, say, may hold the output pipe open."""
        with self._lock:
            if self._process is not None:
                kill_group(self._process)

    def _keep(self) -> None:
        run, give_up_at = self._run, 0.0
        while True:
            code = self._connect()
            is_first, now = self.number == 0, time.monotonic()
            if code not in _LOST or run.is_over.is_set():
                break
            if not self._was_ready:
                run.say(f"host {self.name}: ssh has failed: {self._why}")
                break
            if self._is_ready:
                more = "the others meet there: give the command again" if is_first else ""
                run.say(f"host {self.name} is gone: {more or self._why}")
                give_up_at = now + run.options.wait_s
            if is_first or now > give_up_at or run.is_over.wait(_RETRY_S):
                break
        self.code = code
        run.events.put(self)

    def _connect(self) -> int:
        """Run the agent once. Returns its exit code, or ssh's 255."""
        self._is_ready = False
        try:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C and Ctrl-Z are for the launcher
            )
        except OSError as error:
            self._why = f"{self._command[0]} cannot be run here: {error.strerror}"
            return 255
        assert process.stdin and process.stdout and process.stderr
        streams = ((process.stdout, False), (process.stderr, True))
        readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        self._send_settings()
        wait_for(process)  # without reaping, so that its pid is not reused
        self.kill()
        with self._lock:
            code = max(process.wait(), -1) % 256  # 255 also if ssh was killed
        for reader in readers:
            reader.join(_READ_S)
        with suppress(OSError):  # what could not be sent any more
            process.stdin.close()
        return code

    def _send_settings(self) -> None:
        run = self._run
        while self.number > 0 and not run.is_met.wait(_LOOK_S):
            if run.is_over.is_set():  # the first host has failed
                self.kill()
                return
        self._send(json.dumps({"endpoint": run.endpoint, "variables": passed_on(os.environ)}))

    def _read(self, stream: IO[bytes], is_error: bool) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\r\n")
                if text.startswith(READY):
                    self._is_ready = self._was_ready = True
                    if self.number == 0 and not self._run.is_met.is_set():
                        self._run.endpoint = text.removeprefix(READY)
                        self._run.is_met.set()
                    continue
                self._why = text if is_error and text else self._why
                self._run.printer.line(self.name, text, is_error=is_error)

    def _send(self, line: str) -> None:
        assert self._process and self._process.stdin
        with suppress(OSError, ValueError):  # the connection has ended
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()


def sync(hosts: Sequence[GivenHost], login: Login) -> None:
    """Copy the working directory to all hosts, except .git and files that .gitignore names.

    Nothing is deleted there. InputError, with a line for each host where it failed.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(hosts)) as pool:
        copied = pool.map(lambda host: _copy(host, login), hosts)
        problems = [
            f"host {host.name}: {why}" for host, why in zip(hosts, copied, strict=True) if why
        ]
    if problems:
        raise InputError("launch.sync-failed", "{reason}", reason="; ".join(problems))


def _copy(host: GivenHost, login: Login) -> str | None:
    """Copy to one host. Returns the reason of a failure, else None."""
    user, at, name = host.target.rpartition("@")
    target = f"{user}{at}[{name}]" if ":" in name else host.target
    make_folder = f"mkdir -p {shlex.quote(login.folder)} && rsync"
    command = [
        "rsync",
        "-az",
        "--rsync-path",
        make_folder,
        *_NOT_COPIED,
        "-e",
        shlex.join(login.command),
    ]
    try:
        done = subprocess.run(
            [*command, "--", "./", f"{target}:{login.folder}/"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise InputError(
            "launch.needs-rsync", "--sync needs rsync here: {reason}", reason=error.strerror
        ) from None
    first_line = done.stderr.strip().partition("\n")[0]
    hint = ": is it installed there?" if done.returncode in _NO_RSYNC else ""
    return f"rsync failed ({first_line}){hint}" if done.returncode else None
