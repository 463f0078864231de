"""Ctrl-C before and after a command's own work: one line, or none, and never a traceback."""

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

from trainyard import interrupts

DURING_AN_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *others):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

from trainyard.__main__ import command
sys.meta_path.insert(0, Interrupting())
command()
"""
AT_THE_END = """
import atexit, os, signal
from trainyard.__main__ import command
atexit.register(os.kill, os.getpid(), signal.SIGINT)
command()
"""


def ended(program: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    words = [sys.executable, "-c", program, "recipes"]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["trainyard.streams", "argparse", "trainyard.cli.recipes"])
def test_while_modules_are_imported(module: str) -> None:
    assert ended(DURING_AN_IMPORT.format(module=module)) == (130, "trainyard: interrupted\n")


def test_in_a_callback_at_the_end_of_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised there: one of 60 Ctrl-C while a command started was lost."""
    monkeypatch.setattr(interrupts, "were_raised", False)
    program = "def cb(_):\n    signal.raise_signal(signal.SIGINT)"
    names: dict[str, Any] = {"signal": signal}
    exec(compile(program, "<frozen importlib._bootstrap>", "exec"), names)
    lock = {1}
    reference = weakref.ref(lock, names["cb"])
    before = signal.signal(signal.SIGINT, interrupts.raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            del lock
            while True:
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert reference() is None


@pytest.mark.parametrize(("launcher", "code"), [({}, 0), ({"TRAINYARD_LAUNCHER": "1"}, 130)])
def test_where_the_signal_is_ignored_by_a_shell(launcher: dict[str, str], code: int) -> None:
    """Agents of a Ray that was started so passed over a Ctrl-C while they started: 300 s."""
    program = DURING_AN_IMPORT.format(module="argparse")
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + program
    environment = {**os.environ, **launcher}
    assert ended(ignoring, environment)[0] == code


def test_while_the_interpreter_ends() -> None:
    """The run is saved and has printed so: a second Ctrl-C then was a traceback."""
    assert ended(AT_THE_END) == (0, "")


LOADING_TORCH = """
import os, signal, sys, types
from importlib.machinery import ModuleSpec
from trainyard import __main__, command_line

def load(arguments=None):
    torch = sys.modules["torch"] = types.ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.__spec__._initializing = True
    try:
        os.kill(os.getpid(), signal.{name})
    except BaseException as error:  # in C++ it would be std::terminate, and SIGABRT
        print("raised", repr(error), file=sys.stderr)

command_line.main = load
__main__.command()
"""


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [("SIGINT", 130, "trainyard: interrupted\n"), ("SIGTERM", -15, ""), ("SIGUSR1", -10, "")],
)
def test_no_exception_inside_the_import_of_torch(name: str, code: int, line: str) -> None:
    """Seen once in some twenty Ctrl-C during start-up: "terminate called", exit code 134."""
    assert ended(LOADING_TORCH.format(name=name)) == (code, line)
