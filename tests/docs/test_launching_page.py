"""docs/launching.md and the Dockerfile name all launchers, starters and files."""

import re
import tomllib

from tests.docs.pages import DOCS, ROOT, commands, subparsers
from trainyard.command_line import _parser
from trainyard.distributed.launcher_variables import STARTERS

PAGE = (DOCS / "launching.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_every_launcher_has_a_command() -> None:
    given = [command.split() for command in commands(DOCS / "launching.md")]
    launchers = {words[2] for words in given if words[1] == "launch"}
    known = subparsers(subparsers(_parser())["launch"])
    assert launchers == known.keys() - {"agent"}  # pods run it
    assert {"train", "doctor"} <= {words[1] for words in given}


def test_every_starter_is_in_the_table() -> None:
    table = PAGE.split("## How a world is found")[1].split("##")[0]
    for starter in STARTERS:
        assert f"`{starter.variables['rank']}`" in table


def test_what_the_dockerfile_copies_is_there() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = {name for names in copied for name in names.split()}
    assert names
    for name in names:
        assert (ROOT / name).exists()
    # Docker gets these files and nothing else.
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == names
    assert ignored[0] == "*"


def test_the_dockerfile_names_what_the_project_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'^ARG EXTRAS="(.*)"$', DOCKERFILE, re.MULTILINE)
    assert set(extras.split()) <= project["optional-dependencies"].keys()
    (version,) = re.findall(r"^ARG BASE=python:(\S+)-slim$", DOCKERFILE, re.MULTILINE)
    assert project["requires-python"] == f">={version}"
    for command in re.findall(r"^#? *(docker (?:build|run) .+)$", DOCKERFILE + PAGE, re.MULTILINE):
        assert "-t trainyard" in command or " trainyard train " in command
