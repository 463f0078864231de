"""Parsers of the documentation: code blocks, commands, tables."""

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trainyard.cli.sweep import combinations
from trainyard.command_line import _parser, split_overrides
from trainyard.config import all_keys, builtin_recipes, load_recipe
from trainyard.hints import ALIASES, with_our_names

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if page.parent != DOCS / "reference"]  # made from the code

_FENCE = re.compile(r"^```(\s*\{[^}\n]*\}|\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}\S.*$", re.MULTILINE)
# A trainyard command, or one that starts it; a remark follows two spaces.
_COMMAND = re.compile(r"^(?:\S.* )?(trainyard [a-z].*?)(?:  .*)?$")
_INLINE = re.compile(r"`(trainyard [a-z][^`]*)`")


class Block(NamedTuple):
    language: str
    text: str
    is_run: bool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; a block with `{.LANGUAGE .no-run}` is not run."""
    found = _FENCE.findall(page.read_text())
    return [
        # A line of shell that ends with a backslash continues on the next.
        Block(re.findall(r"\w+", kind)[0], re.sub(r" \\\n +", " ", text), ".no-run" not in kind)
        for kind, text in found
    ]


def commands(page: Path) -> list[str]:
    """The complete trainyard commands in fenced and indented blocks."""
    shown = [block.text for block in blocks(page) if block.language not in ("python", "toml")]
    lines = [line for text in shown for line in text.splitlines()]
    lines += [line[4:] for line in _INDENTED.findall(_FENCE.sub("", page.read_text()))]
    found = [match[1].strip() for line in lines if (match := _COMMAND.match(line))]
    return [command for command in found if " | " not in command]


def mentions(page: Path) -> list[str]:
    """Commands in a sentence or a table, which may lack required arguments."""
    return _INLINE.findall(page.read_text())


def check_command(command: str) -> None:
    """Raises, or fails an assertion, unless the parser and the recipe accept the command."""
    words, overrides = split_overrides(with_our_names(shlex.split(command)[1:])[0])
    options, unknown = _parser().parse_known_args(words)
    assert unknown == []
    assert not overrides or options.takes_overrides
    recipe = getattr(options, "recipe", None) or getattr(options, "name", None)
    if recipe in builtin_recipes():
        swept = words[0] == "sweep"
        for one in (
            [run.overrides for run in combinations(overrides, options.trials)]
            if swept
            else [overrides]
        ):
            load_recipe(recipe, one)
    assert overrides.keys() <= all_keys().keys()


def check_mention(command: str) -> None:
    """Fails an assertion unless the command and all its options exist."""
    words = [word for word in command.split()[1:] if word != "…"]
    parser: argparse.ArgumentParser = _parser()
    while words and (choices := subparsers(parser)):
        assert words[0] in choices, f"{words[0]} is no command of {parser.prog}"
        parser = choices[words.pop(0)]
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            known = {*all_keys(), *ALIASES}
            assert name in options_of(parser) or name[2:] in known, f"{name}: no option"


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {text for action in parser._actions for text in action.option_strings}


@cache
def options_of_training() -> frozenset[str]:
    """The options of `train` and of every launcher."""
    parsers = subparsers(_parser())
    launchers = subparsers(parsers["launch"]).values()
    return frozenset().union(*map(options_of, (parsers["train"], *launchers)))


def rows_beside_ours(page: Path) -> Iterator[tuple[str, str]]:
    """First and second cell of each row of the tables whose second column is called "ours"."""
    is_inside = False
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line[:1] == "|" else []
        if not cells:
            is_inside = False
        elif cells[1:2] == ["ours"]:
            is_inside = True
        elif is_inside and not set(line) <= set("|-"):
            yield cells[0], cells[1] if len(cells) > 1 else ""
