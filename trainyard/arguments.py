"""Numbers on the command line, as types of argparse."""

import argparse
import math


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def number(text: str) -> float:
    """A number from 0 up."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return found


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    found = number(text)
    if found > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return found


def above_zero(text: str) -> float:
    """A number above 0."""
    found = number(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return found


def enlarging(text: str) -> tuple[float, ...]:
    """Numbers from 1 up, between commas."""
    found = tuple(number(part) for part in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return found
