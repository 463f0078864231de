"""Where the time of a run goes, over all its restarts."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds in total and per phase ("data", "eval", "save"); training is what is left."""

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

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total, **self._phases}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._before, self._started = state["total"], time.perf_counter()
        self._phases = defaultdict(float, {k: v for k, v in state.items() if k != "total"})
