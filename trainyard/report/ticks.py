"""Tick positions for axes, and texts of numbers."""

import math


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.7)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten in [low, high]; powers alone for over three decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [value for value in found if low * 0.999 <= value <= high * 1.001]


def padded(low: float, high: float) -> tuple[float, float]:
    """The range with a margin on both sides, also around a single value."""
    room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def short(value: float) -> str:
    """A tick label: 1.5M, 20k, 1,500, 0.25, 2e-4."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if size >= 1e3:
        return f"{value:,.0f}"
    if 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """A fraction of 1 as 98.15%."""
    return f"{100 * value:.2f}%"


def duration(seconds: float) -> str:
    """2 d 3 h, 14.6 h, 23.8 min, 41 s."""
    if seconds >= 48 * 3600:
        days, hours = divmod(round(seconds / 3600), 24)
        return f"{days} d {hours} h"
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.0f} s"


def clock(seconds: float) -> str:
    """1:02:03, for columns of times."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def tick_text(kind: str, value: float) -> str:
    """A tick label on the axis of a chart of this kind (charts.Kind)."""
    if kind == "percent":
        return f"{round(100 * value, 6):g}%"
    return _gigabytes(value) if kind == "bytes" else short(value)


def value_text(kind: str, value: float) -> str:
    """The text of a value in a chart of this kind."""
    if kind == "loss" and abs(value) >= 1e-3:
        return f"{value:.4f}"
    if kind == "percent":
        return percent(value)
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "bytes":
        return _gigabytes(value)
    return short(float(f"{value:.{4 if kind == 'number' else 3}g}"))


def _gigabytes(value: float) -> str:
    return f"{short(float(f'{value / 1e9:.3g}'))} GB"
