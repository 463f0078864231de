"""The result of a run."""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from trainyard.errors import Stopped
from trainyard.files import finite
from trainyard.monitor.history import METRICS, PROBE, score
from trainyard.printable import how_many


def without_better(stale: int, best_by: str) -> str:
    """Why a run ends early, in words, after `stale` evaluations without a better one."""
    return f"no better {METRICS[best_by]} in {how_many(stale, 'evaluation')} (run.patience)"


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    run: str
    step: int
    seconds: float  # of the whole run, over all restarts
    last: dict[str, Any]  # the latest evaluation
    best: dict[str, Any]  # the evaluation with the highest value of `best_by`
    stopped: type[Stopped] | None
    best_by: str = "top1"
    was_complete: bool = False
    """True if there was nothing left to train."""
    stale: int = 0
    """Evaluations without a better one, if the run has ended by run.patience."""

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON, in which a loss that is not finite is None."""
        tree: dict[str, Any] = finite(asdict(self))
        return tree | {"stopped": self.stopped.__name__ if self.stopped else None}

    def sentence(self) -> str:
        """The result in words; its values are those that decide which evaluation is the best."""
        time = timedelta(seconds=round(self.seconds))
        if self.stopped:
            return f"stopped at step {self.step:,} after {time}; the same command resumes"
        probe = f"; linear probe {self.last[PROBE]:.2%}" if PROBE in self.last else ""
        result = (
            f"{METRICS[self.best_by]} {score(self.last, self.best_by):.2%} "
            f"(best {score(self.best, self.best_by):.2%} at step {self.best['step']:,}{probe}) "
            f"in {time}"
        )
        if self.stale:
            result += f", with {without_better(self.stale, self.best_by)}"
        if self.was_complete:
            return f"{self.run} is complete already: {result}"
        return f"{result}; the run is in {self.run}"
