"""Parses Slurm's lists of hosts and numbers: n[1-2,05-07],lab[01,03]-ib and 2(x2),1."""

import re
from collections.abc import Iterator

from trainyard.errors import InputError

_ITEM = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_in(text: str) -> Iterator[str]:
    """The hosts of a list, generated one by one.

    InputError, with the text, if it is no such list.
    """
    place = 0
    while place < len(text):
        item = _ITEM.match(text, place)
        if item is None:
            raise _not_a_list(text)
        yield from _expanded(item[1], text)
        place = item.end()


def _expanded(item: str, text: str) -> Iterator[str]:
    bracket = _BRACKET.search(item)
    if bracket is None:
        yield item
        return
    for number in _numbers(bracket[1], text):
        for rest in _expanded(item[bracket.end() :], text) if item[bracket.end() :] else ("",):
            yield item[: bracket.start()] + number + rest


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _not_a_list(text)
        width, last = len(found[1]), int(found[2] or found[1])
        for number in range(int(found[1]), last + 1):
            yield f"{number:0{width}}"


def _not_a_list(text: str) -> InputError:
    return InputError(f"{text!r} is no list of hosts such as n[1-2,05],m3")


def runs_in(text: str) -> list[tuple[int, int]]:
    """The numbers of a list with their counts: [(2, 3), (1, 1)] for 2(x3),1."""
    found = [_RUN.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise InputError(f"{text!r} is no list of numbers of tasks such as 2(x3),1")
    return [(int(run[1]), int(run[2] or 1)) for run in found if run]


def number_at(position: int, text: str) -> int:
    """The number at a position, from 0, of such a list, without expanding it."""
    for number, times in runs_in(text):
        if position < times:
            return number
        position -= times
    raise InputError(f"{text!r} names fewer nodes than there are")
