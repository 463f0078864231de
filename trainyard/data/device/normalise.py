"""Turns pixels into a model's input: normalised, in its memory layout and precision."""

import torch
from torch import Tensor


class Normalise:
    """Maps uint8 pixels to (pixels - 255 mean) / (255 std), in new memory."""

    def __init__(
        self,
        device: torch.device,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        channels_last: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`mean` and `std`: of each channel, on a scale of 0 to 1. Results are float32, rounded
        to `dtype`.
        """
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._dtype = dtype
        self._shift = torch.tensor(mean, device=device).mul(255).view(1, -1, 1, 1)
        self._scale = torch.tensor(std, device=device).mul(255).reciprocal().view(1, -1, 1, 1)
        self._bias = -self._shift * self._scale

    def __call__(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalises uint8[B, C, H, W] of any layout to `dtype`, in the layout of the model."""
        if pixels_BCHW.device.type == "cpu":
            return self._in_passes(pixels_BCHW).to(self._dtype)
        return self._in_one_kernel(pixels_BCHW)

    def _in_one_kernel(self, pixels_BCHW: Tensor) -> Tensor:
        """Fuses conversion, product, sum, rounding and layout; 3e-7 off, by another order."""
        images_BCHW = self._empty(pixels_BCHW, self._dtype)
        return torch.addcmul(self._bias, pixels_BCHW, self._scale, out=images_BCHW)

    def _in_passes(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalises in place, since allocating memory takes most of the time."""
        images_BCHW = self._empty(pixels_BCHW, torch.float32)
        images_BHWC, pixels_BHWC = (x.permute(0, 2, 3, 1) for x in (images_BCHW, pixels_BCHW))
        if images_BHWC.is_contiguous() and pixels_BHWC.is_contiguous():
            # On whole rows of pixels: a last dimension of few channels is slow.
            shift, scale = (x.repeat(1, 1, 1, images_BCHW.shape[3]) for x in self._per_channel)
            rows = images_BHWC.flatten(2).copy_(pixels_BHWC.flatten(2))
            rows.sub_(shift.view(-1)).mul_(scale.view(-1))
            return images_BCHW
        return images_BCHW.copy_(pixels_BCHW).sub_(self._shift).mul_(self._scale)

    @property
    def _per_channel(self) -> tuple[Tensor, Tensor]:
        return self._shift.view(1, 1, 1, -1), self._scale.view(1, 1, 1, -1)

    def _empty(self, pixels_BCHW: Tensor, dtype: torch.dtype) -> Tensor:
        device = pixels_BCHW.device
        return torch.empty(
            pixels_BCHW.shape, dtype=dtype, device=device, memory_format=self._layout
        )
