"""A terminal of 80 columns: no command prints a longer line, and each prints something at once."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, run

COLUMNS = 80
FIRST_S = 3.0  # 0.3 s on an idle machine; torch takes longer to load even there
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

ESTIMATE = ("estimate", "resnet50-16ep", "--device", "h100-sxm", "--gpus", "8,16,4096")
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
    ("bench", "loader", "DATA"),
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
    for name, folder in {"RUN": trained, "DATA": digits}.items():
        Path(name).symlink_to(folder)
    for name, value in {"COLUMNS": f"{COLUMNS}", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    capsys.readouterr()
    assert run(*words) == 0
    said = capsys.readouterr()
    lines = re.split(r"[\r\n]", STYLE.sub("", said.out + said.err))
    assert any(line.strip() for line in lines)
    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.mark.parametrize(
    "words",
    [
        ("train", "debug", "--run", "run"),
        ("recipes", "digits", "--params"),
        ("launch", "local", "debug", "--ranks", "2", "--run", "run"),
    ],
    ids=" ".join,
)
def test_a_line_comes_before_torch_is_loaded(words: tuple[str, ...], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    start = time.monotonic()
    command = [sys.executable, "-m", "trainyard", *words]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=tmp_path)
    try:
        os.close(theirs)
        said = os.read(ours, 100).decode()
        assert "load" in said
        assert time.monotonic() - start < FIRST_S
    finally:
        process.kill()
        process.wait()
        os.close(ours)
