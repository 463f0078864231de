"""Loader processes that are copies of one that has imported all they need, in tests.

A start of Python costs 0.3 s of a processor, and a run of two steps starts two loaders. A copy has
the parent, session, folder, variables and descriptors of a real one. It is no copy of the trainer,
whose open files and caches a loader must not have.
"""

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from trainyard.children import SAFE_PATH
from trainyard.data.loader import loader
from trainyard.data.loader.spec import ENDING_SIGNALS

MODULES = ("trainyard.data.loader.process", "trainyard.data.stream.process")
REAL = SimpleNamespace(is_wanted=False)
"""Whether loaders start as they do for users."""
_MOST = 2**17  # bytes of a request
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "OPENBLAS", "OMP")
"""Variables that count before a loader's first line of code: with others it starts for real."""


class Copied(subprocess.Popen[bytes]):
    """A loader process, as subprocess.Popen starts it."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        *python, module, channel, memory = command
        host = None if REAL.is_wanted else _host()
        if host is None or python != [sys.executable, *SAFE_PATH, "-m"]:
            super().__init__(command, **options)
            return
        messages, theirs = os.pipe()
        try:
            self.pid = _ask(host, module, int(channel), int(memory), theirs)
        finally:
            os.close(theirs)
        self.args, self.returncode = command, None
        self.stdin = self.stdout = None
        self.stderr = os.fdopen(messages, "rb")
        self._waitpid_lock = threading.Lock()
        self._child_created, self._sigint_wait_secs = True, 0.25
        self._communication_started = False


def install() -> None:
    """From now on loaders of this process are copies of one that it starts."""
    _host()
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    vars(loader)["subprocess"] = SimpleNamespace(Popen=Copied, **names)


def install_in_fork() -> None:
    """The same in a process that a fork server made: a copy of it, as it is now, is their model."""
    if _CLONE is None or os.getpid() in _hosts:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        gc.freeze()  # else what is no longer used closes descriptors that are others by then
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _serve(theirs)
    theirs.close()
    _hosts[os.getpid()] = _at_start(), ours
    install()


Variables = dict[str, str]
_hosts: dict[int, tuple[Variables, socket.socket]] = {}
"""By the process that they copy themselves for: the variables they began with, and a channel."""


def _at_start() -> Variables:
    return {name: value for name, value in os.environ.items() if name.startswith(_AT_START)}


def _host() -> socket.socket | None:
    """The process that copies itself for this one, which it ends with; None if it cannot."""
    if _CLONE and os.getpid() not in _hosts:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        words = [sys.executable, *SAFE_PATH, "-m", "tests.loaders", str(theirs.fileno())]
        with theirs:
            theirs.set_inheritable(True)
            os.posix_spawn(words[0], words, os.environ | path)
        atexit.register(ours.close)
        _hosts[os.getpid()] = _at_start(), ours
    variables, host = _hosts.get(os.getpid(), ({}, None))
    return host if variables == _at_start() else None


def _ask(host: socket.socket, module: str, *descriptors: int) -> int:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    request = pickle.dumps((module, os.getcwd(), dict(os.environ), set(blocked)))
    socket.send_fds(host, [request], [*descriptors, 1])
    return int(host.recv(99))


# --- the process that copies itself ---


def _serve(requests: socket.socket) -> None:
    for module in MODULES:
        importlib.import_module(module)
    os.setsid()
    os.closerange(3, requests.fileno())
    os.closerange(requests.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST, 4)
        if not request:
            os._exit(0)
        pid = _copy()
        if pid == 0:
            requests.close()
            _run(descriptors, *pickle.loads(request))
        requests.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _copy() -> int:
    """Fork, to a child of this process's parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _run(
    descriptors: list[int], name: str, folder: str, variables: dict[str, str], blocked: set[int]
) -> None:
    channel, memory, messages, output = descriptors
    os.setsid()
    os.dup2(messages, 2)
    os.dup2(output, 1)
    os.close(messages)
    os.close(output)
    os.chdir(folder)
    coerced = {name: text for name, text in os.environ.items() if name == "LC_CTYPE"}
    os.environ.clear()
    os.environ.update(coerced | variables)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        module: Any = importlib.import_module(name)
        module.run(channel, memory, module._serve)
    finally:
        os._exit(1)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
