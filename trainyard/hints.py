"""Suggestions ("did you mean …?") for commands, options, recipe keys, recipes and other names."""

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

ALIASES = {
    "batch_size": "batch.size",
    "epochs": "run.length {} epochs",
    "lr": "optim.lr",
    "model": "model.name",
    "out": "run",
    "output": "run",
    "pretrained": "model.checkpoint",
    "resume": "run.resume",
    "seed": "run.seed",
    "workers": "data.threads",
}
"""Options of other trainers that `train`, `launch` and `sweep` take, and say what they are here."""
_CUTOFF = 0.7  # of difflib's ratio; suggestions below it would be guesses
_MOST_PARTS = 8  # of a path between spaces
_NUMBER = re.compile(r"\d+")
# On keys whose values are of a GPU, or of all of them, elsewhere.
_REMARKS = {"batch.size": " (of all ranks together)", "data.threads": " (of each rank)"}
_REMARKS |= dict.fromkeys(("augment.mixup", "augment.cutmix"), " (alpha of Beta, no probability)")
_REMARKS |= {"run.resume auto": " (the same command goes on with its run by itself)"}
_BOOLEANS = {"true": 0, "yes": 0, "1": 0, "false": 1, "no": 1, "0": 1}
# What these stand for in keys that are a switch elsewhere.
_SWITCHES = {"run.resume": ("auto", "never"), "model.checkpoint": ("timm", "none")}


def did_you_mean(word: str, known: Iterable[str], limit: int = 3) -> str:
    """A suggestion to append to a message about an unknown word, or ""."""
    return as_question(list(map(repr, closest(word, known, limit))))


def as_question(suggestions: Sequence[str]) -> str:
    """The text "; did you mean A, B or C?", or "" without a suggestion."""
    if not suggestions:
        return ""
    *others, last = suggestions
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def closest(word: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that a word may stand for, the most likely first."""
    known = list(known)
    return (ignoring_punctuation(word, known) or nearest(word, known))[:limit]


def ignoring_punctuation(word: str, known: Iterable[str]) -> list[str]:
    """The known names that differ from a word only in case, punctuation or section.

    "resnet-50" is "resnet50"; "batch.momentum" and "momentum" are "optim.momentum".
    """
    if not _plain(word):
        return []
    known = list(known)
    names = [name for name in known if _plain(name) == _plain(word)]
    return names or [name for name in known if _plain(_last(name)) == _plain(_last(word))]


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with a word, shortest first, or else the most similar one.

    For dotted names the last parts are compared; names in the word's section come first.
    """
    section, plain = word.rpartition(".")[0], _plain(_last(word))
    if not plain:
        return []
    names = sorted(known, key=lambda name: name.rpartition(".")[0] != section)
    longer = [name for name in names if _plain(_last(name)).startswith(plain)]
    if len(plain) > 2 and longer:
        return sorted(longer, key=len)
    numbers = set(_NUMBER.findall(word))  # resnet101 is not a misspelt resnet50
    names = [name for name in names if numbers <= set(_NUMBER.findall(name))]
    lasts = [_plain(_last(name)) for name in names]
    near = difflib.get_close_matches(plain, lasts, n=1, cutoff=_CUTOFF)
    return [names[lasts.index(last)] for last in near]


def misspelt(word: str, known: Iterable[str]) -> list[str]:
    """The known names of options or keys that a word may be a misspelling of.

    No name of other words: that is another quantity, such as warmup_from for warmup_ratio.
    """
    section, _, last = word.rpartition(".")
    return [name for name in known if _is_misspelt(last, _last(name), section == _section(name))]


def _is_misspelt(word: str, name: str, is_of_section: bool) -> bool:
    """True if each part differs in a letter at most, or in the order of two; short ones agree."""
    words, names = (re.split(r"[\W_]+", text.lower()) for text in (word, name))
    pairs = list(zip(words, names, strict=False))
    return len(words) == len(names) and all(
        one == other
        or sorted((one, other)) == [min(one, other), f"{min(one, other)}s"]
        or (min(len(one), len(other)) >= (2 if is_of_section else 5) and _is_near(one, other))
        for one, other in pairs
    )


def _is_near(word: str, other: str) -> bool:
    """True if one letter is wrong, absent or too much, or two are swapped."""
    start = _num_equal(word, other)
    word, other = word[start:], other[start:]
    tail = _num_equal(word[::-1], other[::-1])
    word, other = word[: len(word) - tail], other[: len(other) - tail]
    return max(len(word), len(other)) <= 1 or (len(word) == 2 and word == other[::-1])


def _num_equal(word: str, other: str) -> int:
    """The number of letters in which two words begin alike."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, other, strict=False))
    )


def with_quotes(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """A path with spaces that stands as several words, and the words with it; None without one."""
    for count in range(_MOST_PARTS, 1, -1):
        for begin in range(len(words) - count + 1):
            parts = words[begin : begin + count]
            path = " ".join(parts)
            is_path = not any(part.startswith("-") for part in parts) and os.path.exists(path)
            if is_path and not all(map(os.path.exists, parts)):
                return path, [*words[:begin], path, *words[begin + count :]]
    return None


def near_pattern(pattern: str, names: Sequence[str]) -> str:
    """Like `did_you_mean`, for a pattern that matches none of some dotted parameter names."""
    modules = {name[:dot] for name in names for dot, sign in enumerate(name) if sign == "."}
    stem = pattern.strip().rstrip("*.")
    near = difflib.get_close_matches(stem, [*sorted(modules), *names], n=1)
    return as_question([repr(f"{name}.*" if name in modules else name) for name in near])


def from_other_trainer(word: str) -> tuple[str, str]:
    """The key or option behind another trainer's name, "" if unknown, and its value's form."""
    meaning = foreign_names().get(word.replace("-", "_").lower(), "")
    target, _, form = meaning.partition(" ")
    return target, form or "{}"


def with_our_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line that has our options in place of their aliases, and a remark on each."""
    ours: list[str] = []
    remarks = []
    queue = [*words]
    while queue and words[0] in ("train", "launch", "sweep"):
        word = queue.pop(0)
        name, mark, value = word.partition("=")
        meaning = ALIASES.get(name[2:].replace("-", "_")) if name.startswith("--") else None
        target, _, form = (meaning or "").partition(" ")
        following = "--" if mark or not (meaning and queue) else queue[0]
        may_take = name != "--pretrained" or following.split(",")[0].lower() in _BOOLEANS
        if may_take and not following.startswith("--"):
            mark, value = " ", queue.pop(0)
        values = value.split(",") if mark else ["true"] * (target in _SWITCHES)
        # A sweep has several values.
        text = ",".join(_switched(target, (form or "{}").format(each)) for each in values)
        if not (meaning and text):
            ours.append(word)
            continue
        given = f"{name}{mark}{shlex.quote(value) if mark else ''}"
        target = "runs" if target == "run" and words[0] == "sweep" else target
        ours.append(f"--{target}={text}")
        remark = _REMARKS.get(target) or _REMARKS.get(f"{target} {text}", "")
        remarks.append(f"{given} is --{target} {shlex.quote(text)}{remark}")
    return ours + queue, remarks


def _switched(target: str, value: str) -> str:
    """The value of a key that stands for "true" or "false", and else the value itself."""
    if target in _SWITCHES and value.lower() in _BOOLEANS:
        return _SWITCHES[target][_BOOLEANS[value.lower()]]
    return value


def command_of(word: str) -> str | None:
    """The command that other trainers call by a word; None if there is none."""
    rows = _table()["commands"].items()
    return next((command for command, words in rows if word in words.split()), None)


@cache
def _table() -> dict[str, Any]:
    import tomllib

    return tomllib.loads((Path(__file__).parent / "foreign_names.toml").read_text("utf-8"))


@cache
def foreign_names() -> dict[str, str]:
    """Ours by the names of other trainers, with the form of the value if it differs.

    Of names without one of ours: "; " and what to do.
    """
    tables = ("instead", "at", "commands")
    ours = {name: of for name, of in _table().items() if name not in tables}
    texts = _table()["instead"].items()
    instead = {name: f"; {text}" for text, names in texts for name in names.split()}
    return ALIASES | ours | instead


@cache
def answers_of(command: str) -> dict[str, str]:
    """What to do in place of other trainers' options, where that is of one command alone.

    By the names of the options, or their targets in `foreign_names`. A word in capitals in braces
    stands for the option's value, N for one that is a number.
    """
    rows = _table()["at"].items()
    texts = [of for commands, of in rows if command in commands.split()]
    return {name: text for of in texts for text, names in of.items() for name in names.split()}


def instead_of(word: str) -> str:
    """What to do in place of another trainer's option that is none of ours, after "; ", or ""."""
    meaning = foreign_names().get(word.replace("-", "_").lower(), "")
    return meaning if meaning.startswith("; ") else ""


def hint_at_argument(word: str, value: str | None, known: Collection[str], command: str) -> str:
    """A hint at an argument that a command does not accept, or "".

    `value` is the word that follows, if any; `known` are the command's options, without their
    dashes, and its recipe keys.
    """
    name, mark, rest = word.partition("=")
    if not word.startswith("-"):  # a key or an option without dashes, or a location
        if mark and "." in name and name in known:
            return as_question([f"--{shlex.quote(word)}"])
        if not mark or "://" in word or os.path.isdir(word):
            is_data = "data" in known and ("://" in word or os.path.isdir(word))
            return as_question([f"--data {shlex.quote(word)}"]) if is_data else ""
    name, value = name.lstrip("-"), rest if mark else value
    plain = name.replace("-", "_").lower()
    if foreign_names().get(plain) == "":
        return ""
    if text := _answer(plain, value, known, command):
        return text
    if "run.length" in known and (text := instead_of(name)):
        return text
    names = ignoring_punctuation(name, known)
    target, form = ("", "") if names else from_other_trainer(name)
    target = "out" if target == "run" and "run" not in known else target
    if target in known:
        names, value = [target], form.format(value) if value or "{}" not in form else None
    elif text := _answer(target, value, known, command):
        return text
    given = "" if value is None else f" {shlex.quote(value)}"
    names = (names or misspelt(name, known))[:3]
    return as_question([f"--{each}{given}{_REMARKS.get(each, '')}" for each in names])


def _answer(name: str, value: str | None, known: Collection[str], command: str) -> str:
    """The answer of `answers_of`, after "; ", or "" if it needs an option that is not known."""
    text = answers_of(command).get(name, "")
    options = [] if "trainyard " in text else re.findall(r"--([\w.-]*\w)", text)
    if not text or not set(options).issubset(known):
        return ""
    number = value if value and re.fullmatch(r"[\d.]+", value) else "N"
    words = {word: value or word for word in re.findall(r"{(\w+)}", text)} | {"N": number}
    return "; " + text.format_map({word: shlex.quote(of) for word, of in words.items()})


def _section(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
