"""The comparison of `make twins` finds a difference, wherever it is."""

import pytest

from tests.twins.__main__ import differences

ROW = {"reports": {"train 4": {"loss": 1.25, "lrs": [0.1, 0.2]}}, "output": "a"}


def test_equal_outcomes_have_no_difference() -> None:
    assert [*differences(ROW, ROW | {})] == []


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"reports": {"train 4": {"loss": 1.2500000000000002, "lrs": [0.1, 0.2]}}}, "loss"),
        ({"reports": {"train 4": {"loss": 1.25, "lrs": [0.1]}}}, "lrs"),
        ({"reports": {"train 4": {"loss": 1.25, "lrs": [0.1, 0.3]}}}, "lrs / 1"),
        ({"reports": {}}, "reports / train 4"),
        ({"output": "b"}, "output"),
        ({"more": {}}, "more"),
    ],
)
def test_a_difference_is_named(other: dict[str, object], where: str) -> None:
    (found,) = differences(ROW, ROW | other)
    assert where in found
