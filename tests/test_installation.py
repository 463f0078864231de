"""The distribution is `trainyard-images`; `trainyard` on the package index is a stranger's."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.command_line import Capture, run
from trainyard import installation
from trainyard.installation import VERSION

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].keys()
STRANGER = re.compile(
    r"\b(?:pip3?|pipx|uvx?|conda|poetry)\b[^`\n;&|]*(?<!uninstall)[ '\"]trainyard(?![\w/-])"
    r"|(?<![\w-])trainyard(?:\\?\[|[=<>~]=)"  # a requirement
    r"|\b(?:version|distribution|metadata|requires)\(['\"]trainyard['\"]\)"
    r"|^name = \"trainyard\"$",
    re.MULTILINE,
)


def texts() -> dict[str, str]:
    """The files of the repository that are text, but this one."""
    command = ["git", "-C", str(ROOT), "grep", "-I", "--name-only", "--untracked", "trainyard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        name: (ROOT / name).read_text() for name in names if name != "tests/test_installation.py"
    }


def test_nothing_in_the_repository_installs_the_stranger() -> None:
    found = {name: STRANGER.findall(text) for name, text in texts().items()}
    assert len(found) > 500
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_every_extra_that_is_named_exists() -> None:
    """pip ignores an extra that a distribution lacks, and installs nothing for it."""
    named = set()
    for name, text in texts().items():
        for extras in re.findall(r"trainyard-images\\?\[([a-z0-9,]+)", text):
            named |= {(name, extra) for extra in extras.split(",")}
        if name.startswith("trainyard/") and name.endswith(".py"):
            named |= {(name, extra) for extra in re.findall(r"install_hint\(['\"](\w+)", text)}
    assert named
    assert {(name, extra) for name, extra in named if extra not in EXTRAS} == set()


def test_the_name_of_the_project_is_the_one_in_hints() -> None:
    assert PROJECT["name"] == installation.DISTRIBUTION
    assert f"'{PROJECT['name']}[onnx]'" in installation.install_hint("onnx")


def test_nothing_installs_it_anew_from_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where anybody may take its name. Extras are installed beside what is there."""
    card = (ROOT / "trainyard" / "export" / "card.md.jinja").read_text()
    assert "pip install" not in card
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "trainyard" / "installation.py"))
    (tmp_path / "trainyard-0.0.3.dist-info").mkdir()
    for text in (installation.NEEDS_EXTENSION, installation.remark_on_other_distribution()):
        assert text and not re.search(rf"pip install [^;`]*{installation.DISTRIBUTION}", text)


# --- another distribution in the same folder ---


@pytest.mark.parametrize("version", ["0.0.3", "0.2.0"])
def test_a_distribution_that_shares_the_package_folder_is_named_first(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The stranger's, or our own of before the renaming: each overwrites files of the other."""
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "trainyard" / "installation.py"))
    (tmp_path / f"trainyard-{version}.dist-info").mkdir()
    (tmp_path / "trainyard_images-0.2.0.dist-info").mkdir()
    assert run("train", "no-such-recipe") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in first and f"'trainyard' {version}" in first
    assert "no-such-recipe" in second


def test_trainyard_alone_begins_without_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "trainyard" / "installation.py"))
    (tmp_path / "trainyard_images-0.2.0.dist-info").mkdir()
    assert installation.remark_on_other_distribution() is None


def test_one_line_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "trainyard" / "installation.py"))
    (tmp_path / "trainyard-0.0.3.dist-info").mkdir()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        run("--version")
    assert capsys.readouterr().err == ""


# --- the version stands in several files, which a release changes together ---


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
