"""How long a run, and its epoch, will take from here."""

import math
from collections import deque

from trainyard.course import Course, Every
from trainyard.monitor.clock import Clock

_REPORTS = 32  # over whose time the pace is taken


class Eta:
    """Seconds that are left, by the pace of late and the evaluations that there were."""

    def __init__(self, course: Course, eval_every: Every) -> None:
        self._course, self._eval_every = course, eval_every
        self._passed: deque[tuple[float, float]] = deque(maxlen=_REPORTS + 1)

    def after(self, step: int, clock: Clock) -> dict[str, float | None]:
        """`eta_epoch` and `eta`, when a step has been made; None until there is a pace.

        The time of an image is taken to grow as its pixels do. Of evaluations, which include the
        checkpoints made meanwhile, so many are to come as are due; what they take is known after
        the first one.
        """
        now = (self._work(step), clock.training)
        if self._passed and now[0] <= self._passed[-1][0]:  # the run went back
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
        """That a run has had after the evaluation of a step, if it has one."""
        is_last = step >= self._course.num_steps and not self._eval_every.due(step)
        return self._eval_every.times(step) + is_last

    def _work(self, step: int) -> float:
        """Pixels of the first so many steps' images."""
        return sum(
            (min(step, phase.stop) - phase.start) * phase.batch * phase.image_size**2
            for phase in self._course.phases
            if phase.start < step
        )
