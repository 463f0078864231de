"""Kernels on batches, in Pillow's arithmetic on uint8: colours, sharpness, affine maps.

Images are uint8[n, H, W, 3], contiguous, and may be altered; parameters are [n, ...]. Kernels of
colours are exact unless documented as within one grey level. `run` calls kernels on the rows of a
batch: on parts that fit into a core's cache on a CPU, on larger ones on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

# Pixels per call of a kernel: its intermediates must stay in a core's cache, and must not fill a
# GPU's memory.
_PIXELS_CPU, _PIXELS_GPU = 2**16, 2**23


class KernelCall(NamedTuple):
    kernel: Callable[..., Tensor]  # (images_nHWC, *parameters) to images_nHWC; may alter its input
    rows: NDArray[np.int64]  # [n], positions in the batch
    parameters: tuple[NDArray[Any], ...] = ()  # each [n, ...]


def run(calls: Sequence[KernelCall], images_BHWC: Tensor) -> None:
    """Runs calls in turn, in place; no result returns to the host: nothing waits for the device."""
    device = images_BHWC.device
    sent = iter(send([a for call in calls for a in (call.rows, *call.parameters)], device))
    at_once = _at_once(images_BHWC)
    for call in calls:
        rows, *parameters = [next(sent) for _ in range(1 + len(call.parameters))]
        for start in range(0, len(call.rows), at_once):
            part = slice(start, start + at_once)
            given = [parameter[part] for parameter in parameters]
            if len(call.rows[part]) == 1:  # a view suffices
                row = int(call.rows[start])
                view_1HWC = images_BHWC[row : row + 1]
                view_1HWC.copy_(call.kernel(view_1HWC, *given))
            else:
                taken_nHWC = images_BHWC.index_select(0, rows[part])
                images_BHWC.index_copy_(0, rows[part], call.kernel(taken_nHWC, *given))


def _at_once(images_BHWC: Tensor) -> int:
    """The number of images per call of a kernel."""
    limit = _PIXELS_CPU if images_BHWC.device.type == "cpu" else _PIXELS_GPU
    return max(1, limit // max(1, images_BHWC.shape[1] * images_BHWC.shape[2]))


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device, in one copy that the host does not wait for."""
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    *starts, end = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in contiguous)]).tolist()
    buffer = np.zeros(end, np.uint8)
    for start, array in zip(starts, contiguous, strict=True):
        buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    bytes_ = torch.from_numpy(buffer)
    if device.type == "cuda":
        bytes_ = bytes_.pin_memory()
    bytes_ = bytes_.to(device, non_blocking=True)
    return [
        bytes_[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(starts, contiguous, strict=True)
    ]


# --- colours and sharpness ---

_GREY = (19595, 38470, 7471)  # ITU-R 601 luma of red, green, blue, in 1/65536


def invert_from(images_nHWC: Tensor, threshold: Tensor) -> Tensor:
    """255 - x for x at or above the threshold (0 to 256): solarize; with 0, invert."""
    is_below = (images_nHWC.short() - _over_pixels(threshold.short())) >> 8  # -1 or 0
    return images_nHWC ^ (~is_below).to(torch.uint8)


def keep_bits(images_nHWC: Tensor, mask: Tensor) -> Tensor:
    """Posterize; `mask` is uint8."""
    return images_nHWC & _over_pixels(mask)


def add_to_dark(images_nHWC: Tensor, add: Tensor) -> Tensor:
    """x + add, with `add` at most 128, for x below 128."""
    is_dark = (images_nHWC >> 7) - 1  # 255 or, at 128 and above, 0
    return images_nHWC + (is_dark & _over_pixels(add))


def brightness(images_nHWC: Tensor, factor: Tensor) -> Tensor:
    """Scales uint8 images by one factor each."""
    return _to_bytes(images_nHWC.float().mul_(_over_pixels(factor)))


def contrast(images_nHWC: Tensor, factor: Tensor) -> Tensor:
    """Towards the mean grey level (0) or away from it (above 1); within one grey level.

    The mean is that of the exact luma; Pillow's is of luma rounded to whole grey levels.
    """
    n, height, width, _ = images_nHWC.shape
    columns = images_nHWC.view(n, height, width * 3).sum(1, dtype=torch.int32)
    sums = columns.view(n, width, 3).sum(1, dtype=torch.int64)
    luma = sums[:, 0] * _GREY[0] + sums[:, 1] * _GREY[1] + sums[:, 2] * _GREY[2]
    mean = (luma.double() / (65536 * height * width) + 0.5).floor().float()
    return _to_bytes(_blend(images_nHWC.float(), _over_pixels(mean), _over_pixels(factor)))


def saturation(images_nHWC: Tensor, factor: Tensor) -> Tensor:
    """Towards the pixel's own grey level (0) or away from it (above 1): timm's Color."""
    planes = [images_nHWC[..., channel].float() for channel in range(3)]
    luma = torch.full_like(planes[0], 0x8000)
    for plane, weight in zip(planes, _GREY, strict=True):
        luma.add_(plane, alpha=weight)  # integers below 2**24, so exact
    luma.mul_(2.0**-16).floor_()
    for channel, plane in enumerate(planes):
        images_nHWC[..., channel] = _to_bytes(_blend(plane, luma, factor.view(-1, 1, 1)))
    return images_nHWC


def sharpness(images_nHWC: Tensor, factor: Tensor) -> Tensor:
    """Towards a 3 x 3 smoothing (0) or away from it (above 1); keeps a border of one pixel."""
    n, height, width, _ = images_nHWC.shape
    if height < 3 or width < 3:
        return images_nHWC
    lines = images_nHWC.view(n, height, width * 3).short()
    three = lines[:, :-2] + lines[:, 1:-1]
    three += lines[:, 2:]
    total = three[:, :, :-6] + three[:, :, 3:-3]
    total += three[:, :, 6:]
    centre = lines[:, 1:-1, 3:-3]
    total.add_(centre, alpha=4)  # weights of 1/13, and 5/13 in the middle
    smooth = total.float().mul_(1 / 13).add_(0.5).floor_()
    blended = _to_bytes(_blend(centre.float(), smooth, factor.view(-1, 1, 1)))
    images_nHWC.view(n, height, width * 3)[:, 1:-1, 3:-3] = blended
    return images_nHWC


def blur(images_nHWC: Tensor, weights_n3: Tensor) -> Tensor:
    """Pillow's Gaussian blur: three box blurs each way, each rounded to grey levels.

    `weights_n3`, float64, are the weights of a pixel, its neighbours and theirs. Rounding ties are
    frequent, so the arithmetic must be exact.
    """
    centre, near, far = weights_n3.view(-1, 3, 1, 1, 1).unbind(1)
    values = images_nHWC.double()
    for axis in (2, 2, 2, 1, 1, 1):
        size = values.shape[axis]
        first, last = values.narrow(axis, 0, 1), values.narrow(axis, size - 1, 1)
        padded = torch.cat([first, first, values, last, last], dim=axis)
        taps = [padded.narrow(axis, start, size) for start in range(5)]
        values = (taps[1] + taps[3]).mul_(near)
        values.addcmul_(taps[0] + taps[4], far).addcmul_(taps[2], centre)
        values.add_(0.5).floor_()
    return _to_bytes(values)


def autocontrast(images_nHWC: Tensor) -> Tensor:
    """Maps each channel's darkest level to 0 and its brightest to 255, linearly."""
    n, height, width, _ = images_nHWC.shape
    lines = images_nHWC.view(n, height, width * 3)
    low = lines.amin(1).view(n, width, 3).amin(1).view(n * 3, 1).double()
    high = lines.amax(1).view(n, width, 3).amax(1).view(n * 3, 1).double()
    # Not 255 / x, which torch turns into a product; infinite for a single level, which is kept.
    scale = torch.full_like(high, 255) / (high - low)
    levels = torch.arange(256, device=images_nHWC.device, dtype=torch.float64)
    stretched = (levels * scale + -low * scale).clamp_(0, 255)
    tables = torch.where(high > low, stretched, levels).to(torch.uint8)
    return tables.view(-1).index_select(0, _table_indices(images_nHWC)).view(images_nHWC.shape)


def equalize(images_nHWC: Tensor) -> Tensor:
    """Equalises each channel's histogram."""
    indices = _table_indices(images_nHWC)
    counts = _count(indices, images_nHWC.shape[0] * 768).view(-1, 256)
    levels = torch.arange(256, device=counts.device)
    brightest = ((counts > 0) * levels).amax(1, keepdim=True)
    step = (counts.sum(1, keepdim=True) - counts.gather(1, brightest)) // 255
    below = counts.cumsum(1) - counts
    flat = (step // 2 + below) // step.clamp(min=1)
    tables = torch.where(step > 0, flat, levels).clamp_(max=255).to(torch.uint8)
    return tables.view(-1).index_select(0, indices).view(images_nHWC.shape)


def _table_indices(images_nHWC: Tensor) -> Tensor:
    """int32[n * H * W * 3]: the index of each value's entry in tables of [n, 3, 256]."""
    n, height, width, _ = images_nHWC.shape
    tables = torch.arange(3 * n, dtype=torch.int32, device=images_nHWC.device) * 256
    over_lines = tables.view(n, 1, 3).repeat(1, 1, width)
    return images_nHWC.view(n, height, width * 3).int().add_(over_lines).view(-1)


def _count(indices: Tensor, size: int) -> Tensor:
    if indices.device.type == "cpu":
        return torch.bincount(indices, minlength=size)
    counts = torch.zeros(size, dtype=torch.int64, device=indices.device)  # bincount would wait here
    return counts.scatter_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int64))


def _blend(values: Tensor, base: Tensor, factor: Tensor) -> Tensor:
    """base + factor * (values - base), in place, in Pillow's order for equal rounding."""
    return values.sub_(base).mul_(factor).add_(base)


def _to_bytes(values: Tensor) -> Tensor:
    """Clips in place and truncates; via int16, since a direct cast is several times slower."""
    return values.clamp_(0, 255).short().to(torch.uint8)


def mix(images_BHWC: Tensor, chains: Sequence[Tensor], shares: Tensor) -> None:
    """Blends images, in place, with mixes of chains, which are cut to whole grey levels first.

    `shares`, [B, 1 + chains], are those of the mix, and of each chain in it.
    """
    at_once = _at_once(images_BHWC)
    for start in range(0, len(images_BHWC), at_once):
        part = slice(start, start + at_once)
        share, *weights = (_over_pixels(each) for each in shares[part].unbind(1))
        mixed = chains[0][part] * weights[0]
        for chain, weight in zip(chains[1:], weights[1:], strict=True):
            mixed += chain[part] * weight
        mixed.clamp_(0, 255).floor_()
        images_BHWC[part] = _to_bytes(_blend(mixed, images_BHWC[part].float(), share))


def _over_pixels(parameter_n: Tensor) -> Tensor:
    return parameter_n.view(-1, 1, 1, 1)


# --- affine maps ---

Fill = tuple[int, int, int]


def warp(images_nHWC: Tensor, by_column: Tensor, by_row: Tensor, *, fill: Fill) -> Tensor:
    """Interpolates images at the input positions `by_column` + `by_row` of the output pixels.

    Positions, complex64[n, W] and [n, H], are x + iy, from -1 to 1 between opposite edges. A pixel
    whose position is outside the image is filled. Bilinear, within one grey level of Pillow's.
    """
    grid = torch.view_as_real(by_column[:, None, :] + by_row[:, :, None])
    # The sign of a distance to the edges: -1 beyond one, else 0. The left edge is inside, the right
    # one is not.
    beyond = (1 - (grid + 2.0**-22).abs()).view(torch.int32) >> 31
    kept = ~(beyond[..., 0] | beyond[..., 1]).to(torch.uint8)  # 255 or 0
    planes = images_nHWC.permute(0, 3, 1, 2).float()
    sampled = grid_sample(planes, grid, "bilinear", "border", align_corners=False)
    sampled.add_(2.0**-8)  # more than float32's error, so that constant areas stay exact
    values = sampled.short().to(torch.uint8)
    for channel, colour in enumerate(fill):
        images_nHWC[..., channel] = ((values[:, channel] ^ colour) & kept) ^ colour
    return images_nHWC
