"""Interpolates shifted, sheared and rotated images of a batch: Pillow's affine transform on uint8.

All are kernels of jobs.py: images are uint8[n, H, W, 3], contiguous, and may be altered. Pixels
beyond an edge that the interpolation needs equal the pixels at the edge.
"""

from functools import lru_cache
from itertools import pairwise

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import grid_sample

Fill = tuple[int, int, int]

# `warp` sums the taps of three channels at once, in fields of one int64.
_FIELD = 21  # bits of a field: 11 of fraction, 10 of value
_ONE = 2048
_BIAS = 192  # grey levels; keeps every field above zero, as a cubic undershoots by 160
_SLACK = 8  # in 1/2048, added before truncation: more than most errors of rounded weights
_OFFSET = (_BIAS * _ONE + _SLACK) * (1 + 2**_FIELD + 4**_FIELD)


def move_rows(
    images_nHWC: Tensor, starts: Tensor, covers: Tensor, weights: Tensor, *, fill: Fill
) -> Tensor:
    """Shifts each row by its own amount: shears and shifts along x.

    `starts` and `covers`, int64[n, H]: the position in the input row where the output row begins,
    in pixels rounded down, and to the nearest. `weights`, float32[n, H, taps]: of the 2 or 4
    pixels around.
    """
    return _move(images_nHWC, starts, covers, weights, fill=fill)


def move_lines(
    images_nHWC: Tensor, starts: Tensor, covers: Tensor, weights: Tensor, *, fill: Fill
) -> Tensor:
    """Shifts whole lines along y; handles an image as one line of pixels of W colours."""
    n, height, width, _ = images_nHWC.shape
    lines = images_nHWC.view(n, 1, height, width * 3)
    return _move(lines, starts, covers, weights, fill=fill).view(images_nHWC.shape)


def move_columns(
    images_nHWC: Tensor, starts: Tensor, covers: Tensor, weights: Tensor, *, fill: Fill
) -> Tensor:
    """Shifts each column by its own amount: shears along y, by rows of the transposed image."""
    n, height, width, _ = images_nHWC.shape
    four = torch.empty((n, height, width, 4), dtype=torch.uint8, device=images_nHWC.device)
    for channel in range(3):  # four bytes per pixel, to transpose as one number
        four[..., channel] = images_nHWC[..., channel]
    turned = four.view(torch.int32).transpose(1, 2).contiguous().view(torch.uint8)
    moved = _move(turned.view(n, width, height, 4), starts, covers, weights, fill=(*fill, 0))
    back = moved.view(torch.int32).transpose(1, 2).contiguous().view(torch.uint8)
    for channel in range(3):
        images_nHWC[..., channel] = back.view(n, height, width, 4)[..., channel]
    return images_nHWC


def _move(
    images_nRLC: Tensor, starts: Tensor, covers: Tensor, weights: Tensor, *, fill: tuple[int, ...]
) -> Tensor:
    """Shifts lines of L pixels of C bytes, each by its own amount; a copy per line, no gather."""
    n, lines, length, size = images_nRLC.shape
    taps, room = weights.shape[-1], length + 8  # margins that are read, then overwritten
    pixels = n * lines * (length + 4)
    memory = torch.empty(
        ((pixels + 2 * room) * size,), dtype=torch.uint8, device=images_nRLC.device
    )
    padded = memory[room * size : -room * size].view(n, lines, length + 4, size)
    padded[:, :, 2:-2] = images_nRLC
    padded[:, :, :2] = images_nRLC[:, :, :1]
    padded[:, :, -2:] = images_nRLC[:, :, -1:]
    first = torch.arange(n * lines, device=memory.device) * (length + 4) + room + 3 - taps // 2
    span = length + taps - 1
    windows = memory.as_strided((pixels + 2 * room - span + 1, span * size), (size, 1))
    taken = windows.index_select(0, first + starts.view(-1)).float()
    moved = _interpolate(taken, weights.view(-1, taps), size)
    keep, filling = _patterns(length, size, fill, memory.device)
    covered = covers.view(-1) + length + 2
    moved &= keep.index_select(0, covered)
    moved |= filling.index_select(0, covered)
    return moved.view(images_nRLC.shape)


def _interpolate(taken: Tensor, weights: Tensor, size: int) -> Tensor:
    """uint8[lines, L * size] from float32[lines, (L + taps - 1) * size]."""
    taps = weights.shape[1]
    length = taken.shape[1] - (taps - 1) * size
    views = [taken[:, tap * size : tap * size + length] for tap in range(taps)]
    if taps == 2:
        step = (views[1] - views[0]).mul_(weights[:, 1:])  # constant areas stay exact
        return step.add_(views[0]).short().to(torch.uint8)
    total = views[0] * weights[:, :1]
    for tap in range(1, taps):
        total.addcmul_(views[tap], weights[:, tap : tap + 1])
    total.add_(2.0**-10)  # more than float32's error, so that constant areas stay exact
    return total.clamp_(0, 255).short().to(torch.uint8)


@lru_cache(maxsize=16)
def _patterns(
    length: int, size: int, fill: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Masks of the part of a line to keep (255 or 0), and fillings: windows on every start."""
    inside = torch.zeros(3 * length + 4, size, dtype=torch.uint8)
    inside[length + 2 : 2 * length + 2] = 255
    colour = torch.tensor(fill, dtype=torch.uint8).repeat(size // len(fill))
    shape, strides = (2 * length + 5, length * size), (size, 1)
    keep, filling = inside.to(device), ((255 - inside) & colour).to(device)
    return torch.as_strided(keep, shape, strides), torch.as_strided(filling, shape, strides)


# --- any affine map ---


def rotate_singly(images_nHWC: Tensor, degrees: Tensor, *, cubic: bool, fill: Fill) -> Tensor:
    """Rotates by Pillow itself, on the CPU, where grid samples are slower."""
    taps = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    for image_HWC, angle in zip(images_nHWC.numpy(), degrees.tolist(), strict=True):
        image_HWC[:] = Image.fromarray(image_HWC).rotate(angle, taps, fillcolor=fill)
    return images_nHWC


def warp_bilinear(images_nHWC: Tensor, by_column: Tensor, by_row: Tensor, *, fill: Fill) -> Tensor:
    """A grid sample: the input position of an output pixel is `by_column` + `by_row`.

    Positions, int32[n, 2, W] and [n, 2, H], are x and y in 1/65536 pixel.
    """
    _, height, width, _ = images_nHWC.shape
    x, y, is_outside = _places(by_column, by_row)
    sides = (x.float().mul_(2 / (65536 * width)), y.float().mul_(2 / (65536 * height)))
    grid = torch.stack(sides, dim=-1).sub_(1)
    planes = images_nHWC.permute(0, 3, 1, 2).float()
    sampled = grid_sample(planes, grid, "bilinear", "border", align_corners=False)
    sampled += 2.0**-8  # more than float32's error, so that constant areas stay exact
    kept = (~is_outside).short()
    for channel, colour in enumerate(fill):
        value = (sampled[:, channel].short() - colour) & kept
        images_nHWC[..., channel] = value.add_(colour)
    return images_nHWC


def warp(
    images_nHWC: Tensor, by_column: Tensor, by_row: Tensor, is_cubic: Tensor, *, fill: Fill
) -> Tensor:
    """Like `warp_bilinear`; bicubic where `is_cubic`, float32[n], is 1, bilinear where it is 0."""
    n, height, width, _ = images_nHWC.shape
    x, y, is_outside = _places(by_column, by_row)
    x -= 32768  # from corners to centres
    y -= 32768
    table, stride, filled = _table(images_nHWC, fill)
    first = torch.arange(n, dtype=torch.int32, device=x.device).view(n, 1, 1) * (height + 4)
    index = ((y >> 16) + (first + 1)) * stride + ((x >> 16) + 1)
    index ^= (index ^ filled) & is_outside
    flags = is_cubic.view(n, 1, 1)
    across = _cumulative(x, flags)
    total = torch.full_like(index, _OFFSET, dtype=torch.int64).view(-1)
    for i, row_weight in enumerate(_rounded_weights(_cumulative(y, flags))):
        before: Tensor | float = 0.0
        for j in range(4):
            until = row_weight if j == 3 else (row_weight * across[j]).round_()
            tap = table[i * stride + j :].index_select(0, index.view(-1))
            total += tap.mul_((until - before).int().view(-1))
            before = until
    for channel in range(3):
        value = (total >> (_FIELD * channel + 11)) & 1023
        value = value.short().sub_(_BIAS).clamp_(0, 255)
        images_nHWC[..., channel] = value.view(n, height, width)
    return images_nHWC


def _places(by_column: Tensor, by_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and a mask: -1 outside the image, else 0; each int32[n, H, W]."""
    n, _, width = by_column.shape
    height = by_row.shape[2]
    x, y = (by_column.view(n, 2, 1, width) + by_row.view(n, 2, height, 1)).unbind(1)
    return x, y, (x | (width * 65536 - 1 - x) | y | (height * 65536 - 1 - y)) >> 31


def _table(images_nHWC: Tensor, fill: Fill) -> tuple[Tensor, int, int]:
    """Padded images as int64 of three fields, end to end, then a patch of the filling.

    Also returns the length of a line, and the index where the filling begins.
    """
    n, height, width, _ = images_nHWC.shape
    stride = width + 4
    pixels = n * (height + 4) * stride
    table = torch.empty(pixels + 4 * stride, dtype=torch.int64, device=images_nHWC.device)
    table[pixels:] = fill[0] + (fill[1] << _FIELD) + (fill[2] << 2 * _FIELD)
    padded = table[:pixels].view(n, height + 4, stride)
    inner = padded[:, 2:-2, 2:-2]
    inner.copy_(images_nHWC[..., 2])
    for channel in (1, 0):
        inner.bitwise_left_shift_(_FIELD)
        inner.bitwise_or_(images_nHWC[..., channel])
    padded[:, 2:-2, :2] = inner[..., :1]
    padded[:, 2:-2, -2:] = inner[..., -1:]
    padded[:, :2] = padded[:, 2:3]
    padded[:, -2:] = padded[:, -3:-2]
    return table, stride, pixels


def _cumulative(places: Tensor, flags: Tensor) -> list[Tensor]:
    """Sums of the first one, two and three of the four weights, whose total is 1."""
    d = (places & 65535).float().mul_(1 / 65536)
    square = d * d
    rest = (square - square * d).mul_(flags)
    return [(square - d).mul_(flags).add_(rest), 1 - d, rest + 1]


def _rounded_weights(cumulative: list[Tensor]) -> list[Tensor]:
    """Weights in multiples of 1/2048 with a sum of exactly 1, so that constant areas stay exact."""
    ends = [(bound * _ONE).round_() for bound in cumulative]
    return [
        ends[0],
        *(end - start for start, end in pairwise(ends)),
        _ONE - ends[-1],
    ]
