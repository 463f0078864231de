"""Whether an exported model gives the logits that the model itself gives."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from trainyard.classifier import Classifier
from trainyard.data.index import Index
from trainyard.data.indexing import saved_index
from trainyard.data.read import Reader
from trainyard.errors import DataError, TrainyardError

Exported = Callable[[Tensor], Tensor]
"""An exported model, loaded again: float32[B, 3, size, size] to logits."""

_TOLERANCE = 1e-3  # of the largest logit; other libraries add up in another order
_REAL = 16  # validation images
_RANDOM = (1, 5)  # batches of noise: a model must not know its batch


class DiffersError(TrainyardError):
    """An exported model that does not say the same."""


@dataclass(frozen=True)
class Difference:
    """The largest there was, over all logits."""

    largest: float
    relative: float
    """To the largest logit."""
    images: int
    """Real ones that were compared; 0 where the validation data is not at hand."""


def plain_model(classifier: Classifier) -> nn.Module:
    """A copy on the CPU, in float32 and in torch's usual layout: what is exported."""
    model = deepcopy(classifier.model).cpu().float()
    return model.to(memory_format=torch.contiguous_format).eval()


def examples(classifier: Classifier) -> list[Tensor]:
    """Batches to compare on: noise, and images of the validation data if they can be read."""
    size, generator = classifier.image_size, torch.Generator().manual_seed(0)
    noise = [torch.randn(count, 3, size, size, generator=generator) for count in _RANDOM]
    contents = _real(classifier)
    return [*noise, classifier.preprocess(contents).cpu().float()] if contents else noise


def _real(classifier: Classifier) -> list[bytes]:
    """Encoded images of different places in the validation data; none if it is not there."""
    val = classifier.config.data.val
    location = val if isinstance(val, str | None) else val[0]
    try:
        index = saved_index(location) if location else None
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


def compare(model: nn.Module, exported: Exported, batches: Sequence[Tensor]) -> Difference:
    """How far an exported model is from the model; DiffersError if that is too far."""
    largest = relative = 0.0
    for images_BCHW in batches:
        with torch.no_grad():
            ours, theirs = model(images_BCHW), exported(images_BCHW)
        if ours.shape != theirs.shape or not theirs.isfinite().all():
            raise DiffersError("it gives no logits, or others that are not finite")
        off = (ours - theirs).abs().max().item()
        largest = max(largest, off)
        relative = max(relative, off / max(ours.abs().max().item(), 1e-12))
    if relative > _TOLERANCE:
        raise DiffersError(
            f"its logits differ by up to {largest:.2g}, {relative:.1%} of the largest one"
        )
    real = len(batches[-1]) if len(batches) > len(_RANDOM) else 0
    return Difference(largest, relative, real)
