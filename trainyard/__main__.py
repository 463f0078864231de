"""The command line: parse, call, and turn errors into exit codes.

Nothing heavy is imported until a command needs it, so that --help answers at once.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trainyard import commands
from trainyard.errors import InputError, Stopped, TrainyardError

_OVERRIDE = re.compile(r"--(\w+\.\w+)(?:=(.*))?", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it ended (see trainyard/errors.py)."""
    # Read when torch is loaded. Threads that spin while they wait take the loader's cores, and
    # a trainer on a CPU that shares its cores becomes several times slower (docs/LOG.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        words, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
        options, unknown = _parser().parse_known_args(words)
        if unknown:
            raise InputError(_unknown(unknown[0], options.command))
        if overrides and not options.takes_overrides:
            raise InputError(
                f"{options.command} takes no recipe keys such as {next(iter(overrides))}"
            )
        options.overrides = overrides
        code: int = options.run_command(options)
        return code
    except TrainyardError as error:
        # What all ranks know, the first one prints.
        if not error.is_shared or os.environ.get("RANK", "0") == "0":
            print(f"trainyard: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("trainyard: interrupted", file=sys.stderr)
        return Stopped.exit_code
    except BrokenPipeError:  # the reader of our output, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def split_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--section.key value` and `--section.key=value` out of the command line."""
    rest, overrides = [], {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            rest.append(word)
        elif match[2] is not None:
            overrides[match[1]] = match[2]
        elif queue:
            overrides[match[1]] = queue.pop(0)
        else:
            raise InputError(f"{word} needs a value")
    return rest, overrides


def _unknown(word: str, command: str) -> str:
    from trainyard.config import all_keys

    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    keys = [f"--{key}" for key in all_keys() if key.rpartition(".")[2] == name]
    meant = f"did you mean {' or '.join(keys)}?" if keys else f"see trainyard {command} --help"
    return f"unknown argument {word!r}; {meant}"


class _Parser(argparse.ArgumentParser):
    """argparse with its errors in one line, like all others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trainyard",
        description="Train image classifiers, on one machine or a thousand, from one recipe.",
        epilog="First steps: trainyard data prepare digits data/digits; trainyard train digits",
    )
    parser.set_defaults(takes_overrides=False)
    add = parser.add_subparsers(dest="command", required=True, metavar="COMMAND").add_parser
    _add_train(add("train", help="train a recipe, or go on with a run"))
    _add_launch(add("launch", help="train a recipe on several replicas"))
    _add_evaluate(add("evaluate", help="accuracy of a run or checkpoint on validation data"))
    _add_recipes(add("recipes", help="list the recipes, or print one"))
    _add_data(add("data", help="prepare, index and look at data sets"))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name or a path to a TOML file")
    parser.add_argument("--data", metavar="LOCATION", help="a data set with train and val data")
    parser.add_argument("--run", metavar="DIR", help="run directory (runs/NAME of the recipe)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = (
        "Any recipe key can be given as --SECTION.KEY VALUE, --optim.lr 0.1 say; "
        "`trainyard recipes --keys` lists them."
    )
    parser.set_defaults(run_command=commands.train, takes_overrides=True)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_subparsers(dest="launcher", required=True, metavar="LAUNCHER").add_parser
    local = add("local", help="several ranks on this machine")
    _add_train(local)
    local.add_argument("--ranks", type=_positive, metavar="N", help="processes (one per GPU, or 1)")
    local.add_argument("--dry-run", action="store_true", help="print what would be started")
    local.set_defaults(run_command=commands.launch_local)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN_OR_CHECKPOINT", help="of a run, its best checkpoint")
    parser.add_argument("--data", metavar="LOCATION", help="other validation data")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run_command=commands.evaluate)


def _add_recipes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe, resolved")
    parser.add_argument("--keys", action="store_true", help="list every recipe key")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run_command=commands.recipes)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser
    prepare = add("prepare", help="make a data set ready for training")
    prepare.add_argument("dataset", choices=("digits",), help="which one")
    prepare.add_argument("destination", metavar="DESTINATION", help="folder to make")
    prepare.set_defaults(run_command=commands.data_prepare)
    for action, help_text, run in (
        ("index", "scan a data set anew and save its index", commands.data_index),
        ("show", "samples, bytes and classes of a data set", commands.data_show),
    ):
        look = add(action, help=help_text)
        look.add_argument("location", metavar="LOCATION", help="a folder, shards or a brace list")
        look.add_argument("--json", action="store_true", help="print as JSON")
        look.set_defaults(run_command=run)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
