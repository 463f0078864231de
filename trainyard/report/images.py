"""Figures of a page as PNGs to send: curves, confusion matrix, worst errors, the first batch.

They are 1200 pixels wide, and can be read at half of that.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from trainyard.data.storage.credentials import without_secrets
from trainyard.datasets.contact_sheet import (
    CHAT_PIXELS,
    Font,
    Tile,
    save_sheet,
    sheet_of,
    shortened,
)
from trainyard.errors import InputError, TrainyardError
from trainyard.printable import how_many
from trainyard.report.charts import Chart, Series, charts_of
from trainyard.report.curves import Floats, smoothed
from trainyard.report.judgement import FEW, Matrix, shade_of
from trainyard.report.overview import result_of
from trainyard.report.page import NAME, title_of
from trainyard.report.pictures import has_changed, open_album
from trainyard.report.predictions import labels_of, matrix_of, worst_errors
from trainyard.report.runs import Run, best_recorded, groups_of, read_runs
from trainyard.training.label_scores import LabelScores
from trainyard.training.recorded import Recorded

Line = list[tuple[float, float]]

# Pixels; all is drawn at twice the size, as Pillow's lines have hard edges.
_WIDTH, _MARGIN, _PANEL = 2400, 56, 900
_TITLE, _TEXT, _SMALL = 56, 44, 38  # of letters
_CELL = 56, 110  # height of a row of a matrix, from and to
_SMOOTHING = 0.2 * 0.32**2  # as the page opens
_TICKS = 5
_ERRORS, _BATCH, _COLUMNS = 12, 16, 4  # of sheets


@cache
def _css() -> str:
    return (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def _colour(name: str, share: float = 1.0) -> tuple[int, ...]:
    """A colour of the light page, or a share of it on white."""
    found = re.search(rf"--{name}: light-dark\((#\w+)", _css())
    assert found
    return tuple(round(255 - share * (255 - of)) for of in ImageColor.getrgb(found[1]))


def _shade(number: int) -> float:
    found = re.search(rf"\.shade{number} .* (\d+)%", _css())
    return int(found[1]) / 100 if found else 0.0


def _font(size: int) -> Font:
    return ImageFont.load_default(size)


def _paper(height: float, title: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    paper = Image.new("RGB", (_WIDTH, round(height) // 2 * 2), "white")
    draw = ImageDraw.Draw(paper)
    text = shortened(title, _font(_TITLE), _WIDTH - 2 * _MARGIN)
    draw.text((_MARGIN, _MARGIN - 16), text, _colour("ink"), _font(_TITLE))
    return paper, draw


# --- curves ---


class _Frame(NamedTuple):
    """The place of a chart's lines in pixels, and the ranges of steps and values."""

    left: float
    top: float
    right: float
    bottom: float
    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        return float(np.interp(step, self.steps, (self.left, self.right)))

    def y(self, value: float) -> float:
        return float(np.interp(value, self.values, (self.bottom, self.top)))

    def along(self, steps: Floats, values: Floats) -> Line:
        return [*zip(map(self.x, steps), map(self.y, values), strict=True)]


def curves_image(charts: Sequence[Chart], title: str) -> Image.Image | None:
    """The large charts, two in a row, as the page opens; None without reports."""
    large = [chart for chart in charts if chart.is_large]
    top = _MARGIN + 1.6 * _TITLE
    paper, draw = _paper(top + math.ceil(len(large) / 2) * _PANEL, title)
    for number, chart in enumerate(large):
        row, column = divmod(number, 2)
        _draw_chart(draw, chart, _MARGIN + column * _WIDTH / 2, top + row * _PANEL)
    return paper.reduce(2) if large else None


def _draw_chart(draw: ImageDraw.ImageDraw, chart: Chart, left: float, top: float) -> None:
    right, font = left + _WIDTH / 2 - 1.5 * _MARGIN, _font(_SMALL)
    draw.text((left, top), chart.title, _colour("ink"), _font(_TEXT))
    x, y = left, top + 1.4 * _TEXT
    for series in chart.series:  # the legend
        text = f"{series.name} {format(float(series.curve.drawn.values[-1]), chart.form)}"
        text = shortened(text, font, right - left - 80)
        width = font.getlength(text) + 80
        x, y = (left, y + 1.3 * _SMALL) if left < x and x + width > right else (x, y)
        _draw_line(draw, [(x, y + 24), (x + 44, y + 24)], series)
        draw.text((x + 56, y), text, _colour("ink"), font)
        x += width
    box = left + 3.4 * _SMALL, y + 2.2 * _SMALL, right, top + _PANEL - 3 * _SMALL
    frame = _Frame(*box, *_ranges(chart))
    _draw_grid(draw, frame, is_share=chart.form.endswith("%"))
    for series in chart.series:
        _draw_series(draw, series, frame)


def _ranges(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of steps and of values, as in charts.js."""
    curves = [series.curve for series in chart.series]
    steps = np.concatenate([curve.drawn.steps for curve in curves])
    values = np.concatenate([of for c in curves for of in (c.drawn.values, *(c.band or ()))])
    first, last = float(steps.min()), float(steps.max())
    low, high = _padded(float(values.min()), float(values.max()))
    if chart.form.endswith("%"):
        low, high = max(low, 0.0), min(high, 1.0)
    first = 0.0 if first < 0.2 * last else first
    return (first, last) if last > first else _padded(first, last), (low, high)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.04 or abs(high) * 0.1 or 1
    return low - room, high + room


def _draw_grid(draw: ImageDraw.ImageDraw, frame: _Frame, *, is_share: bool) -> None:
    font, soft, below = _font(_SMALL), _colour("soft"), frame.bottom + 14
    for value in _ticks(*frame.values):
        y, text = frame.y(value), f"{100 * value:.6g}%" if is_share else f"{value:.4g}"
        draw.line((frame.left, y, frame.right, y), _colour("grid"), 2)
        draw.text((frame.left - 16, y), text, soft, font, anchor="rm")
    for step in _ticks(*frame.steps):
        text = f"{step / 1000:g}k" if step >= 10_000 else f"{step:,.4g}"
        draw.text((frame.x(step), below), text, soft, font, anchor="ma")
    draw.text((frame.right, below + 1.1 * _SMALL), "steps", soft, font, anchor="ra")
    draw.line((frame.left, frame.bottom, frame.right, frame.bottom), _colour("axis"), 3)


def _ticks(low: float, high: float) -> list[float]:
    """About _TICKS multiples of 1, 2 or 5 times a power of ten."""
    wanted = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= 0.7 * wanted)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _draw_series(draw: ImageDraw.ImageDraw, series: Series, frame: _Frame) -> None:
    curve, name = series.curve, f"c{series.colour}"
    raw = frame.along(*curve.drawn)
    if curve.band:
        low, high = (frame.along(curve.means.steps, of) for of in curve.band)
        draw.polygon([*low, *high[::-1]], _colour(name, 0.16))
    if series.is_noisy:
        draw.line(raw, _colour(name, 0.28), 2)
    line = frame.along(*smoothed(curve.means, _SMOOTHING)) if series.is_noisy else raw
    _draw_line(draw, line, series)
    for x, y in raw if series.has_dots or len(raw) == 1 else []:
        draw.ellipse((x - 7, y - 7, x + 7, y + 7), _colour(name))


def _draw_line(draw: ImageDraw.ImageDraw, line: Line, series: Series) -> None:
    colour = _colour(f"c{series.colour}")
    if not series.is_dashed:
        return draw.line(line, colour, 6, joint="curve")
    x, y = np.array(line).T
    length = np.concatenate([[0.0], np.hypot(np.diff(x), np.diff(y)).cumsum()])
    at = np.arange(0.0, length[-1] + 12, 12)
    places = np.interp(at, length, x).tolist(), np.interp(at, length, y).tolist()
    points = [*zip(*places, strict=True)]
    for start, end in zip(points[::2], points[1::2], strict=False):
        draw.line((start, end), colour, 6)


# --- the confusion matrix ---


def matrix_image(matrix: Matrix, title: str) -> Image.Image:
    """The matrix of the page, with its shares where they fit."""
    font, soft = _font(_TEXT), _colour("soft")
    longest = math.ceil(max(map(font.getlength, matrix.names))) + 30
    left = _MARGIN + min(longest, _WIDTH // 3)
    cell = (_WIDTH - _MARGIN - left) / len(matrix.names)
    heads = [_head(name, font, cell - 16) for name in matrix.names]
    is_narrow = len(heads) > FEW
    if is_narrow:
        heads = [_upright(shortened(name, font, _WIDTH // 4), font) for name in matrix.names]
    top = round(_MARGIN + 3 * _TITLE + max(head.height for head in heads))
    height = min(max(cell, _CELL[0]), _CELL[1])
    paper, draw = _paper(top + len(matrix.counts) * height + _MARGIN, title)
    text = f"Rows: the class. Columns: the model's guess{matrix.which}."
    draw.text((_MARGIN, _MARGIN + 1.2 * _TITLE), text, soft, _font(_SMALL))
    for column, head in enumerate(heads):
        middle = left + (column + 0.5) * cell
        paper.paste(head, (round(middle - head.width / 2), top - head.height - 12))
    for row in range(len(matrix.counts)):
        y = top + row * height
        name = shortened(matrix.names[row], font, left - _MARGIN - 16)
        draw.text((_MARGIN, y + height / 2), name, _colour("ink"), font, anchor="lm")
        for column, (count, share, is_right) in enumerate(matrix.cells(row)):
            box = (left + column * cell, y, left + (column + 1) * cell, y + height)
            fill = _colour("c0" if is_right else "red", _shade(shade_of(share)))
            draw.rectangle(box, fill if count else None, _colour("grid"), 2)
            place = left + (column + 0.5 if is_narrow else column + 0.48) * cell, y + height / 2
            anchor = "mm" if is_narrow else "rm"
            draw.text(place, f"{count:,}" if count else "", _colour("ink"), font, anchor=anchor)
            if count and not is_narrow:
                draw.text(place, f" {share:.0%}", soft, _font(_SMALL), anchor="lm")
    return paper.reduce(2)


def _head(name: str, font: Font, width: float) -> Image.Image:
    """A name in lines of this width; a longer word is shortened."""
    lines: list[str] = []
    for word in shortened(name, font, math.inf).split() or [""]:
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(shortened(word, font, width))
    head = Image.new("RGB", (round(width), round(1.3 * _TEXT * len(lines))), "white")
    for number, line in enumerate(lines):
        place = width / 2, 1.3 * _TEXT * (number + 0.5)
        ImageDraw.Draw(head).text(place, line, _colour("soft"), font, anchor="mm")
    return head


def _upright(name: str, font: Font) -> Image.Image:
    """A name that is read from below."""
    return _head(name, font, font.getlength(name) + 8).rotate(90, expand=True)


# --- sheets of images ---


def errors_image(run: Run, recorded: Recorded, title: str) -> Image.Image | str:
    """The worst errors of the page, by their loss; the reason if there is no picture."""
    album, samples = open_album(run), worst_errors(recorded)[0][:_ERRORS]
    if album.index is None or not samples:
        return album.why_none or "no prediction is wrong"
    tiles = []
    for sample in samples:
        label, guess = labels_of(run, recorded, sample)
        tiles.append(Tile(album.image(sample), f"is {label}", f"taken for {guess}"))
    heads = title, "the errors with the highest loss"
    return sheet_of(tiles, _COLUMNS, heads, count=len(tiles), pixels=CHAT_PIXELS)


def batch_image(run: Run) -> Image.Image | str:
    """The first images that training sees, augmented and mixed; the reason if there is none."""
    try:
        return _first_batch(run)
    except (TrainyardError, OSError) as error:
        return without_secrets(str(error))


def _first_batch(run: Run) -> Image.Image | str:
    import torch

    from trainyard.config import load_recipe
    from trainyard.data.open_datasets import open_split, source_of
    from trainyard.data.order import training_plan
    from trainyard.datasets.augmented import first_batch
    from trainyard.run import build
    from trainyard.world import World, pick_device

    config, world = load_recipe(str(run.folder.recipe)), World()
    device = pick_device(world)
    if config.data.order == "join":
        return "data.order = 'join' has no index"
    index = open_split(source_of(config.data, "train"), world, lambda *_: None)
    if has_changed(run, "train", index):
        return "the training data has changed"
    build.check_decoding(config, device)
    build.check_extra_transform(config, index, device)
    of_run = build.build_feeds(config, world, device)
    feeds, batch = replace(of_run, dtype=torch.float32, virtual_ranks=None), config.batch.size
    plan = training_plan(config.data, index, global_batch=batch, seed=feeds.seed)
    size = build.build_run_course(config, plan.epoch_samples).phases[0].image_size
    count = min(_BATCH, batch)
    of = f"{count} of the {how_many(batch, 'image')} of step 1, as training sees them"
    return first_batch(index, plan, feeds, size=size, count=count, title=(run.name, of))


# --- files ---


def write_images(folders: Sequence[Path], page: Path) -> dict[Path, str]:
    """Write the figures of a page beside it, and "" for each, or why there is none.

    Those of predictions and of the first batch are the best run's. InputError if a file cannot be
    written.
    """
    runs = read_runs(list(folders))
    found = best_recorded(runs)
    run, recorded = found[:2] if found else (runs[0], None)
    title = f"{run.name}: {' '.join(result_of(run) or ('not evaluated yet',))}"
    groups = groups_of(runs)
    names = title_of(groups) if len(runs) > 1 else title
    figures: dict[str, Image.Image | str] = {
        "curves": curves_image(charts_of(groups), names) or "no reports yet",
        "confusion": "no predictions",
        "worst": "no predictions",
        "batch": batch_image(run),
    }
    if recorded is not None:
        if not isinstance(recorded.scores, LabelScores):
            matrix = matrix_of(run, recorded)
            drawn = matrix_image(matrix, title) if matrix else None
            figures["confusion"] = drawn or "no prediction is wrong"
        figures["worst"] = errors_image(run, recorded, title)
    written = {}
    for name, figure in figures.items():
        path = page.with_name(f"{name}.png" if page.name == NAME else f"{page.stem}-{name}.png")
        written[path] = figure if isinstance(figure, str) else ""
        try:
            if not isinstance(figure, str):
                save_sheet(path, figure)
        except OSError as error:
            raise InputError("file.unwritable", path=path, reason=error.strerror) from None
    return written
