"""`trainyard recipes`: lists built-in recipes and keys, and prints resolved recipes."""

import argparse
import json
import re
from typing import Any

from trainyard.commands.printing import as_cell, print_table


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard recipes` to its parser."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe, resolved")
    parser.add_argument("--keys", action="store_true", help="list every recipe key")
    parser.add_argument(
        "--params",
        action="store_true",
        help="list NAME's parameters with learning rate, decay and frozen ones",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.epilog = "With NAME, any recipe key can be given as --SECTION.KEY VALUE."
    parser.set_defaults(run_command=recipes, takes_overrides=True)


def recipes(options: argparse.Namespace) -> int:
    """Run `trainyard recipes`. Returns the exit code."""
    from trainyard.config import find_recipe, load_recipe, to_toml
    from trainyard.errors import InputError

    if not options.name:
        if options.params:
            raise InputError("--params needs the NAME of a recipe")
        _print(_keys() if options.keys else _recipes(options.json), options)
        return 0
    config = load_recipe(options.name, options.overrides)
    if options.params:
        from trainyard.commands.recipe_params import group_rows, parameter_rows

        rows = parameter_rows(config)
        _print(rows, options)
        if not options.json:
            _print(group_rows(rows), options)
    elif options.json:
        print(config.model_dump_json())
    else:
        print(f"# {find_recipe(options.name)}\n\n{to_toml(config)}")
    return 0


def _print(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(rows))
    else:
        print_table(list(rows[0]), [list(map(as_cell, row.values())) for row in rows])


def _keys() -> list[dict[str, Any]]:
    from trainyard.config import all_keys

    return [
        {
            "key": key,
            "default": field.get_default(call_default_factory=True),
            "meaning": field.description,
        }
        for key, field in all_keys().items()
    ]


def _recipes(in_full: bool) -> list[dict[str, Any]]:
    """A row for each recipe; `in_full` adds columns that would not fit on a terminal."""
    from trainyard.config import builtin_recipes, load_recipe

    rows = []
    for name, path in builtin_recipes().items():
        config = load_recipe(name)
        comment = path.read_text().partition("\n\n")[0].splitlines()
        top1 = re.search(r"^# Top-1 +(\d[\d.]*%)", "\n".join(comment), re.MULTILINE)
        row = {
            "recipe": name,
            "optimizer": config.optim.name,
            "batch": config.batch.size,
            "length": config.run.length,
            "top-1": top1[1] if top1 else "",
        }
        more = {"model": config.model.name, "about": comment[0].lstrip("# ")}
        rows.append(row | more if in_full else row)
    return rows
