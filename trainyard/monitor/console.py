"""Console output of a run: live lines, and a table with a row per evaluation."""

import platform
import sys
import time
from collections.abc import Callable
from io import TextIOBase
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainyard.course import Course
from trainyard.monitor.display import Display
from trainyard.monitor.escaping import EscapingConsole
from trainyard.monitor.figures import as_markup, duration, epochs_in_all, figures
from trainyard.monitor.outcome import METRICS
from trainyard.monitor.reports import Report
from trainyard.printable import printable
from trainyard.world import World

_LINE_EVERY_S = 10  # seconds between lines without a terminal
_REDRAWN_HZ = 4
_DECAY = "ema_decay"
_DISTANCE = "consensus_distance"
_BY_CLASS = {"balanced_accuracy": "balanced", "macro_f1": "macro F1"}
_OF_LISTS = {"micro_f1": "micro F1", "macro_f1": "macro F1"}  # with lists of labels


def console_of(
    world: World, *, is_quiet: bool = False, is_plain: bool = False, all_ranks: bool = False
) -> Console:
    """A rank's console: live on a terminal unless `is_plain`; muted on all but the first rank.

    With `all_ranks` each rank prints plain lines that begin with its rank and host.
    """
    if all_ranks and not is_quiet:
        prefix = f"[rank {world.rank} {platform.node()}] "
        return EscapingConsole(
            file=cast(TextIO, _Prefixed(sys.stdout, prefix)), force_terminal=False
        )
    is_mute = is_quiet or not world.is_first
    return EscapingConsole(quiet=is_mute, force_terminal=False if is_plain else None)


class _Prefixed(TextIOBase):
    """Writes whole lines, each in one piece, so that lines of several processes do not mix."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._line = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)


class ConsoleSink:
    """Live lines on a terminal; occasional plain lines in a log file."""

    def __init__(self, course: Course, console: Console) -> None:
        self._console, self._num_steps = console, course.num_steps
        self._epochs = epochs_in_all(course.epoch(course.num_steps))
        self._last_line = -_LINE_EVERY_S * 1.0
        self._has_head = False
        self._shows_classes = False  # true once they differ from top-1: classes differ in size
        self._kinds: dict[str, Callable[[Report], None]] = {
            "train": self._on_train,
            "val": self._on_val,
            "event": self._on_event,
        }
        self._display = Display(self._num_steps, self._epochs)
        self._live: Live | None = None
        if console.is_terminal and not console.quiet:
            self._live = Live(self._display, console=console, refresh_per_second=_REDRAWN_HZ)
            self._live.start()

    def write(self, report: Report) -> None:
        self._display.tell(report)
        self._kinds[report["kind"]](report)

    def show_evaluation(self, count: int, total: int) -> None:
        self._display.tell_evaluated(count / total)

    def close(self) -> None:
        self._display.end()
        if self._live is not None:
            self._live.stop()

    def _on_train(self, report: Report) -> None:
        due = time.monotonic() - self._last_line >= _LINE_EVERY_S
        if self._live is None and (due or report["step"] == self._num_steps):
            self._last_line = time.monotonic()
            self._console.print(self._line(report), soft_wrap=True, highlight=False)

    def _line(self, report: Report) -> str:
        return (
            f"step {report['step']}/{self._num_steps}  "
            f"epoch {min(report['epoch'], float(self._epochs)):.2f}/{self._epochs}  "
            f"{report['images_per_s']:,.0f} images/s  loss {report['loss']:.4f}  "
            f"{as_markup(figures(report))}{_time_left(report)}"
        )

    def _on_val(self, report: Report) -> None:
        is_new = not self._shows_classes and _classes_differ(report)
        self._shows_classes = self._shows_classes or is_new
        if is_new or not self._has_head:
            head = _table_head(report, self._shows_classes)
            self._console.print(Text(head, "bold"), soft_wrap=True)
            self._has_head = True
        key = _main(report)
        average = f" {report[f'ema_{key}']:9.2%}" if f"ema_{key}" in report else ""
        average += f" {report[_DECAY]:>9}" if _DECAY in report else ""
        distance = f" {report[_DISTANCE]:9.3g}" if _DISTANCE in report else ""
        others = "".join(f" {report[key]:9.2%}" for key in _others(report, self._shows_classes))
        top5 = f" {report['top5']:8.2%}" if "top5" in report else ""
        row = (
            f"{report['epoch']:7.1f} {report['step']:9d} {report[key]:10.2%}{average}{others}"
            f"{top5} {report['loss']:8.4f}{distance} {duration(report['time']):>9}"
        )
        if report["bad"]:
            row += f"   {report['bad']} could not be read"
        self._console.print(row, highlight=False, soft_wrap=True)

    def _on_event(self, report: Report) -> None:
        if "rows" in report:
            self._console.print(_grid(report["rows"]))
            return
        style = {"warning": "yellow"}.get(report.get("level", ""), "cyan")
        # The style is the text's: as an argument of print() it would apply to the live lines too.
        self._console.print(Text(printable(report["message"]), style), soft_wrap=True)


def _grid(rows: dict[str, str]) -> Table:
    """A line for each row, and more for texts that are longer than the terminal is wide."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows.items():
        grid.add_row(name, Text(printable(text)))
    return grid


def _time_left(report: Report) -> str:
    if report.get("eta") is None or report.get("eta_epoch") is None:
        return ""
    return f"  {duration(report['eta'])} left (epoch {duration(report['eta_epoch'])})"


def _main(report: Report) -> str:
    """The key of the first value of an evaluation."""
    return "map" if "map" in report else "top1"


def _others(report: Report, shows_classes: bool) -> dict[str, str]:
    """Keys and names of the values between the first and top-5."""
    if "map" in report:
        return _OF_LISTS
    return _BY_CLASS if shows_classes else {}


def _classes_differ(report: Report) -> bool:
    """True if the mean over classes is another number than the mean over images."""
    top1 = float(report.get("top1", 0.0))
    return abs(float(report.get("balanced_accuracy", top1)) - top1) > 1e-9


def _table_head(report: Report, shows_classes: bool) -> str:
    key = _main(report)
    average = f" {f'EMA {METRICS[key]}':>9}" if f"ema_{key}" in report else ""
    average += f" {'of decay':>9}" if _DECAY in report else ""
    distance = f" {'distance':>9}" if _DISTANCE in report else ""
    others = "".join(f" {name:>9}" for name in _others(report, shows_classes).values())
    top5 = f" {'top-5':>8}" if "top5" in report else ""
    return (
        f"{'epoch':>7} {'step':>9} {f'val {METRICS[key]}':>10}{average}{others}{top5} "
        f"{'loss':>8}{distance} {'time':>9}"
    )
