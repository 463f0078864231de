"""A model that takes a photograph: resizing, crop and normalisation are part of it.

The input is uint8[height, width, channels] of any size; the sizes in between are those of
data/decode/crops.py. Resized pixels are rounded to 8 bits as those of an evaluation, whose weights
are of 15 bits: 1 in 300 (bilinear) or 50 (bicubic) differs, by one grey level.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.export.description import OUTPUT, Description
from trainyard.image_size import height_width

PHOTOGRAPH, PROBABILITIES, NAMES = "photograph", "probabilities", "names"


class PhotographModel(nn.Module):
    """A model of normalised images, with the preparation of a photograph before it.

    Sizes are float64[2], height and width, and calculated in the order of crops.py.
    """

    def __init__(self, model: nn.Module, about: Description) -> None:
        """`model` maps float32[batch, channels, height, width] to logits."""
        super().__init__()
        self._model, self._about = model, about
        size = height_width(about.image_size)
        covered = [int(side / about.crop_pct) for side in size]
        self._is_square = covered[0] == covered[1]
        self._size = nn.Buffer(torch.tensor(size, dtype=torch.float64))
        self._covered = nn.Buffer(torch.tensor(covered, dtype=torch.float64))
        axes = [nn.Buffer(torch.arange(side, dtype=torch.float64)) for side in size]
        self._rows, self._columns = axes
        # In the order of data/device/feed.py.
        shift, std = (torch.tensor(of).mul(255).view(-1, 1, 1) for of in (about.mean, about.std))
        self._shift, self._scale = nn.Buffer(shift), nn.Buffer(std.reciprocal())
        self._beside = nn.Buffer(torch.tensor(about.padding or 0).float().view(-1, 1, 1))

    def forward(self, photograph_HWC: Tensor) -> dict[str, Tensor]:
        """Logits, float32[1, classes], and probabilities, float32[classes]."""
        unit = torch.ones_like(self._size[0])
        resized = self._resized(torch.stack([unit * side for side in photograph_HWC.shape[:2]]))
        pixels_BCHW = self._interpolated(photograph_HWC.permute(2, 0, 1)[None].float(), resized)
        logits_BC = self._model((self._central(pixels_BCHW, resized) - self._shift) * self._scale)
        has_lists = self._about.has_lists
        shares_BC = logits_BC.sigmoid() if has_lists else logits_BC.softmax(dim=1)
        return {OUTPUT: logits_BC, PROBABILITIES: shares_BC[0]}

    def _resized(self, sizes: Tensor) -> Tensor:
        """The size of the whole image after resizing; see data/config.py: evaluation_crop."""
        covered, fit = self._covered, self._about.fit
        if fit == "squash":
            return covered
        if fit == "pad":
            return (sizes * (covered / sizes).min()).round().clamp(min=1)
        if self._is_square:
            return (sizes * covered / sizes.min()).floor()
        return (sizes / (sizes / covered).min()).round()

    def _interpolated(self, pixels_BCHW: Tensor, resized: Tensor) -> Tensor:
        """The whole image of that size, not rounded, with a column more."""
        height, width = resized.long().tolist()
        # torch.export cannot know it.
        torch._check(height >= 1)
        torch._check(width >= 1)
        resize = partial(F.interpolate, mode=self._about.interpolation, antialias=True)
        across_BCHW = resize(pixels_BCHW, (pixels_BCHW.shape[2], width))
        # torch resizes a single column wrongly: it repeats the first pixel.
        wider_BCHW = torch.cat([across_BCHW, across_BCHW[..., -1:]], dim=3)
        return resize(wider_BCHW, (height, width + 1))

    def _central(self, pixels_BCHW: Tensor, resized: Tensor) -> Tensor:
        """The middle, of the model's size, with pixels beside an image that is padded."""
        # Less than 0 beside an image that is smaller.
        start = ((resized - self._size) / 2).round().clamp(min=0)
        start = start - ((self._size - resized) / 2).floor().clamp(min=0)
        axes = self._rows + start[0], self._columns + start[1]
        for axis, of in enumerate(axes):
            inside = torch.minimum(of.clamp(min=0), resized[axis] - 1)
            pixels_BCHW = pixels_BCHW.index_select(2 + axis, inside.long())
        pixels_BCHW = pixels_BCHW.round().clamp(0, 255)
        if self._about.padding is None:
            return pixels_BCHW
        rows, columns = ((of >= 0) & (of < resized[axis]) for axis, of in enumerate(axes))
        return torch.where(rows[:, None] & columns, pixels_BCHW, self._beside)
