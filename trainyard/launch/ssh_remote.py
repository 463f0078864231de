"""A host's agent, through an ssh connection."""

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.children import has_ended, kill_group
from trainyard.errors import InputError
from trainyard.launch.events import Events, Gone, event_of
from trainyard.launch.hosts import GivenHost
from trainyard.launch.ranks import Share
from trainyard.launch.ssh_check import NO_FOLDER, NO_PYTHON, why_gone, why_not

SILENT_S = 8
"""Seconds without an answer to a ping after which a host counts as gone."""
_CLOSE_S = 5
_OPTIONS = (
    "BatchMode=yes",  # ssh must not prompt
    "ConnectTimeout=10",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
    "ControlMaster=no",
)
_SCRIPT = (
    f'cd "$1" 2>/dev/null || exit {NO_FOLDER}; '
    f'command -v "$2" >/dev/null || exit {NO_PYTHON}; '
    'exec "$2" -m trainyard.launch.agent'
)


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


class Remote:
    """A host's agent; its messages become events.

    The first event is an Answer with the host's facts. If the agent does not start or is lost, the
    last event is Gone, and `gone` holds the reason.
    """

    def __init__(self, host: GivenHost, login: Login, events: Events) -> None:
        self.host, self.address = host, ""
        self._login, self._events = login, events
        self._said: deque[str] = deque(maxlen=20)
        self._is_here = self._is_closed = False
        self._why = self.gone = ""
        self._heard = time.monotonic()
        try:
            self._process = subprocess.Popen(
                login.agent_of(host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the launcher, which signals the ranks
            )
        except OSError as error:
            raise InputError(f"{login.ssh[0]} cannot be run here: {error.strerror}") from None
        self._lock = threading.Lock()  # one order at a time
        self._ending = threading.Lock()  # killed or reaped, not both at once
        self._threads = [threading.Thread(target=each) for each in (self._listen, self._note)]
        for thread in reversed(self._threads):  # _listen joins _note
            thread.start()

    @property
    def name(self) -> str:
        return self.host.name

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

    def ping(self) -> None:
        """Send a ping, and kill a connection that has been silent for too long."""
        if not self._is_here:
            return
        if time.monotonic() - self._heard > SILENT_S:
            self._why = f"silent for {SILENT_S} s"
            self._kill()
        self.order({"do": "ping"})

    def close(self) -> None:
        """End the agent and its remaining ranks; the connection is killed after _CLOSE_S."""
        self._is_closed = True
        assert self._process.stdin and self._process.stdout and self._process.stderr
        with self._lock, suppress(OSError):
            self._process.stdin.close()
        has_ended(self._process, _CLOSE_S)
        self._kill()
        for thread in self._threads:
            thread.join()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()

    def _kill(self) -> None:
        """Kill ssh and its children: a ProxyCommand, say, may hold the output pipe open."""
        with self._ending:
            kill_group(self._process)

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._heard = time.monotonic()
            with suppress(ValueError):  # greeting of a login shell
                self._hear(json.loads(line))
        # WNOWAIT does not reap the process, so its pid is not reused.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            kill_group(self._process)
            code = self._process.wait()
        if self._is_closed:
            return
        self._threads[1].join()  # until all of ssh's stderr is read
        if self._is_here:
            why = self._why or why_gone(code, self._said)
        else:
            login = self._login
            why = why_not(code, self._said, folder=login.folder, python=login.python)
        self.gone = why
        self._events.put(Gone(self.name, why))

    def _note(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())

    def _hear(self, message: Any) -> None:
        match message:
            case {"is": "leaving"}:
                self._why = f"its agent was told to end, by {signal.SIGTERM.name} say"
            case {"is": "hello", "addresses": addresses}:
                self._is_here, self.address = True, next(iter(addresses), "")
        if (event := event_of(message, self.name)) is not None:
            self._events.put(event)
