"""`trainyard recipes`: what there is to train, and every key."""

import argparse
import json
from typing import Any

from trainyard.commands.printing import print_table, text


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe, resolved")
    parser.add_argument("--keys", action="store_true", help="list every recipe key")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run_command=recipes)


def recipes(options: argparse.Namespace) -> int:
    from trainyard.config import find_recipe, load_recipe, to_toml

    if options.keys or not options.name:
        rows = _keys() if options.keys else _recipes()
        if options.json:
            print(json.dumps(rows))
        else:
            print_table(list(rows[0]), [list(map(text, row.values())) for row in rows])
        return 0
    config = load_recipe(options.name)
    if options.json:
        print(config.model_dump_json())
    else:
        print(f"# {find_recipe(options.name)}\n\n{to_toml(config)}")
    return 0


def _keys() -> list[dict[str, Any]]:
    from trainyard.config import all_keys

    return [
        {"key": key, "default": field.get_default(), "meaning": field.description}
        for key, field in all_keys().items()
    ]


def _recipes() -> list[dict[str, Any]]:
    from trainyard.config import builtin_recipes, load_recipe

    rows = []
    for name, path in builtin_recipes().items():
        config = load_recipe(name)
        rows.append(
            {
                "recipe": name,
                "model": config.model.name,
                "batch": config.batch.size,
                "length": config.run.length,
                "about": path.read_text().splitlines()[0].lstrip("# "),
            }
        )
    return rows
