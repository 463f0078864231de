"""Cases of a parametrised test that are in another tier than the test itself."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiered(
    cases: Iterable[Any], *, quick: Iterable[Any] = (), night: Iterable[Any] = ()
) -> list[Any]:
    """Return the cases, with the markers `quick` and `night` on those that are named."""
    everything = list(cases)
    tiers = dict.fromkeys(quick, pytest.mark.quick) | dict.fromkeys(night, pytest.mark.night)
    assert tiers.keys() <= set(everything), "not among the cases"
    return [_case(case, tiers[case]) if case in tiers else case for case in everything]


def _case(case: Any, mark: pytest.MarkDecorator) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=mark)
