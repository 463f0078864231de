"""Rotations, shears and shifts as affine maps in Pillow's conventions, and their kernels.

A matrix (a, b, c, d, e, f) maps the position (x, y) in the output to (a x + b y + c, d x + e y + f)
in the input, in pixels from the top left corner: centres of pixels lie at halves. A pixel whose
position lies outside the image is filled.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.transforms.randaugment.jobs import KernelCall
from trainyard.data.transforms.randaugment.resample import (
    move_columns,
    move_lines,
    move_rows,
    rotate_singly,
    warp,
    warp_bilinear,
)

Floats = NDArray[np.float64]
Fill = tuple[int, int, int]

NAMES = frozenset({"Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"})


class Move(NamedTuple):
    """One geometric operation on one sample."""

    row: int  # position in the batch
    name: str  # one of NAMES
    argument: float
    cubic: bool


def matrix(name: str, argument: float, height: int, width: int) -> tuple[float, ...]:
    """The affine map of an operation from output to input pixels, as six numbers."""
    if name == "ShearX":
        return (1.0, argument, 0.0, 0.0, 1.0, 0.0)
    if name == "ShearY":
        return (1.0, 0.0, 0.0, argument, 1.0, 0.0)
    if name == "TranslateXRel":
        return (1.0, 0.0, argument * width, 0.0, 1.0, 0.0)
    if name == "TranslateYRel":
        return (1.0, 0.0, 0.0, 0.0, 1.0, argument * height)
    # As in Pillow's Image.rotate: anticlockwise about the middle, in degrees.
    angle = -math.radians(argument % 360.0)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y)


def geometry_jobs(
    moves: Sequence[Move], size: tuple[int, int], fill: Fill, *, split: bool
) -> list[KernelCall]:
    """The jobs of some moves. `size` is (height, width). `split` uses a kernel of its own for each
    kind of map, which does the least work and pays on a CPU; otherwise one grid sample does all.
    """
    if not split:
        return [_warp(moves, size, fill)] if moves else []
    groups: dict[tuple[str, bool], list[Move]] = {}
    for move in moves:
        groups.setdefault((move.name, move.cubic), []).append(move)
    kinds = {
        "Rotate": _rotate,
        "ShearX": _along_rows,
        "TranslateXRel": _along_rows,
        "ShearY": _along_columns,
        "TranslateYRel": _of_lines,
    }
    return [kinds[name](group, size, fill) for (name, _), group in groups.items()]


def _warp(moves: Sequence[Move], size: tuple[int, int], fill: Fill) -> KernelCall:
    """Positions are int32 in 1/65536 pixel: sums of one part per column and one per row."""
    height, width = size
    maps, rows = _matrices(moves, size)
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    by_column = maps[:, [0, 3], None] * x + np.stack([maps[:, 2:3], maps[:, 5:6]], axis=1)
    by_row = maps[:, [1, 4], None] * y
    places = [np.rint(part * 65536).astype(np.int32) for part in (by_column, by_row)]
    if _taps(moves) == 2:
        return KernelCall(partial(warp_bilinear, fill=fill), rows, (*places,))
    is_cubic = np.array([move.cubic for move in moves], np.float32)
    return KernelCall(partial(warp, fill=fill), rows, (*places, is_cubic))


def _rotate(moves: Sequence[Move], size: tuple[int, int], fill: Fill) -> KernelCall:
    cubic = _taps(moves) == 4
    degrees = np.array([move.argument for move in moves])
    rows = np.array([move.row for move in moves])
    return KernelCall(partial(rotate_singly, cubic=cubic, fill=fill), rows, (degrees,))


def _along_rows(moves: Sequence[Move], size: tuple[int, int], fill: Fill) -> KernelCall:
    maps, rows = _matrices(moves, size)
    steps = _steps(maps[:, 1:3], (size[0], size[1]), _taps(moves))
    return KernelCall(partial(move_rows, fill=fill), rows, steps)


def _along_columns(moves: Sequence[Move], size: tuple[int, int], fill: Fill) -> KernelCall:
    maps, rows = _matrices(moves, size)
    steps = _steps(maps[:, [3, 5]], (size[1], size[0]), _taps(moves))
    return KernelCall(partial(move_columns, fill=fill), rows, steps)


def _of_lines(moves: Sequence[Move], size: tuple[int, int], fill: Fill) -> KernelCall:
    maps, rows = _matrices(moves, size)
    steps = _steps(maps[:, [3, 5]], (1, size[0]), _taps(moves))
    return KernelCall(partial(move_lines, fill=fill), rows, steps)


def _matrices(moves: Sequence[Move], size: tuple[int, int]) -> tuple[Floats, NDArray[np.int64]]:
    maps = [matrix(move.name, move.argument, *size) for move in moves]
    return np.array(maps), np.array([move.row for move in moves])


def _taps(moves: Sequence[Move]) -> int:
    return 4 if any(move.cubic for move in moves) else 2


def _steps(
    slope_and_shift: Floats, size: tuple[int, int], taps: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The shifts of R lines of length L, as parameters of `resample.move_rows`.

    The first pixel of line r lies `slope` * (r + 1/2) + `shift` pixels from the line's own first.
    """
    lines, length = size
    offset = slope_and_shift[:, :1] * (np.arange(lines) + 0.5) + slope_and_shift[:, 1:]
    start = np.floor(offset)
    covered = np.floor(offset + 0.5)
    share = offset - start
    limit = length + 2  # beyond it no pixel of the line is left
    return (
        np.clip(start, -limit, limit).astype(np.int64),
        np.clip(covered, -limit, limit).astype(np.int64),
        _weights(share, taps).astype(np.float32),
    )


def _weights(d: Floats, taps: int) -> Floats:
    """Weights [..., taps] of pixels around a position that lies `d` after the (taps / 2)th.

    Pillow's cubic here is Keys's with a = -1, unlike in its resize.
    """
    if taps == 2:
        return np.stack([1 - d, d], axis=-1)
    near, far = d * d, d * d * d
    return np.stack([2 * near - d - far, 1 - 2 * near + far, d + near - far, far - near], axis=-1)
