"""The command line run in this process."""

import json
from pathlib import Path

import pytest

from trainyard.command_line import main

SHORT = ("--run.length", "2 steps", "--run.log_every", "1 steps", "--data.threads", "1")
"""Options of a run that is over in a second."""

Capture = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    """The exit code of a command."""
    return main([str(argument) for argument in arguments])


def shown(capsys: Capture, *arguments: object) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    assert run(*arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def complaint(capsys: Capture, *arguments: object) -> str:
    """The message of a command that refuses its input: one or two lines, exit code 2.

    With --json it is on stdout too.
    """
    capsys.readouterr()
    assert run(*arguments) == 2
    said = capsys.readouterr()
    if "--json" in arguments:
        told = json.loads(said.out)["error"]["message"]
        assert said.err == f"trainyard: {told}\n"
    else:
        assert said.out == ""
    assert said.err.startswith("trainyard: ")
    assert said.err.count("\n") <= 2
    return said.err


def newest(run_folder: Path) -> Path:
    """The newest checkpoint of a run."""
    return (run_folder / "checkpoints" / "latest").resolve()
