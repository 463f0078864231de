"""Limits of the system, and a working directory that is gone: one line, and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import tiered

pytestmark = pytest.mark.slow

SAID = {"-v 600000": "ulimit -v", "-f 0": "TMPDIR", "-n 16": "ulimit -n", "-f 100": "ulimit -f"}


def run(script: str, digits: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", "-m", "trainyard", "train", "debug", "--data", str(digits)]
    words += ["--run", str(folder / "run"), "--run.length", "2 steps", "--data.threads", "1"]
    return subprocess.run(
        ["bash", "-c", f'{script} && exec "$@"', "sh", *words],
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("limit", tiered(SAID, night=["-v 600000", "-f 0"]))
def test_a_limit_is_named(limit: str, digits: Path, tmp_path: Path) -> None:
    """These were tracebacks of torch, subprocess and tempfile; the last gave wrong advice."""
    ended = run(f"ulimit {limit}", digits, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert SAID[limit] in ended.stderr


def test_a_working_directory_that_was_removed(digits: Path, tmp_path: Path) -> None:
    """A library of torch's said that it could not load another one."""
    gone = tmp_path / "gone"
    gone.mkdir()
    ended = run(f"cd '{gone}' && rmdir '{gone}'", digits, tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
