"""The command line: parse, call, and turn errors into exit codes.

Nothing heavy is imported until a command needs it, so that --help answers at once.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trainyard.commands import (
    bench,
    data,
    doctor,
    estimate,
    evaluate,
    export,
    launch,
    predict,
    recipes,
    report,
    train,
)
from trainyard.data.source import without_login
from trainyard.errors import InputError, Stopped, TrainyardError
from trainyard.rendezvous import discover
from trainyard.world import World

_OVERRIDE = re.compile(r"--(\w+\.\w+)(?:=(.*))?", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it ended (see trainyard/errors.py)."""
    # Of a rank that is lost we say more in a line than torch in pages.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
        return say(error)
    except KeyboardInterrupt:
        print("trainyard: interrupted", file=sys.stderr)
        return Stopped.exit_code
    except BrokenPipeError:  # the reader of our output, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def say(error: TrainyardError) -> int:
    """Print it, of what all ranks know as the first one; its exit code."""
    if not error.is_shared or _world().is_first:
        print(f"trainyard: {without_login(str(error))}", file=sys.stderr)
    return error.exit_code


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
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, about in (
        ("train", train, "train a recipe, or go on with a run"),
        ("launch", launch, "train a recipe on several replicas"),
        ("evaluate", evaluate, "accuracy of a run or checkpoint on validation data"),
        ("predict", predict, "what a run or checkpoint says of images"),
        ("export", export, "a run or checkpoint for timm, ONNX or torch.export"),
        ("report", report, "a run, or several, as one HTML file"),
        ("estimate", estimate, "hours, memory, energy and money of a run before it starts"),
        ("doctor", doctor, "are machines, network, disks and data fit to train"),
        ("bench", bench, "images per second of this machine, and what bounds them"),
        ("recipes", recipes, "list the recipes, or print one"),
        ("data", data, "prepare, index and look at data sets"),
    ):
        module.add(subparsers.add_parser(name, help=about))
    return parser


def _world() -> World:
    """As one of whom this process was started; alone if the environment contradicts itself."""
    try:
        return discover()
    except InputError:
        return World()


def end(code: int) -> NoReturn:
    """End this process; at once if it has failed as one of several.

    What torch has under way with a rank that is gone can keep the interpreter from ending.
    """
    if code and _world().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def command() -> NoReturn:
    end(main())


if __name__ == "__main__":
    command()
