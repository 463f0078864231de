"""What a command says before its work."""

import pytest

from tests.command_line import Capture, run
from trainyard.commands import train


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
