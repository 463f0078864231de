"""The command line: parses arguments, runs a command, and turns errors into exit codes.

Heavy imports wait until a command needs them, so that --help answers at once.
"""

import argparse
import errno
import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from trainyard.data.storage.credentials import without_secrets
from trainyard.data.storage.source import is_remote
from trainyard.distributed import discover_or_alone
from trainyard.errors import InputError, NotSaved, Stopped, TrainyardError
from trainyard.files import WRITER, RunDirectory, disk_error
from trainyard.hints import (
    as_question,
    closest,
    command_of,
    hint_at_argument,
    with_our_names,
    with_quotes,
)
from trainyard.installation import VERSION, remark_on_other_distribution
from trainyard.printable import printable
from trainyard.streams import lost_output

COMMANDS = {
    "data": "prepare, index and look at data sets",
    "recipes": "list the recipes, or print one",
    "doctor": "check machines, network, disks and data before training",
    "bench": "images per second of this machine, and what bounds them",
    "estimate": "hours, memory and cost of a run before it starts",
    "train": "train a recipe, or go on with a run",
    "launch": "train a recipe on several replicas",
    "sweep": "train a recipe with several values of its keys, and compare",
    "runs": "a table of the runs below a folder",
    "report": "a run, or several, as one HTML file",
    "evaluate": "accuracy of a run or checkpoint on validation data",
    "improve": "go on from a run with new images, or classes, and tell what changed",
    "suspects": "images that may have a wrong label, and a page to decide on each",
    "calibrate": "fit the temperature of a run's probabilities",
    "predict": "the classes that a run or checkpoint gives to images",
    "export": "a run or checkpoint for timm, ONNX or torch.export",
}
"""A purpose for each command, in the order of a user's day. cli/ has a module of each name."""
_PATH_ERRORS = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
_LIMITS = {
    "Too many open files": "raise `ulimit -n`",
    "Resource temporarily unavailable": "a limit of processes or threads: raise `ulimit -u`",
    "can't start new thread": "raise `ulimit -u`",
    "Cannot allocate memory": "raise `ulimit -v`, or take a machine with more memory",
    "failed to map segment": "raise `ulimit -v`, or take a machine with more memory",
    "No usable temporary directory": "set TMPDIR to a folder that can be written",
}
"""Remedies by the text of a system error, whose number torch and importlib drop."""
_RUNS = ("train", "launch", "sweep", "improve")
_LOAD_TORCH = (
    *("train", "sweep", "improve", "evaluate", "suspects", "calibrate", "predict", "export"),
    *("estimate", "doctor", "bench"),
)
_OVERRIDE = re.compile(r"--(\w+\.\w+)(?:=(.*))?", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code (see trainyard/errors.py)."""
    # Hides torch's long messages about lost ranks: Trainyard prints one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    given = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    given = [*given[1:], "--help"] if given[0] == "help" else given
    try:
        if (remark := remark_on_other_distribution()) and discover_or_alone().is_first:
            print(f"trainyard: {remark}", file=sys.stderr)
        given, remarks = with_our_names(given)
        words, overrides = split_overrides(given)
        options, unknown = _parsed(words, overrides)
        _check_working_directory()
        if unknown:
            raise _unknown_argument(unknown[0], given, options)
        if overrides and not options.takes_overrides:
            raise InputError(
                "option.takes-no-recipe-keys",
                "{command} takes no recipe keys such as {key}",
                command=options.command,
                key=next(iter(overrides)),
            )
        options.overrides = overrides
        _print_first_lines(options, remarks)
        code: int = options.run_command(options)
        return _code_with_output(code, is_run=options.command in _RUNS)
    except TrainyardError as error:
        return print_error(_unquoted(given, error) or error, as_json="--json" in given)
    except NotSaved as error:
        print("trainyard: interrupted again: the last steps are not saved", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("trainyard: interrupted", file=sys.stderr)
        return Stopped.exit_code
    except Exception as error:
        shown = _path_error(error) or _limit_error(error)
        if shown is None:
            raise
        return print_error(shown, as_json="--json" in given)


def _parsed(words: list[str], overrides: dict[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """The options; a run to resume stands for the recipe if there is none."""
    try:
        return _parser(words).parse_known_args(words)
    except InputError as error:
        run = overrides.get("run.resume", "")
        is_missing = "RECIPE" in str(error.fields.get("names")) and words[0] in ("train", "launch")
        if not is_missing or not RunDirectory(Path(run)).recipe.is_file():
            raise
        del overrides["run.resume"]
        return _parser(words).parse_known_args([*words, run])


def _unquoted(given: Sequence[str], error: TrainyardError) -> TrainyardError | None:
    """The error to print for a path with spaces that was typed without quotes."""
    if error.exit_code != InputError.exit_code or not (found := with_quotes(given)):
        return None
    path, words = found
    return InputError(
        "option.unquoted",
        "{path!r} is taken for several words; did you mean {command}?",
        path=path,
        command=_typed(words),
    )


def _typed(words: Sequence[str]) -> str:
    return shlex.join(["trainyard", *words])


def _code_with_output(code: int, *, is_run: bool) -> int:
    """The exit code; 1 if stdout was cut off, unless a run has its results in its directory."""
    if (error := lost_output()) is None:
        return code
    print(f"trainyard: stdout: {error.strerror}: it is incomplete", file=sys.stderr)
    return code if is_run else code or 1


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # torch's libraries blame themselves
        raise InputError(
            "file.working-directory-removed", "the working directory was removed: cd to another one"
        ) from None


def _print_first_lines(options: argparse.Namespace, remarks: Sequence[str]) -> None:
    """Print the meaning of aliases; on a terminal, a line if the command's own takes over 0.3 s."""
    if getattr(options, "quiet", False) or not discover_or_alone().is_first:
        return
    for remark in remarks:
        print(f"trainyard: {printable(without_secrets(remark))}", file=sys.stderr)
    if sys.stderr.isatty() and (line := _startup_line(options)):
        print(f"{options.parser.prog}: {line}", file=sys.stderr, flush=True)


def _startup_line(options: argparse.Namespace) -> str | None:
    loads = options.command in _LOAD_TORCH or getattr(options, "params", False)  # of `recipes`
    launches = options.command == "launch" and options.launcher == "local" and not options.dry_run
    if loads or launches:
        return "loading torch"
    if options.command == "data" and options.action != "serve":
        location = getattr(options, "location", None) or getattr(options, "source", None)
        return f"reading {printable(location)}" if location else "writing"
    return "reading" if options.command in ("report", "runs") else None


def _path_error(error: Exception) -> TrainyardError | None:
    """The error to print for a full disk, or a file of a wrong name, kind or mode; else None."""
    name = getattr(error, "filename", None)
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None
    full = disk_error(error, path or Path())
    if full is not None and path is None:
        hint = f": {full.advice}" if full.advice else ""
        return TrainyardError(
            "disk.full-unnamed", "{reason}{hint}", reason=os.strerror(full.errno or 0), hint=hint
        )
    if path is not None and isinstance(error, OSError) and error.errno in _NO_PATH:
        return InputError("file.unusable", path=path, reason=error.strerror)
    if path is not None and isinstance(error, _PATH_ERRORS):
        return TrainyardError("file.unusable", path=path, reason=error.strerror)
    return full


def _limit_error(error: Exception) -> TrainyardError | None:
    """The error to print where the system gives no more memory, files or processes; else None."""
    if isinstance(error, OSError | ImportError | RuntimeError):
        for text, advice in _LIMITS.items():
            if text in str(error):
                return TrainyardError(
                    "system.limit-reached", "{reason}: {hint}", reason=str(error), hint=advice
                )
    return None


def print_error(error: TrainyardError, *, as_json: bool = False) -> int:
    """Print an error, on the first rank alone if all ranks know it. Returns its exit code.

    `as_json`: on stdout too, with its code and fields, for the program that reads it.
    """
    if not error.is_shared or discover_or_alone().is_first:
        lines = "\n" if "traceback" in error.fields else ""
        message = printable(without_secrets(str(error)), keep=lines)
        print(f"trainyard: {message}", file=sys.stderr)
        if as_json:
            code, _, fields = error.packed()
            fields = {
                name: printable(without_secrets(value)) if isinstance(value, str) else value
                for name, value in fields.items()
            }
            print(json.dumps({"error": {"code": code, "message": message, "fields": fields}}))
    return error.exit_code


def split_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate `--section.key value` and `--section.key=value` from the command line.

    A boolean key without a value is true.
    """
    rest, overrides = [], {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            rest.append(word)
        elif match[2] is not None:
            overrides[match[1]] = match[2]
        elif queue and not queue[0].startswith("--"):
            overrides[match[1]] = queue.pop(0)
        else:
            from trainyard.config import all_keys

            field = all_keys().get(match[1])
            if field is None or field.annotation not in (bool, bool | None):
                raise InputError("option.needs-value", "{option} needs a value", option=word)
            overrides[match[1]] = "true"
    return rest, overrides


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors, like all others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.set_defaults(parser=self)
        self._is_inside = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse, but the files of a command may stand on both sides of its options."""
        if self._is_inside or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._is_inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False

    @property
    def commands(self) -> "dict[str, tuple[_Parser, str]]":
        """Its commands that --help lists, each with its purpose."""
        return {
            listed.dest: (action.choices[listed.dest], listed.help or "")
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for listed in action._choices_actions
        }

    def paths(self) -> Iterator[str]:
        """Its commands and their own: "data", "data prepare", "data prepare digits"."""
        for name, (parser, _) in self.commands.items():
            yield name
            yield from (f"{name} {path}" for path in parser.paths())

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following"):  # …arguments are required
            names = message.partition(": ")[2]
            hint = ", such as photos or finetune, or a run" if "RECIPE" in names else ""
            raise InputError(
                "option.missing",
                "the following arguments are required: {names}{hint}; see {command} --help",
                names=names,
                hint=hint,
                command=self.prog,
            )
        option, _, reason = message.removeprefix("argument ").partition(": ")
        raise InputError(
            "option.invalid",
            "{option}: {reason}; see {command} --help",
            option=option,
            reason=reason,
            command=self.prog,
        )

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise self._unknown_choice(action, [*map(str, action.choices)], str(value))

    def _unknown_choice(
        self, action: argparse.Action, choices: Sequence[str], value: str
    ) -> InputError:
        """The error for a value, such as a command, that is none of an action's choices."""
        is_command = isinstance(action, argparse._SubParsersAction)
        choices = [*self.commands] if is_command else choices
        names = [*self.paths()] if is_command else choices
        if "train" in self.commands:
            from trainyard.config import builtin_recipes

            names = [*(f"train {recipe}" for recipe in builtin_recipes()), *_parser().paths()]
        dotted = {name.replace(" ", "."): name for name in names}
        near = [command_of(value)] if is_command and command_of(value) in names else []
        near = near or [dotted[name] for name in closest(value, dotted)]
        hint = as_question([*map(repr, near)])
        hint = hint or f"; choose from {', '.join(choices)}"
        option = action.option_strings[0] if action.option_strings else action.metavar
        return InputError(
            "option.unknown-choice",
            "{option} cannot be {value!r}{hint}",
            option=option,
            value=value,
            hint=hint,
        )


def _unknown_argument(word: str, given: Sequence[str], options: argparse.Namespace) -> InputError:
    """The error for an argument that a command does not accept.

    `given` is the whole command line; `options` is its parsed part, with its `parser`.
    """
    from trainyard.compare import keys_of
    from trainyard.config import RunConfig

    sections = options.takes_overrides
    keys = keys_of(list(RunConfig.model_fields) if sections is True else sections or ())
    options_here = re.findall(r"--([\w-]+)", options.parser.format_usage())
    following = [*given[given.index(word) + 1 :], "--"][0]
    value = None if following.startswith("--") else following
    hint = hint_at_argument(word, value, known=[*options_here, *keys], command=options.command)
    for name in ("recipe", "target"):
        hint = hint.replace(name.upper(), shlex.quote(getattr(options, name, name.upper())))
    hint = _swapped(word, given, options) or hint
    help_text = f"; see {options.parser.prog} --help"
    return InputError(
        "option.unknown", "unknown argument {option!r}{hint}", option=word, hint=hint or help_text
    )


def _swapped(word: str, given: Sequence[str], options: argparse.Namespace) -> str:
    """A hint at the line for data that stands where the recipe belongs, and the recipe after it."""
    from trainyard.config import builtin_recipes

    data = getattr(options, "recipe", None) if "data" in options else None
    if data is None or not (word in builtin_recipes() or word.endswith(".toml")):
        return ""
    is_run = RunDirectory(Path(data)).recipe.is_file()
    if is_run or not (is_remote(data) or os.path.exists(data)):
        return ""
    words = [word if each == data else each for each in given if each != word]
    return as_question([_typed([*words, "--data", data])])


def _parser(words: Sequence[str] | None = None) -> _Parser:
    """The parser of all commands, or with the options of those alone that `words` name."""
    parser = _Parser(
        prog="trainyard",
        description="Train image classifiers, on one machine or a thousand, from one recipe.",
        epilog="First steps: trainyard data prepare digits data/digits; trainyard train digits",
    )
    parser.set_defaults(takes_overrides=False)
    parser.add_argument(
        "--version",
        action="version",
        version=f"trainyard {VERSION}",
        help="print the version and exit",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = subparsers.add_parser(name, help=purpose)
        if words is None or name in words:
            import_module(f"trainyard.cli.{name}").add(command)
    return parser


def end(code: int) -> NoReturn:
    """End this process; immediately if it has failed as one of several ranks, or while it writes.

    Pending torch work with a lost rank can keep the interpreter from ending, and a thread that is
    inside torch at the end aborts the process.
    """
    is_writing = any(thread.name == WRITER for thread in threading.enumerate())
    if code and (is_writing or discover_or_alone().size > 1):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
