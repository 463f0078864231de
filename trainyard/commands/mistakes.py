"""Messages about wrong words on the command line, with suggestions."""

import argparse
import os
import shlex
from collections.abc import Collection, Iterator, Sequence

from trainyard.data.storage.source import is_remote
from trainyard.errors import RecipeError
from trainyard.hints import closest, foreign, same, similar, suggestion_text

# Options of other trainers that Trainyard covers elsewhere.
_DEVICE = ("cuda", "device", "device_id", "gpu", "gpu_id")
_RANKS = ("devices", "gpus", "nproc", "nproc_per_node", "num_gpus", "num_processes", "ranks")
_REMARKS = {"batch.size": " (of all ranks together)"}  # per GPU elsewhere
_USE_DEVICES = ("train", "launch", "evaluate", "predict", "doctor")


def explain_argument(word: str, words: Sequence[str], options: argparse.Namespace) -> str:
    """The message about an argument that a command does not accept.

    `words` is the whole command line; `options` is its parsed part, with its `parser`.
    """
    hint = _hint_at_option if word.startswith("-") else _hint_at_word
    help_text = f"; see {options.parser.prog} --help"
    return f"unknown argument {word!r}{hint(word, words, options) or help_text}"


def explain_missing(message: str) -> str:
    """argparse's message about missing arguments, with recipes to begin with if one is missing."""
    has_no_recipe = message.startswith("the following") and "RECIPE" in message
    return f"{message}, such as photos or finetune" if has_no_recipe else message


def explain_choice(action: argparse.Action, value: object) -> str:
    """The message about a value, such as a command, that is none of an action's choices."""
    choices = [str(choice) for choice in action.choices or ()]
    paths = dict(_command_paths(action)) or {choice: choice for choice in choices}
    hint = suggestion_text([repr(paths[path]) for path in closest(str(value), paths)])
    what = action.option_strings[0] if action.option_strings else action.metavar
    return f"{what} cannot be {value!r}" + (hint or f"; choose from {', '.join(choices)}")


def _command_paths(action: argparse.Action) -> Iterator[tuple[str, str]]:
    """Commands, subcommands and, after `train`, recipes: "data.prepare" as "data prepare"."""
    if not isinstance(action, argparse._SubParsersAction):
        return
    if action.dest == "command":
        from trainyard.config import builtin_recipes

        yield from ((f"train.{recipe}", f"train {recipe}") for recipe in builtin_recipes())
    for name, parser in action.choices.items():
        yield name, name
        for inner in parser._actions:
            for path, shown in _command_paths(inner):
                yield f"{name}.{path}", f"{name} {shown}"


def _hint_at_option(word: str, words: Sequence[str], options: argparse.Namespace) -> str:
    name, mark, value = word.lstrip("-").partition("=")
    text = value if mark else _next(word, words)
    own = _options_of(options.parser)
    known = [*own, *_keys_of(options)]
    found = same(name, known)
    if not found:
        elsewhere = _hint_at_launch(name.replace("-", "_"), text, options.command, own)
        if elsewhere:
            return elsewhere
        target, form = foreign(name) or ("", "{}")
        if target in known:
            found, text = [target], form.format(text) if text or "{}" not in form else None
    found = (found or similar(name, known))[:3]
    shown = [f"--{each}{_value(each, text, own)}{_REMARKS.get(each, '')}" for each in found]
    return suggestion_text(shown)


def _hint_at_launch(name: str, text: str | None, command: str, own: Collection[str]) -> str:
    """A hint about devices and ranks, which no recipe has."""
    if name in _DEVICE and command in _USE_DEVICES:
        return "; each rank takes a GPU of its machine by itself: CUDA_VISIBLE_DEVICES limits which"
    if name in _RANKS and (command == "train" or "ranks" in own):
        ranks = f"--ranks {text if text and text.isdecimal() else 'N'}"
        return suggestion_text(
            [f"trainyard launch local RECIPE {ranks}" if command == "train" else ranks]
        )
    return ""


def _hint_at_word(word: str, words: Sequence[str], options: argparse.Namespace) -> str:
    """A hint about a key without its dashes, or a location without --data."""
    key, mark, _ = word.partition("=")
    if mark and key in _keys_of(options):
        return suggestion_text([f"--{shlex.quote(word)}"])
    if "data" in _options_of(options.parser) and (os.path.isdir(word) or is_remote(word)):
        return suggestion_text([f"--data {shlex.quote(word)}"])
    return ""


def _next(word: str, words: Sequence[str]) -> str | None:
    """The value after an option, if there is one."""
    following = words[words.index(word) + 1 :][:1]
    return following[0] if following and not following[0].startswith("--") else None


def _value(name: str, text: str | None, own: dict[str, argparse.Action]) -> str:
    """A space and the value, quoted for a shell, if the key or option accepts it; else ""."""
    if text is None:
        return ""
    if name in own:
        action = own[name]
        is_taken = action.nargs is None and action.type is None and action.choices is None
    else:
        is_taken = _takes(name, text)
    return f" {shlex.quote(text)}" if is_taken else ""


def _takes(key: str, text: str) -> bool:
    from trainyard.config import RunConfig, override

    try:
        override(RunConfig(), {key: text})
    except RecipeError:
        return False
    return True


def _options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The long options of a command, without their dashes."""
    return {
        text[2:]: action
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--")
    }


def _keys_of(options: argparse.Namespace) -> list[str]:
    """The recipe keys that a command accepts."""
    from trainyard.compare import keys_of
    from trainyard.config import RunConfig

    sections = options.takes_overrides
    return keys_of(list(RunConfig.model_fields) if sections is True else sections or ())
