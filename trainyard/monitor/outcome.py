"""The result of a run."""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from trainyard.errors import Stopped


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    run: str
    step: int
    seconds: float  # of the whole run, over all restarts
    last: dict[str, Any]  # the latest evaluation
    best: dict[str, Any]  # the evaluation with the highest top1
    stopped: type[Stopped] | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stopped": self.stopped.__name__ if self.stopped else None}

    def sentence(self) -> str:
        time = timedelta(seconds=round(self.seconds))
        if self.stopped:
            return f"stopped at step {self.step:,} after {time}; the same command resumes"
        return (
            f"top-1 {self.last['top1']:.2%} (best {self.best['top1']:.2%} at step "
            f"{self.best['step']:,}) in {time}; the run is in {self.run}"
        )
