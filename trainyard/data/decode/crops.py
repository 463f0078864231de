"""Crop boxes of training and evaluation images: vectorised, with keyed random numbers.

A box is (left, top, right, bottom) in pixels of the stored image, fractions allowed; the decoder
resizes the box to the target size. Random numbers are drawn for many images at once and turned
into boxes once the sizes are known. The tests hold plain per-image references.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.data.rng import CROPS, FLIPS, between, fold_in, uniforms
from trainyard.image_size import ImageSize, height_width

Interpolation = Literal["bilinear", "bicubic"]
"""Both are antialiased."""

Fit = Literal["crop", "pad", "squash"]
Pixel = tuple[int, ...]
"""The values of a pixel's channels, 0 to 255."""

_ATTEMPTS = 10  # as in torchvision and timm


class Crops(NamedTuple):
    boxes: NDArray[np.float64]  # [n, 4] left, top, right, bottom
    flips: NDArray[np.bool_]  # [n]
    resizes_first: bool = False
    """True if the image is resized before it is cropped: pixels beyond a box then affect the pixels
    along its border. False if it is cropped first."""
    pad: Pixel | None = None
    """None if boxes are stretched to the target size. Else they keep their shape, and this pixel
    fills what they leave free."""

    def part(self, position: int) -> "Crops":
        """The crop of one image."""
        one = slice(position, position + 1)
        return self._replace(boxes=self.boxes[one], flips=self.flips[one])


class CropParameters(Protocol):
    """The crop parameters of some images, drawn before the sizes are known."""

    def __call__(self, sizes: NDArray[np.int64]) -> Crops:
        """The crops of images of `sizes` (int[n, 2]: width, height)."""

    def __getitem__(self, part: slice | NDArray[np.int64]) -> "CropParameters":
        """The crop parameters of a part of the images."""


@dataclass(frozen=True)
class RandomResizedCrop:
    """Random crops: a random area and aspect ratio at a random position.

    From Szegedy et al. 2014, as in torchvision. Randomness is keyed by (seed, epoch, sample), so a
    replay gives equal crops on any number of ranks.
    """

    seed: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    alternates: bool = False
    """True if a sample is flipped in every other visit, and the first is drawn; `flip` is unused.
    From Jordan 2024 (arXiv 2404.00498)."""
    fit: Fit = "crop"
    """Unless "crop", aspect ratios are relative to that of the image: all of an image is a box of
    ratio 1."""
    pad: Pixel | None = None  # see Crops

    def draw(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> CropParameters:
        stream = np.full_like(ids, CROPS)
        random = uniforms(fold_in(self.seed, stream, epochs, ids), 3 + 2 * _ATTEMPTS)
        shares = between(self.scale, random[:, 3 : 3 + _ATTEMPTS])
        logarithms = np.log(self.ratio[0]), np.log(self.ratio[1])
        ratios = np.exp(between(logarithms, random[:, 3 + _ATTEMPTS :]))
        drawn = np.concatenate([random[:, :2], shares, ratios], axis=1)
        flips = random[:, 2] < self.flip
        if self.alternates:
            first = uniforms(fold_in(self.seed, np.full_like(ids, FLIPS), ids), 1)[:, 0]
            flips = (first < 0.5) ^ (epochs % 2 == 1)
        parameters = RandomCropParameters(drawn, flips, self.ratio)
        return parameters if self.fit == "crop" else RelativeCropParameters(parameters, self.pad)


@dataclass(frozen=True)
class RandomCropParameters:
    """The random numbers for the crops of some images."""

    drawn: NDArray[np.float64]
    """[n, 22]: the position of the box, across and down, in [0, 1); the shares of the image's area
    of ten tries; the aspect ratios of ten tries."""
    flips: NDArray[np.bool_]  # [n]
    ratio: tuple[float, float]

    def __getitem__(self, part: slice | NDArray[np.int64]) -> "RandomCropParameters":
        return RandomCropParameters(self.drawn[part], self.flips[part], self.ratio)

    def rule(self, count: int) -> tuple[Crops, dict[str, Any]]:
        """The crops of `count` images, whose boxes the C decoder is to fill in, bit-equal to those
        of a call, and the arguments by which it does so."""
        crops = Crops(np.empty((count, 4)), self.flips)
        return crops, {"drawn": self.drawn, "ratio": self.ratio}

    def __call__(self, sizes: NDArray[np.int64]) -> Crops:
        shape, found = self._shape(sizes)
        room = sizes - shape
        start = np.where(found[:, None], np.floor(self.drawn[:, :2] * (room + 1)), room // 2)
        return Crops(np.concatenate([start, start + shape], axis=1), self.flips)

    def _shape(self, sizes: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Width and height of the first of ten tries that fits, and True if one fits.

        If none fits: the largest box that does, to be placed centrally.
        """
        image_width, image_height = sizes[:, 0].astype(float), sizes[:, 1].astype(float)
        shares, ratios = self.drawn[:, 2 : 2 + _ATTEMPTS], self.drawn[:, 2 + _ATTEMPTS :]
        area = (image_width * image_height)[:, None] * shares
        widths, heights = np.rint(np.sqrt(area * ratios)), np.rint(np.sqrt(area / ratios))
        fits = (
            (widths >= 1)
            & (widths <= image_width[:, None])
            & (heights >= 1)
            & (heights <= image_height[:, None])
        )
        rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
        found = fits[rows, first]
        clamped = np.clip(image_width / image_height, *self.ratio)
        widest = np.maximum(np.minimum(image_width, np.rint(image_height * clamped)), 1)
        highest = np.maximum(np.minimum(image_height, np.rint(image_width / clamped)), 1)
        width = np.where(found, widths[rows, first], widest)
        height = np.where(found, heights[rows, first], highest)
        return np.stack([width, height], axis=1), found


@dataclass(frozen=True)
class RelativeCropParameters:
    """Random crops whose aspect ratios are relative to those of the images."""

    of_squares: RandomCropParameters
    pad: Pixel | None

    def __getitem__(self, part: slice | NDArray[np.int64]) -> "RelativeCropParameters":
        return RelativeCropParameters(self.of_squares[part], self.pad)

    def __call__(self, sizes: NDArray[np.int64]) -> Crops:
        sides = np.repeat(sizes.max(axis=1, keepdims=True), 2, axis=1)
        boxes, flips = self.of_squares(sides)[:2]
        return Crops(boxes * np.tile(sizes / sides, 2), flips, pad=self.pad)


@dataclass(frozen=True)
class FittedCrop:
    """The central `crop_pct` of an image's sides (timm's "squash"); 1: the whole image.

    With `pad` the image is resized so that its long side is `size / crop_pct`, and what is then
    larger than `size` is cropped (timm's "border").
    """

    size: ImageSize
    crop_pct: float
    pad: Pixel | None = None  # see Crops

    def draw(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> "FittedCrop":
        return self

    def __call__(self, sizes: NDArray[np.int64]) -> Crops:
        """The crops of images of `sizes` (int[n, 2]: width, height)."""
        size = np.array(height_width(self.size)[::-1])
        covered = (size / self.crop_pct).astype(np.int64)
        # Whole pixels of the resized image, rounded as in timm.
        resized = covered
        if self.pad is not None:
            scale = (covered / sizes).min(axis=1, keepdims=True)
            resized = np.maximum(np.rint(sizes * scale), 1)
        start = np.maximum(np.rint((resized - size) / 2), 0)
        end = np.minimum(start + size, resized)
        boxes = np.concatenate([start / resized * sizes, end / resized * sizes], axis=1)
        return Crops(boxes, np.zeros(len(sizes), np.bool_), resizes_first=True, pad=self.pad)

    def __getitem__(self, part: slice | NDArray[np.int64]) -> "FittedCrop":
        return self


@dataclass(frozen=True)
class CentralCrop:
    """Resizes the short side to `size / crop_pct`, then crops the central square (torchvision).

    For a rectangle: resizes an image to the smallest size of its shape that covers the height and
    the width over `crop_pct`, then crops the central rectangle (timm).
    """

    size: ImageSize
    crop_pct: float

    def draw(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> "CentralCrop":
        return self

    def __call__(self, sizes: NDArray[np.int64]) -> Crops:
        """The crops of images of `sizes` (int[n, 2]: width, height)."""
        size, covered = self._size_and_covered()
        # Whole pixels of the resized image, truncated and rounded as in torchvision and timm.
        if covered[0] == covered[1]:
            resized = sizes * covered // sizes.min(axis=1, keepdims=True)
        else:
            resized = np.rint(sizes / (sizes / covered).min(axis=1, keepdims=True))
        start = np.rint((resized - size) / 2.0)
        step = sizes / resized
        boxes = np.concatenate([start * step, (start + size) * step], axis=1)
        inside = np.clip(boxes, 0, np.tile(sizes, 2))  # corrects rounding errors
        return Crops(inside, np.zeros(len(sizes), np.bool_), resizes_first=True)

    def _size_and_covered(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Width and height, as in `sizes`, of the crop and of what the image is to cover."""
        size = np.array(height_width(self.size)[::-1])
        return size, (size / self.crop_pct).astype(np.int64)

    def __getitem__(self, part: slice | NDArray[np.int64]) -> "CentralCrop":
        return self

    def rule(self, count: int) -> tuple[Crops, dict[str, Any]]:
        """See RandomCropParameters.rule."""
        size, covered = self._size_and_covered()
        crops = Crops(np.empty((count, 4)), np.zeros(count, np.bool_), resizes_first=True)
        return crops, {"central": (*size.tolist(), *covered.tolist())}


def inner_size(box: NDArray[np.float64], size: tuple[int, int]) -> tuple[int, int]:
    """Height and width, in whole pixels, of the largest image of a box's shape within `size`."""
    (left, top, right, bottom), (height, width) = box.tolist(), size
    scale = min(width / (right - left), height / (bottom - top))
    sides = round((bottom - top) * scale), round((right - left) * scale)
    return min(max(sides[0], 1), height), min(max(sides[1], 1), width)
