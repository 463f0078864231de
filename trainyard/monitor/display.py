"""Live lines at the foot of a terminal during training."""

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainyard.monitor.figures import Figure, duration, figures, fitted, joined

Report = dict[str, Any]

_LEAST_BAR, _MOST_BAR = 10, 40  # columns
_BAR = Figure(" " * _LEAST_BAR, 5)


class Display:
    """Progress, speed, loss and time left; minor figures on a second line."""

    def __init__(self, num_steps: int, epochs: str) -> None:
        self._num_steps, self._epochs = num_steps, epochs
        self._now: Report = {"step": 0, "epoch": 0.0}
        self._training: Report | None = None  # the latest report
        self._told = 0.0  # time of the latest report
        self._ended: float | None = None
        self._evaluated: float | None = None  # share of the images, during an evaluation

    def tell(self, report: Report) -> None:
        self._now, self._evaluated = report, None
        if report["kind"] == "train":
            self._training, self._told = report, time.monotonic()

    def tell_evaluated(self, share: float) -> None:
        self._evaluated = share

    def end(self) -> None:
        """Stop the countdown of the time left."""
        self._ended = time.monotonic()

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        yield Text()  # separates it from the table
        yield self._first_line(width)
        if self._training is not None:
            yield joined(fitted(figures(self._training), width), "dim")

    def _first_line(self, width: int) -> RenderableType:
        share = min(self._now["step"] / self._num_steps, 1.0)
        epoch = min(self._now["epoch"], float(self._epochs))  # the last step may go beyond it
        found = fitted(
            [
                Figure(f"epoch {epoch:.1f}/{self._epochs}", 1),
                _BAR,
                Figure(f"{share:4.0%}", 0, "cyan"),
                *self._progress(),
            ],
            width,
        )
        needed = sum(len(figure.text) + 2 for figure in found) - 2
        length = min(_LEAST_BAR + width - needed, _MOST_BAR)
        bar = ProgressBar(1.0, share, width=length, complete_style="cyan", finished_style="cyan")
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(*(bar if figure is _BAR else joined([figure]) for figure in found))
        return line

    def _progress(self) -> Iterator[Figure]:
        if self._evaluated is not None:
            yield Figure(f"evaluating {self._evaluated:.0%}", 2, "bold")
        elif self._training is None:
            yield Figure("starting", 2, "bold")
        else:
            yield Figure(f"{self._training['images_per_s']:,.0f} images/s", 2, "bold")
            yield Figure(f"loss {self._training['loss']:.4f}", 3, "bold")
        if self._training is not None:
            passed = (self._ended or time.monotonic()) - self._told
            yield Figure(f"{_left(self._training.get('eta'), passed)} left", 4)
            yield Figure(f"(epoch {_left(self._training.get('eta_epoch'), passed)})", 6, "dim")


def _left(seconds: float | None, passed: float) -> str:
    return duration(None if seconds is None else max(seconds - passed, 0.0))
