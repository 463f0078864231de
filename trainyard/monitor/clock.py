"""Time of a run by phase, over all its restarts."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

_BESIDES = ("eval", "save")  # phases that do not count as training


class Clock:
    """Seconds in total and per phase. Training is all time outside of "eval" and "save".

    Training includes "data", the wait for the next batch.
    """

    def __init__(self) -> None:
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._before = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] += time.perf_counter() - started

    def seconds(self, phase: str) -> float:
        return self._phases[phase]

    @property
    def total(self) -> float:
        return self._before + time.perf_counter() - self._started

    @property
    def training(self) -> float:
        return self.total - sum(self._phases[name] for name in _BESIDES)

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total, **self._phases}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._before, self._started = state["total"], time.perf_counter()
        self._phases = defaultdict(float, {k: v for k, v in state.items() if k != "total"})
