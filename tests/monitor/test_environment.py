"""The commit in a run's environment.json is that of Trainyard, or none."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainyard.monitor import environment


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def state(repository: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The commit of a Trainyard that lies in a folder of a repository."""
    module = repository / package / "trainyard" / "monitor" / "environment.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(environment, "__file__", str(module))
    return environment.describe_environment()["git"]


def test_the_commit_is_not_that_of_the_users_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment inside of the user's repository gave the user's commit, as "altered"."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "mine")
    packages = ".venv/lib/python3.12/site-packages"
    assert state(tmp_path, packages, monkeypatch) is None
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert state(tmp_path, ".", monkeypatch) == {"commit": commit, "altered": True}
