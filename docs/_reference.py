"""An mkdocs hook that generates the reference pages from the code at every build.

`python docs/_reference.py` writes those of docs/reference, which a code host shows.
"""

import argparse
import ast
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types

import trainyard
from trainyard import errors
from trainyard.command_line import _Parser, _parser
from trainyard.config import RunConfig, builtin_recipes, load_recipe
from trainyard.course import Duration, Length, SizeStage, Stage
from trainyard.data.config import Size

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

# Descriptions of texts with a syntax, by the function that checks them.
_FORMS = {
    get_args(form)[-1].func: text
    for form, text in (
        (Duration, 'duration: "5 epochs", "300 steps", "1000000 samples", "10%"'),
        (Length, 'duration, not in percent: "90 epochs"'),
        (Stage, 'stage: "30 epochs: 192"'),
        (SizeStage, 'stage: "30 epochs: 192", or with height and width: "30 epochs: [128, 256]"'),
        (Size, "whole number from 1, or height and width: [128, 256]"),
    )
}
_BOUNDS = {
    annotated_types.Ge: ("ge", "from {}"),
    annotated_types.Gt: ("gt", "above {}"),
    annotated_types.Le: ("le", "to {}"),
    annotated_types.Lt: ("lt", "below {}"),
}
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text"}


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the generated pages; mkdocs calls it after it has listed the others."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        if committed := files.get_file_from_path(f"reference/{path}"):
            files.remove(committed)
        files.append(File.generated(config, f"reference/{path}", content=text))
    return files


def on_post_build(config: "MkDocsConfig") -> None:
    """Writes the search index as a script too, for pages opened from a folder."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def pages() -> dict[str, str]:
    """Each page's Markdown, by its path below reference/."""
    return {
        "commands.md": commands_page(),
        "recipe-keys.md": keys_page(),
        "recipes.md": recipes_page(),
        "exit-codes.md": exit_codes_page(),
        "errors.md": errors_page(),
        "python.md": python_page(),
    }


def committed_pages() -> dict[str, str]:
    """The pages of docs/reference, in Markdown without extensions."""
    found = {}
    for path, text in pages().items():
        text = re.sub(r"\A---\n.*\n---\n+", "", text)
        text = re.sub(r"^\{ \.kind \}\n| \{ #\S+ \}$", "", text, flags=re.MULTILINE)
        folded = r'^\?\?\? "The recipe"\n((?:\n|    .*\n)+)'
        found[path] = re.sub(folded, _unfolded, text, flags=re.MULTILINE)
    del found["python.md"]  # its signatures are mkdocstrings'
    return found


def _unfolded(match: re.Match[str]) -> str:
    return dedent(match[1]).lstrip("\n")


# --- commands ---


def commands_page() -> str:
    os.environ["COLUMNS"] = "80"  # argparse wraps to the terminal of the build otherwise
    parts = ["# Commands", "`trainyard COMMAND --help` prints the same."]
    for parser, about in commands(_parser()):
        words = parser.prog.split()[1:]
        parts += [f"{'#' * (len(words) + 1)} {' '.join(words)}", plain(sentence(about))]
        if not parser.commands:
            usage = parser.format_usage().strip().removeprefix("usage: ").replace(" [-h]", "", 1)
            parts += ["```text\n" + usage.replace("\n       ", "\n") + "\n```"]
            parts += [*_option_tables(parser), plain(parser.epilog or "")]
    return "\n\n".join(filter(None, parts)) + "\n"


def commands(parser: _Parser) -> Iterator[tuple[_Parser, str]]:
    """Every command below a parser, also those with commands of their own, and its purpose."""
    for command, about in parser.commands.values():
        yield command, about
        yield from commands(command)


def _option_tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
        if not actions:
            continue
        if group.title not in ("positional arguments", "options"):
            yield f"**{sentence(str(group.title))}**"
        rows = [f"| `{_invocation(a)}` | {plain(_help(a, parser))} |" for a in actions]
        yield "\n".join(["| | |", "|---|---|", *rows])


def _invocation(action: argparse.Action) -> str:
    shown = action.metavar
    if shown is None and action.choices is not None:
        shown = f"{{{','.join(map(str, action.choices))}}}"
    value = str(shown or action.dest.upper())
    if not action.option_strings:
        return value
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return (action.help or "") % (vars(action) | {"prog": parser.prog})


# --- recipes ---


def keys_page() -> str:
    parts = [
        "---\nsearch: {boost: 3}\n---",
        "# Recipe keys",
        "In a recipe a key stands in its section; on the command line it is `--SECTION.KEY VALUE`. "
        "`trainyard recipes --keys WORD` finds keys. [Write a recipe](../recipe.md) explains how "
        "files, defaults and options combine.",
    ]
    for name, part in RunConfig.model_fields.items():
        section: Any = part.annotation
        parts.append(f"## {name} {{ #{name} }}")
        for key, field in section.model_fields.items():
            kind = kind_of(field.annotation, field.metadata)
            default = field.get_default(call_default_factory=True)
            is_given = default not in (None, (), {}, "")
            said = f", `{json.dumps(default)}` if not given" if is_given else ", optional"
            parts += [
                f"### {name}.{key} {{ #{name}.{key} }}",
                f"{kind}{said}\n{{ .kind }}",
                plain(field.description),
            ]
    return "\n\n".join(parts) + "\n"


def kind_of(annotation: Any, metadata: Any = ()) -> str:
    """A type in words for authors of recipes, in Markdown."""
    for check in metadata:
        if getattr(check, "func", None) in _FORMS:
            return plain(_FORMS[check.func])
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(parts[0], parts[1:])
    if origin in (Union, UnionType):
        return " or ".join(kind_of(part, metadata) for part in parts if part is not type(None))
    if origin is Literal:
        return " · ".join(f"`{json.dumps(value)}`" for value in parts)
    if origin is tuple:
        many = re.sub(r"^\w+", r"\g<0>s", kind_of(parts[0]))
        return f"list of {many}" if parts[-1] is Ellipsis else f"list of {len(parts)} {many}"
    if origin is dict:
        return "table"
    bounds = [
        text.format(getattr(check, name))
        for check in metadata
        for kind, (name, text) in _BOUNDS.items()
        if isinstance(check, kind)
    ]
    return " ".join([_WORDS[annotation], *bounds])


def recipes_page() -> str:
    parts = [
        "# Recipes",
        "These recipes come with Trainyard. `trainyard recipes NAME` prints one with every "
        "key. [Training](../training.md) has a table of all.",
        "Recipes from elsewhere are held against their source, setting by setting. Everywhere, an "
        "epoch here has each image once, where sources leave out the last batch or repeat images.",
    ]
    for name, path in builtin_recipes().items():
        head, _, rest = path.read_text().partition("\n\n")
        parts += [f"## {name}", *_recipe_head(head)]
        parts += _source_table(name)
        body = "\n".join(f"    {line}".rstrip() for line in rest.strip().splitlines())
        parts.append(f'??? "The recipe"\n\n    ```toml\n{body}\n    ```')
    return "\n\n".join(parts) + "\n"


def _recipe_head(comment: str) -> Iterator[str]:
    """A sentence, a command, facts in two columns, and further remarks."""
    text = re.sub(r"^# ?", "", comment, flags=re.MULTILINE)
    about, command, facts, *more = re.split(r"\n\s*\n", text)
    yield plain(about)
    yield f"```bash\n{dedent(command)}\n```"
    rows = re.findall(r"^(\S+) +(.*(?:\n +.*)*)", facts, re.MULTILINE)
    yield "\n".join(["| | |", "|---|---|", *(f"| {name} | {plain(fact)} |" for name, fact in rows)])
    yield from map(plain, more)


def beside_source(recipe: str) -> dict[str, Any]:
    """What docs/_sources.toml has for a recipe: source, same, differs; empty for our own."""
    tables = tomllib.loads(Path(__file__).with_name("_sources.toml").read_text())
    if recipe not in tables:
        return {}
    own: dict[str, Any] = {"same": {}, "differs": {}} | tables[recipe]
    above = beside_source(own.pop("extends", "")) or {"same": {}, "differs": {}}
    kept = {
        kind: {key: row for key, row in above[kind].items() if key not in own[other]}
        for kind, other in (("same", "differs"), ("differs", "same"))
    }
    return above | own | {kind: rows | own[kind] for kind, rows in kept.items()}


def _source_table(recipe: str) -> Iterator[str]:
    """What differs from the source of a recipe and why, and the keys that do not."""
    found = beside_source(recipe)
    if not found:
        return
    config = load_recipe(recipe)
    rows = ["| differs | source | here | why |", "|---|---|---|---|"]
    for setting, row in found["differs"].items():
        section, _, key = setting.partition(".")
        ours = row.get("ours") or getattr(getattr(config, section), key)
        name = setting if "ours" in row else f"`{setting}`"
        rows.append(
            f"| {name} | {plain(row['theirs'])} | {plain(str(ours))} | {plain(row['why'])} |"
        )
    yield f"Held against {plain(found['source'])}."
    yield "\n".join(rows)
    yield "Equal in both: " + ", ".join(f"`{key}`" for key in found["same"]) + "."


# --- the rest ---


def exit_codes_page() -> str:
    """Built from the docstring of the tree of errors, and from its classes."""
    meanings = re.findall(r"^\W*(\w+)(?: +\d+)?  +([a-z].*)$", errors.__doc__ or "", re.MULTILINE)
    rows = ["| 0 | | done |"]
    for name, meaning in (("TrainyardError", "any other failure"), *meanings):
        code = getattr(errors, name).exit_code
        rows.append(f"| {code} | `{name}` | {plain(meaning)} |")
    table = "\n".join(["| code | error | means |", "|---|---|---|", *rows])
    about = "Every command has these exit codes. Python code gets the error."
    return f"# Exit codes\n\n{about}\n\n{table}\n"


_ABOUT_ERRORS = """# Errors

Each error has a code and fields. Its message is for people and may be reworded; codes and fields
are for programs. A command with `--json` prints an error that ends it as one line on stdout too:

    {"error": {"code": "recipe.unknown-key", "message": "…", "fields": {"key": "optim.lt", …}}}

In Python they are `error.code` and `error.fields` of every `trainyard.TrainyardError`.
"""


def errors_page() -> str:
    """The messages of all errors by their codes, an area a table, and where they are raised."""
    areas: dict[str, list[str]] = {}
    for code, (message, where) in sorted(error_texts().items()):
        shown = message.replace("|", "&#124;").replace("<", "&lt;").replace("`", "&#96;")
        shown = " ".join(re.sub(r"\{(\w+)[^}]*\}", r"<em>&#123;\1&#125;</em>", shown).split())
        areas.setdefault(code.partition(".")[0], []).append(
            f"| `{code}`<br><small>{where}</small> | {shown} |"
        )
    tables = [
        f"## {area}\n\n| code | message |\n|---|---|\n" + "\n".join(areas[area]) for area in areas
    ]
    return "\n\n".join([_ABOUT_ERRORS, *tables]) + "\n"


def error_texts() -> dict[str, tuple[str, str]]:
    """The text of each error by its code, and the file that has it."""
    package = Path(trainyard.__file__).parent
    places = {code: (text, "several places") for code, text in errors.SHARED.items()}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(args=[ast.Constant(value=str(code)), ast.Constant(value=str(text))]):
                    if re.fullmatch(r"[a-z0-9]+\.[a-z0-9-]+", code):
                        places[code] = text, f"{path.relative_to(package)}"
    return places


def python_page() -> str:
    parts = ["# Python", "`import trainyard` gives these names. Everything else may change."]
    parts += [f"::: trainyard.{name}" for name in trainyard.__all__]
    return "\n\n".join(parts) + "\n"


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def plain(text: str | None) -> str:
    """Text in which only `backticks` are Markdown."""
    parts = " ".join((text or "").split()).split("`")
    parts[::2] = [re.sub(r"([\\*_\[\]<>{}|#])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    for name, text in committed_pages().items():
        (Path(__file__).parent / "reference" / name).write_text(text)
