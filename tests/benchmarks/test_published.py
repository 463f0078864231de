"""The comparison of estimates with what others have published."""

import pytest

from benchmarks.published import Cell, by_source, typical


def cell(source: str, longer: float) -> Cell:
    return Cell(source, "resnet50", "h100", 1.0, 1.0, longer)


def test_a_source_counts_once() -> None:
    """Five lengths of one recipe made the median theirs; a guess is no second source."""
    many = [cell("A", longer) for longer in (1.05, 1.06, 1.07, 1.08, 1.09)]
    cells = [*many, cell("B, one guess", 1.0), cell("B, another", 1.6), cell("C", 0.5)]
    assert by_source(cells) == pytest.approx({"A": 1.07, "B": 1.3, "C": 2.0})
    assert typical(cells) == pytest.approx(1.3)
