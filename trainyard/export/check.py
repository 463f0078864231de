"""Comparison of an exported model's logits with the model's own."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.classifier import Classifier
from trainyard.data.decode.decode import whole_image
from trainyard.data.index.build import saved_index
from trainyard.data.index.table import Index
from trainyard.data.index.val_share import open_part
from trainyard.data.open_datasets import source_of
from trainyard.data.reading.reader import Reader
from trainyard.errors import DataError, TrainyardError
from trainyard.image_size import height_width

Exported = Callable[[Tensor], Tensor]
"""A reloaded exported model: float32[B, C, height, width], or a photograph, to logits."""

_TOLERANCE = 1e-3  # relative to the largest logit; other libraries sum in another order
_PHOTOGRAPH_TOLERANCE = 0.05  # single grey levels differ
_REAL = 16  # validation images
_RANDOM = (1, 5)  # batch sizes of noise: exports must accept any
_SIZES = (97, 131), (300, 200), (7, 5)  # height and width of photographs that are noise


class DiffersError(TrainyardError):
    """An exported model with different logits."""


@dataclass(frozen=True)
class Difference:
    """The largest difference over all logits."""

    largest: float
    relative: float
    """Relative to the largest logit."""
    images: int
    """Number of real images compared; 0 without the validation data."""


def plain_model(classifier: Classifier) -> nn.Module:
    """The copy to export: on the CPU, in float32 and in torch's default memory format."""
    model = deepcopy(classifier.model).cpu().float()
    return model.to(memory_format=torch.contiguous_format).eval()


def _batches(classifier: Classifier, real: list[bytes]) -> list[Tensor]:
    """Batches to compare on: noise, and the real images."""
    size, generator = height_width(classifier.image_size), torch.Generator().manual_seed(0)
    channels = classifier.config.data.channels
    noise = [torch.randn(count, channels, *size, generator=generator) for count in _RANDOM]
    return [*noise, classifier.preprocess(real).cpu().float()] if real else noise


def _photographs(classifier: Classifier, real: list[bytes]) -> list[Tensor]:
    """uint8[height, width, channels]: blurred noise, and the real images, grey or RGB."""
    channels, random = classifier.config.data.channels, np.random.default_rng(0)
    coarse = torch.from_numpy(random.uniform(0, 255, (1, channels, 6, 8)))
    noise = [F.interpolate(coarse, size, mode="bicubic") for size in _SIZES]
    found = [one[0].round().clamp(0, 255).byte().permute(1, 2, 0) for one in noise]
    if channels in (1, 3):
        found += [_pixels(classifier, content) for content in real]
    return [photograph.contiguous() for photograph in found]


def _pixels(classifier: Classifier, content: bytes) -> Tensor:
    """uint8[height, width, channels] of an encoded image that is grey or RGB."""
    data = classifier.config.data
    image = whole_image(content, data.rendering)
    image = image.convert("L") if data.channels == 1 else image
    return torch.from_numpy(np.array(image).reshape(image.height, image.width, data.channels))


def real_images(classifier: Classifier) -> list[bytes]:
    """Encoded images, spread over the validation data; empty if it is not available."""
    locations, _, side, _ = source_of(classifier.config.data, "val")
    location = locations if isinstance(locations, str | None) else locations[0]
    try:
        index = saved_index(location) if location else None
        index = index if index is None or side is None else open_part(index, side, location or "")
    except (DataError, OSError):
        return []
    return [] if index is None else list(_readable(classifier, index))


def _readable(classifier: Classifier, index: Index) -> Iterator[bytes]:
    reader = Reader(index)
    for sample in np.linspace(0, len(index) - 1, min(_REAL, len(index))).astype(int).tolist():
        try:
            content = reader.read(sample)
            classifier.preprocess([content])
        except (DataError, OSError):
            continue
        yield content


def compare_batches(
    classifier: Classifier, model: nn.Module, exported: Exported, real: list[bytes]
) -> Difference:
    """The difference of an exported model from the model; DiffersError if it is too large.

    `real`: images to compare on besides noise.
    """
    batches = _batches(classifier, real)
    with torch.no_grad():
        pairs = [(model(images_BCHW), exported(images_BCHW)) for images_BCHW in batches]
    return _difference(pairs, len(real), _TOLERANCE)


def compare_photographs(
    classifier: Classifier, model: nn.Module, exported: Exported, real: list[bytes]
) -> Difference:
    """The same for an export that takes photographs; `model` gets them as in an evaluation."""
    found = _photographs(classifier, real)
    with torch.no_grad():
        pairs = [
            (model(classifier.preprocess([one.numpy()]).cpu().float()), exported(one))
            for one in found
        ]
    return _difference(pairs, len(found) - len(_SIZES), _PHOTOGRAPH_TOLERANCE)


def _difference(
    pairs: Sequence[tuple[Tensor, Tensor]], num_real: int, tolerance: float
) -> Difference:
    largest = relative = 0.0
    for ours, theirs in pairs:
        if ours.shape != theirs.shape or not theirs.isfinite().all():
            raise DiffersError("export.logits-not-finite", "its logits are missing or not finite")
        off = (ours - theirs).abs().max().item()
        largest = max(largest, off)
        relative = max(relative, off / max(ours.abs().max().item(), 1e-12))
    if relative > tolerance:
        raise DiffersError(
            "export.logits-differ",
            "its logits differ by up to {largest:.2g}, {relative:.1%} of the largest one",
            largest=largest,
            relative=relative,
        )
    return Difference(largest, relative, num_real)
