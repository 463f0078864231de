"""Operations on colours and sharpness of batches, in Pillow's arithmetic on uint8.

All are kernels of jobs.py: images are uint8[n, H, W, 3], contiguous, and may be altered; parameters
are [n]. Kernels are exact unless documented as within one grey level.
"""

import torch
from torch import Tensor

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
    return tables.view(-1).index_select(0, _places(images_nHWC)).view(images_nHWC.shape)


def equalize(images_nHWC: Tensor) -> Tensor:
    """Equalises each channel's histogram."""
    places = _places(images_nHWC)
    counts = _count(places, images_nHWC.shape[0] * 768).view(-1, 256)
    levels = torch.arange(256, device=counts.device)
    brightest = ((counts > 0) * levels).amax(1, keepdim=True)
    step = (counts.sum(1, keepdim=True) - counts.gather(1, brightest)) // 255
    below = counts.cumsum(1) - counts
    flat = (step // 2 + below) // step.clamp(min=1)
    tables = torch.where(step > 0, flat, levels).clamp_(max=255).to(torch.uint8)
    return tables.view(-1).index_select(0, places).view(images_nHWC.shape)


def _places(images_nHWC: Tensor) -> Tensor:
    """int32[n * H * W * 3]: the index of each value's entry in tables of [n, 3, 256]."""
    n, height, width, _ = images_nHWC.shape
    tables = torch.arange(3 * n, dtype=torch.int32, device=images_nHWC.device) * 256
    over_lines = tables.view(n, 1, 3).repeat(1, 1, width)
    return images_nHWC.view(n, height, width * 3).int().add_(over_lines).view(-1)


def _count(places: Tensor, size: int) -> Tensor:
    if places.device.type == "cpu":
        return torch.bincount(places, minlength=size)
    counts = torch.zeros(size, dtype=torch.int64, device=places.device)  # bincount would wait here
    return counts.scatter_add_(0, places.long(), torch.ones_like(places, dtype=torch.int64))


def _blend(values: Tensor, base: Tensor, factor: Tensor) -> Tensor:
    """base + factor * (values - base), in place, in Pillow's order for equal rounding."""
    return values.sub_(base).mul_(factor).add_(base)


def _to_bytes(values: Tensor) -> Tensor:
    """Clips in place and truncates; via int16, since a direct cast is several times slower."""
    return values.clamp_(0, 255).short().to(torch.uint8)


def _over_pixels(parameter_n: Tensor) -> Tensor:
    return parameter_n.view(-1, 1, 1, 1)
