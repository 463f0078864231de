"""What counts as a token of code."""

import pytest

from tests.size import tokens_of


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("", 0),
        ("x = 1", 3),
        ("x = 1  # one", 3),
        ("# one\n\n\nx = 1\n", 3),
        ('"""A module."""\nx = "text"\n', 3),
        ('x = 1\n"""An attribute."""\n', 3),
        ('def f():\n    """Over\n    lines."""\n    return x\n', 7),
        ("f(\n    x,\n)\n", 5),  # as many as in one line, but for the comma
    ],
)
def test_comments_docstrings_and_blank_lines_are_no_code(source: str, tokens: int) -> None:
    assert tokens_of(source) == tokens
