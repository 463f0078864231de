"""What a command says before its work."""

import atexit
import gc
import sys

import pytest

from tests.command_line import Capture, run
from trainyard.cli import train
from trainyard.cli.options import loading


@pytest.mark.parametrize(("options", "line"), [((), "loading torch"), (("--quiet",), "")])
def test_a_terminal_shows_a_line_before_torch_is_loaded(
    options: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def heard(_: object) -> None:
        assert line in capsys.readouterr().err
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "config_of", heard)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run("train", "digits", *options) == 130


def test_garbage_is_collected_again_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(atexit, "register", lambda _: None)
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
