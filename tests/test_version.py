"""The version stands in several files, which a release changes together."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.command_line import run

ROOT = Path(__file__).parent.parent


def test_every_file_has_the_version_of_pyproject() -> None:
    held = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = re.search(r"^## (\d\S*), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading.groups() == (held, str(cited["date-released"]))
    assert cited["version"] == held


def test_the_command_prints_the_installed_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"trainyard {version('trainyard')}\n"
