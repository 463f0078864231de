"""A terminal of 80 columns: no command prints a longer line."""

import re
import shutil
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, run

COLUMNS = 80
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

ESTIMATE = ("estimate", "resnet50-16ep", "--device", "h100-sxm", "--nodes", "1,2,512")
COMMANDS: list[tuple[str, ...]] = [
    ("evaluate", "RUN", "--per-class", "5", "--confusions", "5", "--flip", "--data", "DATA"),
    ("predict", "RUN", "DATA/val/3"),
    ("export", "RUN", "weights.safetensors"),
    ("report", "RUN"),
    ("recipes",),
    ("recipes", "--keys"),
    ("recipes", "digits", "--params"),
    ("data", "verify", "DATA"),
    ("data", "show", "DATA"),
    ("data", "index", "DATA"),
    ESTIMATE,
    ("doctor",),
]


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal") / "run"
    options = ("--model.ema_decay", "0.9", *SHORT, "--json")
    assert run("train", "debug", "--data", digits, "--run", folder, *options) == 0
    return folder


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_line_is_longer_than_the_terminal(
    words: tuple[str, ...],
    trained: Path,
    digits: Path,
    tmp_path: Path,
    *,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Folders have short names here: a name is never cut."""
    monkeypatch.chdir(tmp_path)
    Path("RUN").symlink_to(trained)
    shutil.copytree(digits, "DATA")  # an index is saved there
    for name, value in {"COLUMNS": f"{COLUMNS}", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    capsys.readouterr()
    assert run(*words) == 0
    said = capsys.readouterr()
    lines = re.split(r"[\r\n]", STYLE.sub("", said.out + said.err))
    assert any(line.strip() for line in lines)
    assert [line for line in lines if len(line) > COLUMNS] == []
