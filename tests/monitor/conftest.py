"""A clock that tests set."""

import time

import pytest


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one number that a test may set."""
    now = [100.0]
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    return now
