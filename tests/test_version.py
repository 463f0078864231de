"""The version stands in several files, which a release changes together."""

import re
from pathlib import Path

import pytest
import yaml

from tests.command_line import run
from trainyard.installation import VERSION

ROOT = Path(__file__).parent.parent


def test_every_file_has_the_version_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = re.search(r"^## (\d\S*), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading.groups() == (VERSION, str(cited["date-released"]))
    assert cited["version"] == VERSION


def test_the_command_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"trainyard {VERSION}\n"
