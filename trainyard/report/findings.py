"""Signs in a run's reports that it learns nothing, or overfits; the page has their causes."""

import math
from collections.abc import Iterator
from statistics import fmean

from trainyard.monitor.history import number
from trainyard.monitor.reports import Report
from trainyard.report.runs import Run

PAGE = "docs/learns-nothing.md"
_MIN_EPOCHS = 3  # before which no run is judged
_FAR_ABOVE = 0.15  # of training accuracy above validation


def findings(run: Run) -> list[str]:
    """A sentence for each sign; none for a run that learns as it should."""
    last = run.history.val[-1] if run.history.val else None
    if last is None or (number(last, "epoch") or 0.0) < _MIN_EPOCHS:
        return []
    return [*_at_chance(run, last), *_gap(run, last)]


def _training_before(run: Run, evaluation: Report) -> float | None:
    """Mean training top-1 since the evaluation before, or over the last epoch if shorter.

    None without a report in that time.
    """
    before = [r["step"] for r in run.history.val if r["step"] < evaluation["step"]]
    start = max(before, default=0)
    last = number(evaluation, "epoch") or 0.0
    values = [
        top1
        for report in run.history.train
        if start < report["step"] <= evaluation["step"]
        and (number(report, "epoch") or 0.0) > last - 1
        and (top1 := number(report, "top1")) is not None
    ]
    return fmean(values) if values else None


def _at_chance(run: Run, last: Report) -> Iterator[str]:
    """Once the rate has risen to half of optim.lr."""
    count = run.num_classes
    rates = [rate for r in run.history.train if (rate := number(r, "lr")) is not None]
    has_warmed_up = max(rates, default=0.0) >= 0.5 * (number(run.recipe, "optim.lr") or math.inf)
    keys = ("balanced_accuracy", "ema_balanced_accuracy")
    accuracies = [of for key in keys if (of := number(last, key)) is not None]
    if count is None or not accuracies or not has_warmed_up:
        return
    if max(accuracies) <= min(2 / count, 0.9 / count + 0.1):
        loss = number(last, "loss")
        text = "not finite" if loss is None else f"{loss:.2f}"
        yield (
            f"After {last['epoch']:.1f} epochs the balanced accuracy is {max(accuracies):.1%}, "
            f"about that of guessing among {count:,} classes, {1 / count:.1%}. The loss of "
            f"guessing is {math.log(count):.2f}; the validation loss is {text}."
        )


def _gap(run: Run, last: Report) -> Iterator[str]:
    before = _training_before(run, last)
    accuracies = [of for key in ("top1", "ema_top1") if (of := number(last, key)) is not None]
    if before is not None and accuracies and before - max(accuracies) > _FAR_ABOVE:
        yield (
            f"Training accuracy is {before:.1%}, validation accuracy {max(accuracies):.1%}: the "
            "model overfits, labels differ, or images or statistics do."
        )
