"""Whether data bounds a run, judged by its training reports."""

from collections.abc import Callable

from trainyard.monitor.clock import Clock
from trainyard.monitor.reports import Report

_FIRST_S = 60.0
_NOTABLE = 0.1  # share of the time spent waiting for data below which data is no bottleneck
_SPARE = 1.25  # loader speed over real speed from which a wait is not the loader's fault


class Bounds:
    """Passes reports on, and now and then adds to a training report whether data bounds the run.

    The first time is after a minute of the process, or after `every_s` if that is less. The first
    training report is not judged: it includes slow first steps.
    """

    def __init__(self, report: Callable[[Report], None], clock: Clock, every_s: float) -> None:
        self._report, self._clock, self._every_s = report, clock, every_s
        self._next = clock.total + min(_FIRST_S, every_s)
        self._is_warm = False

    def __call__(self, report: Report) -> None:
        self._report(report)
        if report["kind"] != "train":
            return
        if self._is_warm and self._clock.total >= self._next:
            self._next = self._clock.total + self._every_s
            self._report(judge(report))
        self._is_warm = True


def judge(train: Report) -> Report:
    """An event that says whether data bounds the steps of a training report.

    A wait for data is the device's if the loader is much faster than needed: the device is then
    busy with steps, copies or augmentation.
    """
    wait, loader = f"{train['data_wait']:.0%} of the time", train["images_per_s_loader"]
    bound = "device or ranks"
    if train["data_wait"] < _NOTABLE:
        message = f"data does not bound this run: {wait} goes into waiting for it"
    elif loader is not None and loader >= _SPARE * train["images_per_s"]:
        message = (
            f"the loader does not bound this run, though {wait} goes into waiting for data: the "
            "device is busy with steps, copies or augment.*"
        )
    else:
        bound = "data"
        message = (
            f"data bounds this run: {wait} goes into waiting for it; see `trainyard bench loader`"
        )
    speed = f"{train['images_per_s']:,.0f} images/s"
    if loader is not None:
        speed += f", the loader could make {loader:,.0f}"
    return {"kind": "event", "event": "bounds", "message": f"{message} ({speed})", "bound": bound}
