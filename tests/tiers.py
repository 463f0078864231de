"""Which tests run first, and cases that are in another tier than their test itself."""

from collections.abc import Iterable, Sequence
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


def in_parts(items: Sequence[pytest.Item], num_parts: int) -> list[pytest.Item]:
    """Tests in the order in which that many processes get them, each a part of about equal length.

    In each part quick ones come first, then slow ones by whole files, those of services before
    others: what is left at the end, and goes to a process that has none, is short.
    """
    quick = [item for item in items if _is_quick(item)]
    files: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if not _is_quick(item):
            files.setdefault(item.path, []).append(item)
    parts = [quick[part::num_parts] for part in range(num_parts)]
    for path in sorted(files, key=lambda path: "services" not in path.parts):
        min(parts, key=len).extend(files[path])
    return [item for part in parts for item in part]


def _is_quick(item: pytest.Item) -> bool:
    slower = item.get_closest_marker("slow") or item.get_closest_marker("night")
    return slower is None or item.get_closest_marker("quick") is not None
