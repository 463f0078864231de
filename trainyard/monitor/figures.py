"""Figures of a training report as texts for people."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rich.markup import escape
from rich.text import Text

from trainyard.monitor.units import in_bytes

Report = dict[str, Any]

_MUCH = 0.05  # share of time waiting for data above which it is highlighted
_DAY_S = 24 * 3600
_GAP = 2  # spaces between figures


class Figure(NamedTuple):
    """A text with its style and display priority; 0 is shown first."""

    text: str
    rank: int
    style: str = ""


def figures(report: Report) -> Iterator[Figure]:
    """All figures but speed and loss, in display order."""
    if report.get("bad"):
        yield Figure(f"{report['bad']:,} bad", 0, "yellow")
    if report.get("skipped"):
        yield Figure(f"{report['skipped']:g} updates skipped", 0, "yellow")
    yield Figure(f"lr {report['lr']:.2e}", 1)
    if report.get("grad_norm") is not None:
        yield Figure(f"grad norm {report['grad_norm']:.3g}", 5)
    if report.get("data_wait") is not None:
        is_much = report["data_wait"] > _MUCH
        yield Figure(f"data wait {report['data_wait']:.0%}", 2, "yellow" if is_much else "")
    if report.get("world_size", 1) > 1 and report.get("images_per_s_device") is not None:
        size = report["world_size"]
        yield Figure(f"{size:,} x {report['images_per_s_device']:,.0f} images/s", 6)
    if report.get("mfu") is not None:
        yield Figure(f"MFU {report['mfu']:.1%}", 3)
    if report.get("memory"):
        yield Figure(f"memory {in_bytes(report['memory'])}", 4)
    yield from _of_gpu(report.get("gpu_use"), report.get("gpu_power"))


def _of_gpu(use: float | None, power: float | None) -> Iterator[Figure]:
    said = [] if use is None else [f"{use:.0%}"]
    said += [] if power is None else [f"{power:.0f} W"]
    if said:
        yield Figure(f"GPU {' '.join(said)}", 7)


def fitted(found: Iterable[Figure], width: int) -> list[Figure]:
    """The figures of highest priority that fit into a line, in their original order."""
    found = list(found)
    kept: set[int] = set()
    room = width + _GAP
    for number in sorted(range(len(found)), key=lambda number: found[number].rank):
        needed = len(found[number].text) + _GAP
        if needed > room:
            break  # a figure of lower priority does not fill the gap
        kept.add(number)
        room -= needed
    return [figure for number, figure in enumerate(found) if number in kept]


def joined(found: Iterable[Figure], style: str = "") -> Text:
    """Figures as one text with gaps between them."""
    text = Text(no_wrap=True, overflow="crop", end="")
    for figure in found:
        text.append(" " * _GAP if text else "")
        text.append(figure.text, figure.style or style)
    return text


def as_markup(found: Iterable[Figure]) -> str:
    """Figures as rich markup."""
    return (" " * _GAP).join(
        f"[{figure.style}]{escape(figure.text)}[/]" if figure.style else escape(figure.text)
        for figure in found
    )


def epochs_in_all(epochs: float) -> str:
    """300, 8, 0.89: steps are whole, so the last epoch may exceed the number a little."""
    return f"{round(epochs, 1 if epochs >= 1 else 2):g}"


def duration(seconds: float | None) -> str:
    """0:01:05, 26:00:00, 3d 4:00; dashes for None."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if seconds < 2 * _DAY_S:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{hours // 24}d {hours % 24}:{minutes:02d}"
