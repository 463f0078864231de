"""Options of the command line: numbers, as types of argparse."""

import argparse
import math

Parser = argparse._ActionsContainer
"""A parser, or a group of its options."""


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole_number(text: str) -> int:
    """A whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def number(text: str) -> float:
    """A number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def above_zero(text: str) -> float:
    """A number above 0."""
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def enlarging(text: str) -> tuple[float, ...]:
    """Numbers from 1 up, between commas."""
    values = tuple(number(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return values
