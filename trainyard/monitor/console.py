"""Console output of a run: a live line, and a table with a row per evaluation."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, Task
from rich.table import Table
from rich.text import Text

from trainyard.course import Course
from trainyard.monitor.history import METRICS, shows_top5
from trainyard.monitor.progress import Bar
from trainyard.monitor.reports import Report
from trainyard.printable import duration, epochs_in_all, how_many, in_bytes, printable

_LINE_EVERY_S = 10  # seconds between lines without a terminal
_BAR = 12  # columns
_MUCH = 0.05  # share of time waiting for data above which it is highlighted
_WIDE = 120  # columns of a terminal from which on a row has more than top-1 and loss; a log has all
_BY_CLASS = {"balanced_accuracy": "balanced", "macro_f1": "macro F1"}
_OF_LISTS = {"micro_f1": "micro F1", "macro_f1": "macro F1"}  # with lists of labels

Value = tuple[str, str]
"""A text and its style."""


class ConsoleSink:
    """A live line on a terminal; occasional plain lines in a log file."""

    def __init__(
        self, course: Course, num_classes: int, console: Console, shown: Collection[object] = ()
    ) -> None:
        """`shown`: messages, and rows of a head, that a run before has shown; see FIRST_RUN."""
        self._console, self._num_steps, self._shown = console, course.num_steps, shown
        self._epochs = epochs_in_all(float(course.epochs(course.length)))
        self._last_line = -_LINE_EVERY_S * 1.0
        self._has_head, self._num_bad = False, 0
        self._is_wide = console.width >= _WIDE or not console.is_terminal
        self._has_top5 = self._is_wide and shows_top5(num_classes)
        self._shows_classes = False  # true once they differ from top-1: classes differ in size
        self._kinds: dict[str, Callable[[Report], None]] = {
            "train": self._on_train,
            "val": self._on_val,
            "event": self._on_event,
        }
        self._live = LiveLine(console, self._num_steps, self._epochs)
        self._live.start()

    def write(self, report: Report) -> None:
        self._live.show(report)
        self._kinds[report["kind"]](report)

    def show_evaluation(self, count: int, total: int) -> None:
        self._live.show_evaluated(count / total)

    def close(self) -> None:
        self._live.stop()

    def _on_train(self, report: Report) -> None:
        due = time.monotonic() - self._last_line >= _LINE_EVERY_S
        if not self._live.is_shown and (due or report["step"] == self._num_steps):
            self._last_line = time.monotonic()
            self._print(Text(self._line(report)))

    def _line(self, report: Report) -> str:
        return "  ".join(
            (
                f"step {report['step']}/{self._num_steps}",
                f"epoch {min(report['epoch'], float(self._epochs)):.2f}/{self._epochs}",
                f"{report['images_per_s']:,.0f} images/s",
                f"loss {report['loss']:.4f}",
                *(text for text, _ in minor_values(report)),
                *_time_left(report),
            )
        )

    def _on_val(self, report: Report) -> None:
        is_new = self._is_wide and not self._shows_classes and _classes_differ(report)
        self._shows_classes = self._shows_classes or is_new
        columns = [*self._columns(report)]
        if is_new or not self._has_head:
            head = " ".join(f"{name:>{width}}" for name, width, _ in columns)
            self._print(Text(head, "bold"))
            self._has_head = True
        self._print(Text(" ".join(f"{text:>{width}}" for _, width, text in columns)))
        if report["bad"] > self._num_bad:
            self._num_bad = report["bad"]
            bad = how_many(self._num_bad, "validation image")
            self._print(Text(f"{bad} could not be read: quarantine.jsonl has each", "yellow"))

    def _on_event(self, report: Report) -> None:
        if "rows" in report:
            rows = dict(row for row in report["rows"].items() if row not in self._shown)
            if rows:
                self._console.print(_grid(rows))
            return
        if report["message"] in self._shown:
            return
        style = {"warning": "yellow"}.get(report.get("level", ""), "cyan")
        self._print(Text(printable(report["message"]), style))

    def _columns(self, report: Report) -> Iterator[tuple[str, int, str]]:
        """Names, widths and texts of the columns of an evaluation."""
        key = "map" if "map" in report else "top1"
        others = _BY_CLASS if self._shows_classes else {}
        others = _OF_LISTS if key == "map" and self._is_wide else others
        yield "epoch", 7, f"{min(report['epoch'], float(self._epochs)):.1f}"
        yield "step", 9, f"{report['step']}"
        yield f"val {METRICS[key]}", 10, f"{report[key]:.2%}"
        if f"ema_{key}" in report:
            yield f"EMA {METRICS[key]}", 9, f"{report[f'ema_{key}']:.2%}"
        if "ema_decay" in report:
            yield "of decay", 9, f"{report['ema_decay']}"
        for other, name in others.items():
            yield name, 9, f"{report[other]:.2%}"
        if "top5" in report and self._has_top5:
            yield "top-5", 8, f"{report['top5']:.2%}"
        yield "loss", 8, f"{report['loss']:.4f}"
        if "consensus_distance" in report:
            yield "distance", 9, f"{report['consensus_distance']:.3g}"
        yield "time", 9, duration(report["time"])

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


# --- the live line ---


class LiveLine(Bar):
    """Progress, time left, speed and loss of a run; minor values on a second line.

    What does not fit the width is cut off at the right.
    """

    def __init__(self, console: Console, num_steps: int, epochs: str) -> None:
        self._epochs, self._minor = epochs, Text()
        bar = BarColumn(_BAR, complete_style="cyan", finished_style="cyan")
        share = "[cyan]{task.percentage:3.0f}%"
        super().__init__("epoch {task.fields[epoch]}", bar, share, _Values(), console=console)
        self._run = self.add_task("", total=num_steps, epoch=f"0.0/{epochs}")

    def show(self, report: Report) -> None:
        """Show where the run is; a training report's values stay until the next one's."""
        epoch = min(report["epoch"], float(self._epochs))  # the last step may go beyond it
        decimals = 1 if float(self._epochs) >= 1 else 2
        fields: dict[str, Any] = {
            "epoch": f"{epoch:.{decimals}f}/{self._epochs}",
            "evaluated": None,
        }
        if report["kind"] == "train":
            self._minor = _joined(minor_values(report), "dim")
            fields |= {"report": report, "since": time.monotonic()}
        self.update(self._run, completed=report["step"], **fields)

    def show_evaluated(self, share: float) -> None:
        """Show the share of the images that an evaluation has seen."""
        self.update(self._run, evaluated=share)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield Text()  # separates it from the table
        yield from super().get_renderables()
        yield self._minor


class _Values(ProgressColumn):
    """Time left, which passes between reports, speed and loss; or the state of an evaluation."""

    def render(self, task: Task) -> Text:
        report, share = task.fields.get("report"), task.fields.get("evaluated")
        state = "starting" if share is None else f"evaluating {share:.0%}"
        if report is None:
            return _joined([(state, "bold")])
        left = report.get("eta")
        if left is not None:
            left = max(left - (task.get_time() - task.fields["since"]), 0.0)
        values = [(f"{report['images_per_s']:,.0f} images/s", "bold")]
        values += [(f"loss {report['loss']:.4f}", "bold")]
        return _joined(
            [(f"{duration(left)} left", ""), *(values if share is None else [(state, "bold")])]
        )


def minor_values(report: Report) -> Iterator[Value]:
    """All values of a training report but speed, loss and time; what is wrong comes first."""
    if report.get("bad"):
        yield f"{report['bad']:,} bad", "yellow"
    if report.get("skipped"):
        yield f"{report['skipped']:g} update{'s' * (report['skipped'] != 1)} skipped", "yellow"
    yield f"lr {report['lr']:.2e}", ""
    if report.get("data_wait") is not None:
        is_much = report["data_wait"] > _MUCH
        yield f"data wait {report['data_wait']:.0%}", "yellow" if is_much else ""
    if report.get("mfu") is not None:
        yield f"MFU {report['mfu']:.1%}", ""
    if report.get("memory"):
        yield f"memory {in_bytes(report['memory'])}", ""
    if report.get("grad_norm") is not None:
        yield f"grad norm {report['grad_norm']:.3g}", ""
    if report.get("world_size", 1) > 1 and report.get("images_per_s_device") is not None:
        yield f"{report['world_size']:,} x {report['images_per_s_device']:,.0f} images/s", ""
    if report.get("gpu_use") is not None:
        yield f"GPU {report['gpu_use']:.0%}", ""
    if report.get("gpu_power") is not None:
        yield f"{report['gpu_power']:.0f} W", ""


def _joined(values: Iterable[Value], style: str = "") -> Text:
    """Values as one line, which is cut off rather than wrapped."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for value, its_style in values:
        text.append("  " if text else "")
        text.append(value, its_style or style)
    return text


def _time_left(report: Report) -> Iterator[str]:
    if report.get("eta") is not None and report.get("eta_epoch") is not None:
        yield f"{duration(report['eta'])} left (epoch {duration(report['eta_epoch'])})"


# --- the head of a run, and its evaluations ---


def _grid(rows: dict[str, str]) -> Table:
    """A line for each row, and more for texts that are longer than the terminal is wide."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows.items():
        grid.add_row(name, Text(printable(text)))
    return grid


def _classes_differ(report: Report) -> bool:
    """True if the mean over classes is another number than the mean over images."""
    top1 = float(report.get("top1", 0.0))
    return abs(float(report.get("balanced_accuracy", top1)) - top1) > 1e-9
