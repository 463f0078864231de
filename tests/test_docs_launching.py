"""docs/launching.md and the Dockerfile: their commands exist, and so do their files."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from trainyard.__main__ import _parser, split_overrides
from trainyard.config import load_recipe
from trainyard.rendezvous.starters import STARTERS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "launching.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# A command of ours, or one that starts ours: `torchrun … -m -- trainyard train …`.
COMMANDS = re.findall(r"^    (?:\S.* )?(trainyard [a-z].+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_given(command: str) -> None:
    words, overrides = split_overrides(shlex.split(command)[1:])
    options, unknown = _parser().parse_known_args(words)
    assert unknown == []
    if getattr(options, "recipe", None) is not None:
        load_recipe(options.recipe, overrides)


def test_every_launcher_has_a_command() -> None:
    launchers = {word[2] for word in map(str.split, COMMANDS) if word[1] == "launch"}
    assert launchers == {"local", "slurm", "ray", "ssh", "mpi", "kubernetes"}
    assert {"train", "doctor"} <= {word[1] for word in map(str.split, COMMANDS)}


def test_every_starter_is_in_the_table() -> None:
    table = PAGE.split("## How a world is found")[1].split("##")[0]
    for starter in STARTERS.values():
        assert f"`{starter.places['rank']}`" in table


def test_what_the_dockerfile_copies_is_there() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = {name for names in copied for name in names.split()}
    assert names
    for name in names:
        assert (ROOT / name).exists()
    # And docker is given it, and nothing else.
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
