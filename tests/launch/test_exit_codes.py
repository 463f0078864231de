"""The first cause when ranks end in different ways."""

import pytest

from trainyard.launch.exit_codes import first_cause


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({0: 130, 1: -9}, (1, -9)),  # the launcher stopped rank 0
        ({0: 1, 1: 75}, (0, 1)),  # ranks save together or not at all
        ({0: -15, 1: 1, 2: 2}, (2, 2)),
        ({0: 130, 1: 130}, (0, 130)),
        ({0: -10, 1: -10}, (0, -10)),  # before the first step
        ({0: 0, 1: 130}, (1, 130)),
        ({0: 0, 1: 3}, (1, 3)),
        ({0: 1, 1: -15, 2: 1}, (0, 1)),
    ],
)
def test_first_cause(ends: dict[int, int], first: tuple[int, int]) -> None:
    assert first_cause(ends) == first
