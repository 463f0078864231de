"""Time left of a run and of its epoch."""

import math
from collections import deque

from trainyard.course import Course, Every
from trainyard.image_size import num_pixels
from trainyard.monitor.clock import Clock

_REPORTS = 32  # window of the pace


class Eta:
    """Estimates the seconds left from the recent pace and from past evaluations."""

    def __init__(self, course: Course, eval_every: Every) -> None:
        self._course, self._eval_every = course, eval_every
        self._passed: deque[tuple[float, float]] = deque(maxlen=_REPORTS + 1)

    def after(self, step: int, clock: Clock) -> dict[str, float | None]:
        """`eta_epoch` and `eta` after a step; None until there is a pace.

        The time of an image is assumed proportional to its pixels. An evaluation still due adds the
        mean time of past ones, including their checkpoints; 0 before the first one.
        """
        now = (self._work(step), clock.training)
        if self._passed and now[0] <= self._passed[-1][0]:  # the run rolled back
            self._passed.clear()
        self._passed.append(now)
        work, seconds = (last - first for first, last in zip(self._passed[0], now, strict=True))
        if not work:
            return {"eta_epoch": None, "eta": None}
        pace = seconds / work
        last = self._course.num_steps
        epoch = math.floor(self._course.epoch(step)) + 1
        stop = min(math.ceil(self._course.at(f"{epoch} epochs")), last)
        done = self._evaluations(step - 1)
        each = (clock.seconds("eval") + clock.seconds("save")) / done if done else 0.0

        def until(stop: int) -> float:
            evaluations = max(self._evaluations(stop) - done, 0)
            return pace * max(self._work(stop) - now[0], 0) + each * evaluations

        return {"eta_epoch": until(stop), "eta": until(last)}

    def _evaluations(self, step: int) -> int:
        """Number of evaluations of a run up to a step, including that of the step itself."""
        is_last = step >= self._course.num_steps and not self._eval_every.due(step)
        return self._eval_every.times(step) + is_last

    def _work(self, step: int) -> float:
        """Pixels of the images of the first `step` steps."""
        return sum(
            (min(step, phase.stop) - phase.start) * phase.batch * num_pixels(phase.image_size)
            for phase in self._course.phases
            if phase.start < step
        )
