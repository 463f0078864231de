"""Measures an exported model, run by its own library, beside the model that it was made of."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.classifier import Classifier
from trainyard.data.decode.decode import whole_image
from trainyard.data.decode.rendering import Rendering
from trainyard.data.open_datasets import open_split, source_of
from trainyard.data.reading.reader import Reader
from trainyard.errors import DataError, TrainyardError
from trainyard.image_size import height_width
from trainyard.run.labels import check_kind, labels_of
from trainyard.training.label_scores import LabelScores
from trainyard.world import World

Exported = Callable[[Tensor], Tensor]
"""A reloaded exported model: float32[B, C, height, width], or a photograph, to logits."""
Times = tuple[tuple[int, float], ...]
"""Milliseconds an image, on this machine, by the number of images in a batch."""

_TOLERANCE = 1e-3  # relative to the largest logit; other libraries sum in another order
_PHOTOGRAPH_TOLERANCE = 0.05  # single grey levels differ
_RANDOM = (1, 5)  # batch sizes of noise: exports must accept any
_SIZES = (97, 131), (300, 200), (7, 5)  # height and width of photographs that are noise
_BATCH = 32  # images
_SECONDS, _CALLS = 0.3, 3  # of a measurement of time, at least


class DiffersError(TrainyardError):
    """An exported model with different logits."""


class Samples(NamedTuple):
    """Encoded images, with what is in them."""

    contents: Sequence[bytes]
    labels: NDArray[Any]
    """int[n]: the model's numbers of their classes; with lists of labels, bool[n, classes]."""


NO_SAMPLES = Samples((), np.zeros(0, np.int64))


@dataclass(frozen=True)
class Measured:
    """An export beside its model."""

    largest: float
    """The largest difference over all logits."""
    relative: float
    """The same, relative to the largest logit."""
    images: int = 0
    """Number of real images compared; without any, what follows is 0."""
    accuracy: float = 0.0
    """Top-1 of the export on them; with lists of labels, mAP."""
    model_accuracy: float = 0.0
    """The same of the model."""
    agreement: float = 0.0
    """Share of the images with the same likeliest class, or classes above 50%."""
    probability: float = 0.0
    """The largest difference over the probabilities of all images and classes."""
    change: float = 0.0
    """The differences of an image's probabilities, summed; the mean over the images."""
    ms: Times = ()
    """The time of an image."""
    float_ms: Times = ()
    """That of the model of 32 bits, of which an export of 8 was made."""
    float_layers: tuple[str, ...] | None = None
    """The layers that an export of 8 bits leaves in float32; None for others."""

    @property
    def fall(self) -> float:
        """By how much the accuracy is below the model's, as a share of 1."""
        return self.model_accuracy - self.accuracy


def plain_model(classifier: Classifier) -> nn.Module:
    """The copy to export: on the CPU, in float32 and in torch's default memory format."""
    model = deepcopy(classifier.model).cpu().float()
    return model.to(memory_format=torch.contiguous_format).eval()


def samples_of(classifier: Classifier, split: Literal["train", "val"], count: int) -> Samples:
    """Readable images of a run's data, the same at each call; InputError if they are not at hand.

    `count`, at most: of the training images drawn, of the validation images spread over all.
    """
    source = source_of(classifier.config.data, split)
    index = open_split(source, World(), lambda *_: None, known=classifier.classes)
    check_kind(index, classifier.has_lists, str(source))
    found: dict[int, bytes] = {}
    reader, total = Reader(index), len(index)
    chosen = np.linspace(0, total - 1, min(count, total)).astype(int)
    if split == "train":
        chosen = np.random.default_rng(0).permutation(total)[:count]
    for sample in chosen.tolist():
        try:
            content = reader.read(sample)
            classifier.preprocess([content])
        except (DataError, OSError):
            continue
        found[sample] = content
    if not found:
        raise DataError("data.none-readable", location=str(source), num_images=len(chosen))
    return Samples([*found.values()], labels_of(index, len(classifier.classes))[[*found]])


class Bench:
    """Measures exports of one model, on noise and on images, which may be none."""

    def __init__(self, classifier: Classifier, model: nn.Module, samples: Samples) -> None:
        self._classifier, self._model, self._samples = classifier, model, samples
        self._logits: dict[bool, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._samples.contents)

    def part(self, count: int) -> "Bench":
        """A bench with so many of the images, at most."""
        part = slice(None, None, max(1, -(-len(self) // count)))
        samples = Samples(self._samples.contents[part], self._samples.labels[part])
        return Bench(self._classifier, self._model, samples)

    def real(self, takes_photographs: bool) -> Iterator[Tensor]:
        """What an export gets: batches, or photographs uint8[height, width, channels]."""
        contents, data = self._samples.contents, self._classifier.config.data
        if not takes_photographs:
            for start in range(0, len(contents), _BATCH):
                yield self._classifier.preprocess(contents[start : start + _BATCH]).cpu().float()
        elif data.channels in (1, 3):
            for content in contents:
                yield pixels_of(content, data.channels, data.rendering)

    @torch.no_grad()
    def measure(
        self, exported: Exported, takes_photographs: bool, *, is_exact: bool = True
    ) -> Measured:
        """Compare an export; DiffersError for logits that are not finite, or differ too much.

        `is_exact`: False for an export of fewer bits, whose logits may differ.
        """
        noise = [*self._noise(takes_photographs)]
        if takes_photographs not in self._logits:
            given = (*noise, *self.real(takes_photographs))
            self._logits[takes_photographs] = [*map(self._own, given)]
        ours = self._logits[takes_photographs]
        theirs = [exported(one) for one in (*noise, *self.real(takes_photographs))]
        tolerance = _PHOTOGRAPH_TOLERANCE if takes_photographs else _TOLERANCE
        pairs = [*zip(ours, theirs, strict=True)]
        difference = _difference(pairs, tolerance if is_exact else None)
        if len(ours) == len(noise):
            return difference
        if not is_exact:  # noise is not what an export was calibrated for
            difference = _difference(pairs[len(noise) :], None)
        ours_BC, theirs_BC = (torch.cat(logits[len(noise) :]) for logits in (ours, theirs))
        return self._compared(ours_BC, theirs_BC, difference)

    @torch.no_grad()
    def milliseconds(self, exported: Exported, takes_photographs: bool) -> Times:
        """Milliseconds an image of a batch of 1 and of 32; of a photograph, those of one."""
        (first, *_) = (*self.real(takes_photographs), *self._noise(takes_photographs))
        if takes_photographs:
            return ((1, _milliseconds(exported, first)),)
        batches = (first[:1].expand(count, -1, -1, -1).contiguous() for count in (1, _BATCH))
        return tuple((len(batch), _milliseconds(exported, batch) / len(batch)) for batch in batches)

    def _own(self, given: Tensor) -> Tensor:
        """The model's logits for what an export gets; photographs as in an evaluation."""
        if given.dtype == torch.uint8:
            given = self._classifier.preprocess([given.numpy()]).cpu().float()
        logits_BC: Tensor = self._model(given)
        return logits_BC

    def _noise(self, takes_photographs: bool) -> Iterator[Tensor]:
        channels = self._classifier.config.data.channels
        if not takes_photographs:
            size = height_width(self._classifier.image_size)
            generator = torch.Generator().manual_seed(0)
            for count in _RANDOM:
                yield torch.randn(count, channels, *size, generator=generator)
            return
        coarse = np.random.default_rng(0).uniform(0, 255, (1, channels, 6, 8))
        for sides in _SIZES:
            (photograph,) = F.interpolate(torch.from_numpy(coarse), sides, mode="bicubic")
            yield photograph.round().clamp(0, 255).byte().permute(1, 2, 0).contiguous()

    def _compared(self, ours_BC: Tensor, theirs_BC: Tensor, difference: Measured) -> Measured:
        """Adds to a difference of logits what it means for real images."""
        has_lists, labels = self._classifier.has_lists, self._samples.labels
        pair = ours_BC, theirs_BC
        if has_lists:
            ours, theirs = (logits.sigmoid() for logits in pair)
            is_same = ((ours_BC > 0) == (theirs_BC > 0)).all(dim=1)
            accuracies = [_mean_average_precision(logits, labels) for logits in pair]
        else:
            ours, theirs = (logits.softmax(dim=1) for logits in pair)
            is_same = ours_BC.argmax(dim=1) == theirs_BC.argmax(dim=1)
            accuracies = [float((x.argmax(dim=1).numpy() == labels).mean()) for x in pair]
        off_BC = (ours - theirs).abs()
        return Measured(
            difference.largest,
            difference.relative,
            images=len(labels),
            accuracy=accuracies[1],
            model_accuracy=accuracies[0],
            agreement=is_same.float().mean().item(),
            probability=off_BC.max().item(),
            change=off_BC.sum(dim=1).mean().item(),
        )


def pixels_of(content: bytes, channels: int, rendering: Rendering) -> Tensor:
    """uint8[height, width, channels] of an encoded image that is grey or RGB."""
    image = whole_image(content, rendering)
    image = image.convert("L") if channels == 1 else image
    return torch.from_numpy(np.array(image).reshape(image.height, image.width, channels))


def _mean_average_precision(logits_BC: Tensor, labels: NDArray[np.bool_]) -> float:
    scores = LabelScores(np.ones(len(labels), bool), logits_BC.T.numpy())
    return scores.evaluation(labels).map


def _milliseconds(exported: Exported, given: Tensor) -> float:
    """The median of some calls, after a first one."""
    exported(given)
    seconds: list[float] = []
    while len(seconds) < _CALLS or sum(seconds) < _SECONDS:
        began = perf_counter()
        exported(given)
        seconds.append(perf_counter() - began)
    return 1000 * median(seconds)


def _difference(pairs: Sequence[tuple[Tensor, Tensor]], tolerance: float | None) -> Measured:
    largest, scale = 0.0, 1e-12
    for ours, theirs in pairs:
        if ours.shape != theirs.shape or not theirs.isfinite().all():
            raise DiffersError("export.logits-not-finite", "its logits are missing or not finite")
        largest = max(largest, (ours - theirs).abs().max().item())
        scale = max(scale, ours.abs().max().item())
    relative = largest / scale
    if tolerance is not None and relative > tolerance:
        raise DiffersError(
            "export.logits-differ",
            "its logits differ by up to {largest:.2g}, {relative:.1%} of the largest one",
            largest=largest,
            relative=relative,
        )
    return Measured(largest, relative)
