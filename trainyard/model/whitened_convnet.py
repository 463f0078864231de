"""A small network for small images whose first layer whitens patches; timm builds it by name.

After Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv 2404.00498).
"""

from typing import Any

import torch
from timm.models import register_model
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["whitened_convnet"]

_PATCH = 2  # pixels
_DECIMALS = 9  # of a covariance of normalised pixels; sums in another order differ by 1e-14
_CONSTANT = 1e-8  # share of the largest variance below which a direction has none
_EPS = 5e-4  # added to the variance of each direction, so that constant ones are not blown up


class WhitenedConvNet(nn.Module):
    """A fixed convolution that whitens 2 x 2 patches, three stages, the maximum, a classifier.

    Takes float[B, C, H, W] of any size from 18 pixels, and returns float[B, num_classes].
    """

    def __init__(
        self,
        num_classes: int,
        in_chans: int,
        *,
        widths: tuple[int, ...],
        depth: int,
        momentum: float = 0.4,
    ) -> None:
        """`widths`: channels of each stage; `depth`: convolutions of each stage; `momentum`: of
        the statistics of batch norm, which short runs need to move fast."""
        super().__init__()
        self.num_classes = num_classes
        first = 2 * in_chans * _PATCH**2
        self.whitening = nn.Conv2d(in_chans, first, _PATCH)
        self.whitening.weight.requires_grad_(False)
        pairs = zip((first, *widths), widths, strict=False)
        self.stages = nn.Sequential(*(_Stage(*pair, depth, momentum) for pair in pairs))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.activation = nn.GELU()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        maps_BCHW = self.stages(self.activation(self.whitening(images_BCHW)))
        # Scaled, so that the first losses are those of an untrained classifier.
        scores: Tensor = self.head(maps_BCHW.amax(dim=(2, 3))) / 9
        return scores

    def get_classifier(self) -> nn.Module:
        """As in timm's models."""
        return self.head

    @torch.no_grad()
    def adapt_to(self, images_BCHW: Tensor) -> None:
        """Sets the first layer from training images: projections on the eigenvectors of the
        covariance of patches, over the standard deviation, and their negatives.

        Directions without variance, as between equal channels of grey images, become zeros: their
        eigenvectors are arbitrary, and batch norm would enlarge rounding errors.
        """
        size = self.whitening.weight.shape[1:]
        patches_BKN = functional.unfold(images_BCHW.double().cpu(), _PATCH)
        patches_NK = patches_BKN.transpose(1, 2).reshape(-1, size.numel())
        # Rounded, since the order of a sum depends on the number of threads.
        variances, vectors = torch.linalg.eigh(torch.cov(patches_NK.T).round(decimals=_DECIMALS))
        vectors = vectors * (variances > variances.max() * _CONSTANT)
        # The sign of an eigenvector is arbitrary: fixed here, for equal weights on every machine.
        largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
        filters = (vectors * largest.sign() / (variances + _EPS).sqrt()).T.reshape(-1, *size)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))


class _Stage(nn.Sequential):
    """Convolutions of 3 x 3 with batch norm and GELU; the first halves the image.

    With three or more, the image after the first is added before the last GELU.
    """

    def __init__(self, width_in: int, width: int, depth: int, momentum: float) -> None:
        first = (_convolution(width_in, width), nn.MaxPool2d(2), *_after(width, momentum))
        rest: list[nn.Module] = []
        for _ in range(1, depth):
            rest += [_convolution(width, width), *_after(width, momentum)]
        super().__init__(*first, (_Residual if depth > 2 else nn.Sequential)(*rest))


class _Residual(nn.Sequential):
    """Adds its input before the last layer."""

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        *layers, last = self
        maps: Tensor = maps_BCHW
        for layer in layers:
            maps = layer(maps)
        maps = last(maps_BCHW + maps)
        return maps


def _convolution(width_in: int, width: int) -> nn.Conv2d:
    """Starts as the identity on its first channels."""
    layer = nn.Conv2d(width_in, width, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight[:width_in])
    return layer


def _after(width: int, momentum: float) -> tuple[nn.Module, nn.Module]:
    """Batch norm that learns no scale, and GELU."""
    norm = nn.BatchNorm2d(width, momentum=momentum)
    norm.weight.requires_grad_(False)
    return norm, nn.GELU()


@register_model
def whitened_convnet(
    pretrained: bool = False,
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    widths: str = "64-256-256",
    depth: int = 2,
    momentum: float = 0.4,
    **_: Any,
) -> WhitenedConvNet:
    """The network; see WhitenedConvNet. ValueError if `widths` are not like "64-256-256"."""
    if pretrained:
        raise ValueError("whitened_convnet has no pretrained weights")
    numbers = tuple(int(width) for width in widths.split("-"))
    return WhitenedConvNet(num_classes, in_chans, widths=numbers, depth=depth, momentum=momentum)
