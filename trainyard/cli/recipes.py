"""`trainyard recipes`: lists built-in recipes and keys, and prints resolved recipes."""

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainyard.cli.options import add_json, loading
from trainyard.cli.printing import print_table
from trainyard.hints import from_other_trainer
from trainyard.printable import as_text

if TYPE_CHECKING:
    from trainyard.config import RunConfig


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard recipes` to its parser."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="print this recipe, resolved")
    text = "list the recipe keys, with WORD those that have it in their name or meaning"
    add("--keys", nargs="?", const="", metavar="WORD", help=text)
    add(
        "--params",
        action="store_true",
        help="list NAME's parameters with learning rate, decay and frozen ones",
    )
    add_json(parser)
    parser.epilog = "With NAME, any recipe key can be given as --SECTION.KEY VALUE."
    parser.set_defaults(run_command=recipes, takes_overrides=True)


def recipes(options: argparse.Namespace) -> int:
    """Run `trainyard recipes`. Returns the exit code."""
    from trainyard.config import find_recipe, load_recipe, to_toml
    from trainyard.errors import InputError

    if not options.name:
        if options.params:
            raise InputError("option.params-without-recipe", "--params needs the NAME of a recipe")
        _print(_recipes(options.json) if options.keys is None else _keys(options.keys), options)
        return 0
    config = load_recipe(options.name, options.overrides)
    if options.params:
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
        print_table(list(rows[0]), [list(map(as_text, row.values())) for row in rows])


def _keys(word: str) -> list[dict[str, Any]]:
    """A row for each key with a word in its name or meaning, or for which it is an alias.

    RecipeError if there is none.
    """
    from trainyard.config import all_keys, unknown_key

    rows = [
        {
            "key": key,
            "default": field.get_default(call_default_factory=True),
            "meaning": meaning,
        }
        for key, field in all_keys().items()
        for meaning in [" ".join(field.description.split())]
        if word.lower() in f"{key} {meaning}".lower() or key == from_other_trainer(word)[0]
    ]
    if not rows:
        raise unknown_key(word, all_keys())
    return rows


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


def parameter_rows(config: "RunConfig", num_classes: int = 1000) -> list[dict[str, Any]]:
    """A row for each parameter, in the model's order.

    Columns: parameter, shape, number (of weights), lr and decay (factors of the learning rate and
    of weight decay), update (the optimizer, adamw for parameters that Muon does not update, or
    frozen). The model is built without memory for its weights. RecipeError for patterns that match
    nothing, and the like.
    """
    with loading():
        import torch

        from trainyard.run.model import build_run_model
    from trainyard.optim.groups import GroupRates, parameter_shares

    with torch.device("meta"):
        model = build_run_model(config, num_classes)
    shares = parameter_shares(model, config.optim)
    rows = []
    for name, parameter in model.named_parameters():
        share = shares[name] if parameter.requires_grad else GroupRates(0.0, 0.0, "frozen")
        rows.append(
            {
                "parameter": name,
                "shape": list(parameter.shape),
                "number": parameter.numel(),
                "lr": share.lr_scale,
                "decay": share.decay_scale,
                "update": share.rule,
            }
        )
    return rows


def group_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per group of `parameter_rows` with its counts, the largest factors first."""
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("update", "lr", "decay")}
        group = groups.setdefault(tuple(key.values()), {**key, "parameters": 0, "number": 0})
        group["parameters"] += 1
        group["number"] += row["number"]
    return sorted(groups.values(), key=lambda group: (-group["lr"], -group["decay"]))
