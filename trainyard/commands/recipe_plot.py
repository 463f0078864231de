"""`trainyard recipes NAME --plot FILE`: draws the schedule of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.commands.loading import loading
from trainyard.config import RunConfig
from trainyard.course import Course
from trainyard.errors import InputError
from trainyard.image_size import num_pixels
from trainyard.installation import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 2000  # per curve; about the width of the picture in pixels
_WIDTH, _HEAD, _TALL, _LOW = 9.0, 1.0, 3.0, 1.7  # inches: the first panel is tall, others low
_COLOR = "#1f5fa8"


class Curve(NamedTuple):
    label: str
    values: NDArray[np.float64]  # at each drawn step, and after the last
    has_levels: bool  # True for whole numbers that jump, False for rates


def plot_schedule(
    config: RunConfig, file: Path, *, name: str, epoch_samples: int = 1_281_167
) -> None:
    """Draw the learning rate, and other values that change, over the epochs of a run.

    The suffix of `file` sets its type. InputError if it cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot, which would keep a global state
    except ImportError:
        raise InputError(f"--plot needs matplotlib: {install_hint('plot')}") from None
    with loading():
        from trainyard.run.build import build_run_course

    if epoch_samples < 1:
        raise InputError(f"an epoch of {epoch_samples:,} samples: it has at least one")
    course = build_run_course(config, epoch_samples)
    epochs, curves = _curves(config, course)
    heights = [_TALL, *[_LOW] * (len(curves) - 1)]
    figure = Figure((_WIDTH, _HEAD + sum(heights)), dpi=120, layout="constrained")
    panels = figure.subplots(len(curves), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    if config.schedule.name == "step":
        panels[0].set_yscale("log")
    for panel, curve in zip(panels, curves, strict=True):
        _draw(panel, epochs, curve)
    panels[0].set_title(name, loc="left", fontsize=14, fontweight="bold")
    panels[0].set_title(_summary(config, course), loc="right", fontsize=9.5, color="0.35")
    panels[-1].set_xlabel(f"epoch, taken to be {epoch_samples:,} samples")
    panels[-1].set_xlim(0, epochs[-1])
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # ValueError: a type unknown to matplotlib
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{file} cannot be drawn ({reason}): name a .png, .svg or .pdf") from None


def _curves(config: RunConfig, course: Course) -> tuple[NDArray[np.float64], list[Curve]]:
    """Times in epochs, and the curves: the learning rate, and others that change."""
    from trainyard.run.build import build_run_schedule

    schedule = build_run_schedule(config, course)
    borders = [step for phase in course.phases for step in (phase.start, phase.stop - 1)]
    evenly = np.linspace(0, course.num_steps - 1, _POINTS).astype(int)
    steps = sorted({*borders, *evenly.tolist()})
    rates = [schedule(step) for step in steps]
    phases = [course.phase(step) for step in steps]

    # Of a rectangle: the side of the square with as many pixels.
    sides = [num_pixels(phase.image_size) ** 0.5 for phase in phases]

    def curve(label: str, values: list[float], has_levels: bool = False) -> Curve:
        return Curve(label, np.array([*values, values[-1]]), has_levels)

    found = [
        curve("learning rate", [rate.lr for rate in rates]),
        curve("weight decay", [rate.weight_decay for rate in rates]),
        curve("drop path\n(rate)", [rate.drop_path or 0.0 for rate in rates]),
        curve("image size\n(pixels)", sides, has_levels=True),
        curve("global batch\n(samples)", [phase.batch for phase in phases], has_levels=True),
    ]
    epochs = np.array([course.epoch(step) for step in [*steps, course.num_steps]])
    return epochs, found[:1] + [other for other in found[1:] if np.ptp(other.values)]


def _draw(panel: "Axes", epochs: NDArray[np.float64], curve: Curve) -> None:
    panel.plot(epochs, curve.values, color=_COLOR, drawstyle="steps-post", linewidth=1.8)
    panel.set_ylabel(curve.label)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.5g}")
    panel.margins(y=0.12)
    if curve.has_levels:
        panel.set_yticks(np.unique(curve.values))
    elif panel.get_yscale() == "linear":
        panel.set_ylim(bottom=0)
    panel.grid(color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _summary(config: RunConfig, course: Course) -> str:
    length, optim = config.run.length, config.optim
    in_steps = "" if "step" in length else f" = {course.num_steps:,} steps"
    return f"{length}{in_steps}, {optim.name}, {config.schedule.name} from {optim.lr:g}"
