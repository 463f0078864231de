"""Successive halving (Jamieson and Talwalkar, 2016): after a part of the training, half of the runs
go on.

A run that waits has been stopped as by Ctrl-C, with a checkpoint: if it goes on, its weights are
those of a run that was never stopped. Which runs go on depends on their evaluations alone, up to
the first one at or after the part: the same command decides again alike.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from trainyard.errors import InputError
from trainyard.monitor.history import score
from trainyard.report.runs import read_brief

_ROUNDING = 1e-6


def shares(count: int) -> list[float]:
    """The shares of the training after which half of the runs left goes on; the last is 1."""
    return [0.5**power for power in range(count.bit_length() - 1, -1, -1)]


def score_at(path: Path, share: float) -> float | None:
    """The best score of a run, 0 to 1, up to its first evaluation after a share of its length.

    None before that evaluation, and without a run.
    """
    try:
        run = read_brief(path, path.name)
    except (InputError, OSError):
        return None
    best = -1.0
    for report in run.history.val:
        best = max(best, score(report, run.best_by))
        if (run.share_of(report) or 0.0) >= share - _ROUNDING:
            return best
    return best if run.ended_early else None


def better_half(scores: Mapping[str, Sequence[float | None]]) -> list[str]:
    """The names of the higher means, at least one; those with a None are out, as of failed runs."""
    means = dict[str, float]()
    for name, of in scores.items():
        known = [one for one in of if one is not None]
        if len(known) == len(of):
            means[name] = fmean(known)
    return sorted(means, key=lambda name: -means[name])[: max(len(scores) // 2, 1)]
