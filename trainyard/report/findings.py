"""Signs in a run's reports that it learns nothing or too well; the page has their causes."""

import math
from collections.abc import Iterator
from statistics import median

from trainyard.monitor.reports import Report
from trainyard.report.runs import Run, number
from trainyard.training.label_scores import LabelScores

PAGE = "docs/learns-nothing.md"
MIN_EPOCHS = 3  # before which no run is judged
_BEFORE = 10  # reports that a jump of the loss is compared with
_FAR_ABOVE = 0.15  # of training accuracy above validation
_FAR_BELOW = 0.10  # of training accuracy below validation, without augmentation


def findings(run: Run) -> list[str]:
    """A sentence for each sign, most serious first; none for a run that learns as it should."""
    return [*_without_updates(run), *_at_chance(run), *_jumps(run), *_gaps(run)]


def training_before(run: Run, evaluation: Report) -> tuple[float, float] | None:
    """Mean training loss and top-1 since the evaluation before, or over the last epoch if shorter.

    None without a report in that time.
    """
    before = [r["step"] for r in run.history.val if r["step"] < evaluation["step"]]
    start = max(before, default=0)
    last = number(evaluation, "epoch") or 0.0
    rows = [
        (loss, top1)
        for report in run.history.train
        if start < report["step"] <= evaluation["step"]
        and (number(report, "epoch") or 0.0) > last - 1
        and (loss := number(report, "loss")) is not None
        and (top1 := number(report, "top1")) is not None
    ]
    if not rows:
        return None
    return sum(loss for loss, _ in rows) / len(rows), sum(top1 for _, top1 in rows) / len(rows)


def _without_updates(run: Run) -> Iterator[str]:
    """Reports between which every update was skipped have a loss of 0, a mean over nothing."""
    found = [r for r in run.history.train if r.get("loss") == 0 and (number(r, "skipped") or 0) > 0]
    if found:
        yield (
            f"Up to step {found[-1]['step']:,} every update of {len(found)} reports was skipped: "
            "loss or gradient were not finite."
        )


def _at_chance(run: Run) -> Iterator[str]:
    """After three epochs, and once the rate has risen to half of optim.lr."""
    last, count = _last(run), _classes(run)
    if last is None or count is None or not _has_warmed_up(run):
        return
    keys = ("balanced_accuracy", "ema_balanced_accuracy")
    accuracies = [of for key in keys if (of := number(last, key)) is not None]
    if accuracies and max(accuracies) <= min(2 / count, 0.9 / count + 0.1):
        loss = number(last, "loss")
        said = "not finite" if loss is None else f"{loss:.2f}"
        yield (
            f"After {last['epoch']:.1f} epochs the balanced accuracy is {max(accuracies):.1%}, "
            f"about that of guessing among {count:,} classes, {1 / count:.1%}. The loss of "
            f"guessing is {math.log(count):.2f}; the validation loss is {said}."
        )


def _has_warmed_up(run: Run) -> bool:
    rates = [rate for r in run.history.train if (rate := number(r, "lr")) is not None]
    return max(rates, default=0.0) >= 0.5 * float(run.recipe.get("optim.lr", math.inf))


def _jumps(run: Run) -> Iterator[str]:
    """Twice the median of the reports before, and higher by half the loss of guessing."""
    count = _classes(run)
    if count is None:
        return
    rows = [(r["step"], loss) for r in run.history.train if (loss := number(r, "loss")) is not None]
    steps = []
    for place in range(3, len(rows)):
        usual = median(loss for _, loss in rows[max(place - _BEFORE, 0) : place])
        if rows[place][1] > max(2 * usual, usual + math.log(count) / 2):
            steps.append(rows[place][0])
    if steps:
        yield (
            "The training loss jumped to twice that of the reports before or higher, "
            f"{len(steps)} times, first at step {steps[0]:,}."
        )


def _gaps(run: Run) -> Iterator[str]:
    last = _last(run)
    before = None if last is None else training_before(run, last)
    if last is None or before is None:
        return
    train, keys = before[1], ("top1", "ema_top1")
    val = max((of for key in keys if (of := number(last, key)) is not None), default=train)
    if train - val > _FAR_ABOVE:
        yield (
            f"Training accuracy is {train:.1%}, validation accuracy {val:.1%}: the model "
            "overfits, labels differ, or images or statistics do."
        )
    elif val - train > _FAR_BELOW and (run.share_done() or 0) >= 0.5 and _is_plain(run):
        yield (
            f"Validation accuracy is {val:.1%}, training accuracy {train:.1%}, though nothing is "
            "augmented: training labels are wrong, or validation images are trained on."
        )


def _is_plain(run: Run) -> bool:
    """Whether training images are drawn and shown as validation images are, flips aside."""
    of = run.recipe.get
    bounds = of("augment.scale"), of("augment.ratio")
    are_whole = all(
        isinstance(pair, list) and 0.9 <= min(pair) <= max(pair) <= 1.12 for pair in bounds
    )
    changes = (
        *("augment.randaugment", "augment.color_jitter", "augment.erasing", "augment.mixup"),
        *("augment.cutmix", "model.drop_path", "model.options", "data.balance", "data.weights"),
    )
    return are_whole and not any(of(key) for key in changes)


def _last(run: Run) -> Report | None:
    """The last evaluation, once there have been MIN_EPOCHS."""
    last = run.history.val[-1] if run.history.val else None
    return last if last and (number(last, "epoch") or 0.0) >= MIN_EPOCHS else None


def _classes(run: Run) -> int | None:
    if run.classes:
        return len(run.classes)
    if run.recorded is None or isinstance(run.recorded.said, LabelScores):
        return None
    return int(run.recorded.labels.max()) + 1
