"""The end that is told of when ranks end in different ways."""

import pytest

from trainyard.launch.ends import first_cause


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({0: 130, 1: -9}, (1, -9)),  # a launcher stopped the one that was left
        ({0: 1, 1: 75}, (1, 75)),  # told by a signal; the other one has lost it
        ({0: -15, 1: 1, 2: 2}, (2, 2)),
        ({0: 130, 1: 130}, (0, 130)),
        ({0: 0, 1: 3}, (1, 3)),
        ({0: 1, 1: -15, 2: 1}, (0, 1)),
    ],
)
def test_the_cause_comes_before_what_came_of_it(
    ends: dict[int, int], first: tuple[int, int]
) -> None:
    assert first_cause(ends) == first
