"""What a person sees of a run: one progress bar, a table that grows by a row per evaluation."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Report = dict[str, Any]

_LINE_EVERY_S = 10  # seconds between lines where there is no terminal to draw a bar on
_EMA = "ema_top1"
_DISTANCE = "consensus_distance"


class ConsoleSink:
    """A live bar on a terminal; in a log file plain lines, seldom."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self._console = console
        self._num_steps = num_steps
        self._numbers = ""  # of the newest training report
        self._last_line = 0.0
        self._has_head = False
        self._kinds: dict[str, Callable[[Report], None]] = {
            "train": self._on_train,
            "val": self._on_val,
            "event": self._on_event,
        }
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]:.1f}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_steps, epoch=0.0, numbers="")
        self._bar.start()

    def write(self, report: Report) -> None:
        self._kinds[report["kind"]](report)
        self._bar.update(self._task, completed=report["step"], epoch=report["epoch"])

    def show_evaluation(self, count: int, total: int) -> None:
        self._bar.update(self._task, numbers=f"evaluating {count / total:.0%}")

    def close(self) -> None:
        self._bar.stop()

    def _on_train(self, report: Report) -> None:
        numbers = (
            f"{report['images_per_s']:,.0f} images/s  loss {report['loss']:.4f}  "
            f"lr {report['lr']:.2e}"
        )
        if report.get("bad"):
            numbers += f"  [yellow]{report['bad']} bad[/yellow]"
        if report.get("skipped"):
            numbers += f"  [yellow]{report['skipped']:g} updates skipped[/yellow]"
        self._numbers = numbers
        self._bar.update(self._task, numbers=numbers)
        due = time.monotonic() - self._last_line >= _LINE_EVERY_S
        if not self._console.is_terminal and (due or report["step"] == self._num_steps):
            self._last_line = time.monotonic()
            self._console.print(
                f"step {report['step']}/{self._num_steps}  epoch {report['epoch']:.2f}  {numbers}",
                soft_wrap=True,
            )

    def _on_val(self, report: Report) -> None:
        self._bar.update(self._task, numbers=self._numbers)
        if not self._has_head:
            self._console.print(f"[bold]{_table_head(report)}[/bold]", soft_wrap=True)
            self._has_head = True
        average = f" {report[_EMA]:9.2%}" if _EMA in report else ""
        distance = f" {report[_DISTANCE]:9.3g}" if _DISTANCE in report else ""
        row = (
            f"{report['epoch']:7.1f} {report['step']:9d} {report['top1']:10.2%}{average} "
            f"{report['top5']:8.2%} {report['loss']:8.4f}{distance} {_clock(report['time']):>9}"
        )
        if report["bad"]:
            row += f"   {report['bad']} could not be read"
        self._console.print(row, highlight=False, soft_wrap=True)

    def _on_event(self, report: Report) -> None:
        if report["event"] == "resumed":  # else the steps of before would count as speed
            self._bar.reset(self._task, completed=report["step"])
        style = {"warning": "yellow"}.get(report.get("level", ""), "cyan")
        self._console.print(
            report["message"], style=style, markup=False, highlight=False, soft_wrap=True
        )


def _table_head(report: Report) -> str:
    average = f" {'EMA top-1':>9}" if _EMA in report else ""
    distance = f" {'distance':>9}" if _DISTANCE in report else ""
    return (
        f"{'epoch':>7} {'step':>9} {'val top-1':>10}{average} {'top-5':>8} {'loss':>8}{distance} "
        f"{'time':>9}"
    )


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
