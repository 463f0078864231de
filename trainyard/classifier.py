"""A trained classifier: the model of a run or checkpoint, and its predictions for images.

Images are processed as in an evaluation, so that the results are equal.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.compare import check_keys, check_size, differences
from trainyard.config import RunConfig, load_recipe
from trainyard.data._native import own_decoder
from trainyard.data.batch import Batch
from trainyard.data.config import DataConfig
from trainyard.data.decode.array_file import array_file
from trainyard.data.decode.decode import BadImageError, as_rgb, decode_batch, in_8_bits, is_grey
from trainyard.data.decode.orientation import orientation_of, upright
from trainyard.data.device.feed import Normalise
from trainyard.data.feeds import Feeds
from trainyard.data.index.table import Index
from trainyard.data.storage.remote.http import fetch_image
from trainyard.errors import CheckpointError, DataError
from trainyard.files import find_checkpoint
from trainyard.image_size import ImageSize, height_width, size_text
from trainyard.model.activation import activation_maps
from trainyard.model.adapt import classifier_layers
from trainyard.run.build import build_feeds
from trainyard.run.ensemble import Vote, combine
from trainyard.run.model import trained_model
from trainyard.run.pretrained import choose_weights
from trainyard.run.temperature import divide, load_temperatures
from trainyard.training import checkpoint
from trainyard.training.evaluate import Views
from trainyard.training.precision import AUTOCASTS, autocast, use_precision
from trainyard.world import World, own_device

_BATCH = 256  # images per batch, at most
_LEAST_SHOWN = 224  # pixels of the longer side of an overlay
_LIKELY = 0.5  # probability above which an image with a list of labels has a class
Picture = str | Path | bytes | Image.Image | NDArray[np.uint8]
"""An image: a path, an http(s) URL, the bytes of an image file, a Pillow image, or an array
uint8[height, width] or uint8[height, width, channels]."""


class Guess(NamedTuple):
    name: str
    """Name of the class."""
    probability: float


class Guesses(NamedTuple):
    """The k likeliest classes of each of n images, the likeliest first."""

    classes: NDArray[np.int64]  # [n, k] class numbers; -1 for a bad image
    probabilities: NDArray[np.float32]  # [n, k]; 0 for a bad image
    bad: dict[int, str]
    """Reasons why images have no guesses, by image number."""
    counts: NDArray[np.int64]  # [classes]
    """Images of each likeliest class; with lists of labels, of each class above 50%."""
    vectors: NDArray[np.float32] | None
    """[n, D]: embeddings, if wanted; 0 for a bad image."""


def load(
    path: str | Path | Sequence[str | Path],
    *,
    device: "torch.device | str | None" = None,
    ema: bool | float | None = None,
    overrides: Mapping[str, str] | None = None,
) -> "Classifier":
    """The classifier of a checkpoint, or of a run's best one, or of several together.

    `device`: by default a GPU if there is one. `ema`: True for the moving average of the weights,
    the best of several, or the decay of one; by default it is used if it scored no worse than the
    weights. `overrides` of recipe keys: {"data.eval_size": "288"}. For several see
    run/ensemble.py. CheckpointError if it cannot be loaded, RecipeError for a key without effect.
    """
    check_keys(overrides := overrides or {}, "predictions")
    path, *others = [path] if isinstance(path, str | Path) else path
    folder, checkpoint_folder = find_checkpoint(Path(path))
    recipe = load_recipe(str(folder / "recipe.toml"))
    config = _to_predict(load_recipe(str(folder / "recipe.toml"), overrides))
    check_size(config, overrides, "predictions")
    checkpoint.check(checkpoint_folder)
    progress = checkpoint.read_progress(checkpoint_folder)
    weights = choose_weights(checkpoint_folder, progress, ema)
    device = own_device(World()) if device is None else torch.device(device)
    classes = tuple(progress["classes"])
    model = trained_model(config, checkpoint_folder, len(classes), weights).to(device).eval()
    temperature = load_temperatures(checkpoint_folder).get(weights, 1.0)
    divide(model, temperature)
    classifier = Classifier(
        model=model.requires_grad_(False),
        classes=classes,
        recipe=recipe,
        config=config,
        checkpoint=checkpoint_folder,
        has_lists=progress.get("has_lists", False),
        step=progress["step"],
        weights=weights,
        temperature=temperature,
        device=device,
    )
    return _with(others, classifier, ema, overrides) if others else classifier


def _with(
    others: Sequence[str | Path],
    first: "Classifier",
    ema: bool | float | None,
    overrides: Mapping[str, str],
) -> "Classifier":
    assert first.checkpoint is not None
    runs = [(first.config, first.checkpoint)]
    for folder, found in (find_checkpoint(Path(other)) for other in others):
        runs.append((_to_predict(load_recipe(str(folder / "recipe.toml"), overrides)), found))
    quiet = Console(quiet=True)
    mean = combine(runs, ema=ema, world=World(), device=first.device, console=quiet)
    weights, model = f"mean of {mean.of}", mean.model.eval().requires_grad_(False)
    return replace(first, model=model, weights=weights, temperature=1.0, note=mean.note)


def _to_predict(config: RunConfig) -> RunConfig:
    """The recipe without settings for training alone; images decode on the CPU, without staging."""
    model = {"grad_checkpointing": False, "freeze": ()}
    data = {"stage": None, "decode": "cpu"}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "data": config.data.model_copy(update=data),
        }
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Classifier:
    """A model that is ready to use; see `load`."""

    model: nn.Module
    """In eval mode; maps the output of `preprocess` to float[B, classes] logits."""
    classes: tuple[str, ...]
    """Names by class number."""
    recipe: RunConfig
    """The recipe that trained it."""
    config: RunConfig
    """The recipe with overrides, without settings for training alone."""
    checkpoint: Path | None
    """None for timm's own weights."""
    has_lists: bool
    """True if an image may have any number of classes: probabilities are then independent."""
    step: int
    """Number of steps that the weights were trained."""
    weights: str
    """"" for the run's own weights, "ema" for their moving average, "ema-0.99" of several; "mean of
    weights" or "mean of probabilities" for several runs."""
    device: torch.device
    temperature: float = 1.0
    """The temperature, by which the model's logits are divided; see run/temperature.py."""
    note: str = ""
    """A line on the mean of several runs, as in run/ensemble.py; "" for one run. Recipe, checkpoint
    and step are those of the first."""

    def __repr__(self) -> str:
        size = size_text(self.image_size)
        return (
            f"<Classifier: {self.config.model.name}, {len(self.classes):,} classes, images of "
            f"{size} pixels, step {self.step:,} of {self.source}>"
        )

    @property
    def source(self) -> str:
        """Where the weights come from."""
        return str(self.checkpoint or f"timm's {self.config.model.name}")

    @property
    def is_as_evaluated(self) -> bool:
        """False if overrides may change the results of the run's evaluations."""
        return not differences(_to_predict(self.recipe), self.config)

    @property
    def is_vote(self) -> bool:
        """True for the mean of the probabilities of several models."""
        return isinstance(self.model, Vote)

    @property
    def uses_ema(self) -> bool:
        """True if the weights are a moving average."""
        return self.weights.startswith("ema")

    @property
    def image_size(self) -> ImageSize:
        """Size of the model's input images: the side of a square, or height and width."""
        return self.config.data.eval_size or self.config.data.image_size

    def predict(
        self,
        images: Picture | Iterable[Picture],
        top: int = 5,
        *,
        flip: bool = False,
        scales: Sequence[float] = (1.0,),
    ) -> list[list[Guess]]:
        """The `top` likeliest classes of each image, with their probabilities.

        They add up to 1 over all classes, except with lists of labels (`has_lists`). A single image
        is a list of one. `flip` takes the mean over an image and its mirror image, `scales` over
        enlargements of its middle. DataError, which names the first unreadable image.
        """
        guesses, images = [], listed(images)
        views = Views(flip, tuple(scales))
        for start in range(0, len(images), _BATCH):
            shares_BC = self._shares(self.preprocess(images[start : start + _BATCH]), views)
            guesses += [self.named(*row) for row in zip(*_likeliest(shares_BC, top), strict=True)]
        return guesses

    def preprocess(self, images: Picture | Iterable[Picture]) -> Tensor:
        """Input of the model, as in evaluations, normalised: [B, channels, height, width].

        DataError, which names the first unreadable image.
        """
        data, size, images = self.config.data, self.image_size, listed(images)
        contents = [content_of(image, number, data) for number, image in enumerate(images)]
        pixels_BHWC = np.empty((len(contents), *height_width(size), data.channels), np.uint8)
        crop, decoder = data.evaluation_crop(size), own_decoder()
        how, rendering = data.interpolation, data.rendering
        bad = decode_batch(contents, crop, pixels_BHWC, how, decoder=decoder, rendering=rendering)
        for number, reason in sorted(bad.items()):
            raise DataError("image.unreadable", name=_named(images[number], number), reason=reason)
        return self._normalise(torch.from_numpy(pixels_BHWC).to(self.device).permute(0, 3, 1, 2))

    def predict_index(
        self,
        index: Index,
        top: int = 5,
        *,
        flip: bool = False,
        scales: Sequence[float] = (1.0,),
        embed: bool = False,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> Guesses:
        """Predictions for a whole index, through the loader; its labels are ignored.

        `flip` and `scales` as in `predict`. `embed` also keeps embeddings, what the classifier
        layer gets; a CheckpointError if the model does not tell which layer that is. `on_batch`
        receives the number of images started so far.
        """
        top, count = min(top, len(self.classes)), len(index)
        classes, probabilities = np.full((count, top), -1), np.zeros((count, top), np.float32)
        counts, bad = np.zeros(len(self.classes), np.int64), dict[int, str]()
        vectors: NDArray[np.float32] | None = None
        views = Views(flip, tuple(scales))
        for batch, shares_BC, own_BD in self._predicted(index, views, embed=embed, show=on_batch):
            ids = batch.ids.numpy()
            classes[ids], probabilities[ids] = _likeliest(shares_BC, top)
            bad |= {sample.id: sample.reason for sample in batch.bad}
            if own_BD is not None:
                if vectors is None:
                    vectors = np.zeros((count, own_BD.shape[1]), np.float32)
                vectors[ids] = own_BD.cpu().numpy()
            if self.has_lists:
                is_good = (batch.weights > 0) & shares_BC.isfinite().all(dim=1)
                counts += (shares_BC[is_good] > _LIKELY).sum(dim=0).cpu().numpy()
        for number in np.flatnonzero(~np.isfinite(probabilities).all(axis=1)).tolist():
            bad.setdefault(number, "the model gives it scores that are not finite")
        classes[list(bad)], probabilities[list(bad)] = -1, 0
        if vectors is not None:
            vectors[list(bad)] = 0
        if not self.has_lists:
            first = classes[:, 0]
            counts = np.bincount(first[first >= 0], minlength=len(self.classes))
        return Guesses(classes, probabilities, dict(sorted(bad.items())), counts, vectors)

    def _predicted(
        self, index: Index, views: Views, *, embed: bool, show: Callable[[int], None]
    ) -> Iterator[tuple[Batch, Tensor, Tensor | None]]:
        """The batches of an index, with probabilities and, if wanted, embeddings [B, D]."""
        feeds, count = self.feeds(), 0
        feeds = replace(feeds, global_batch=min(feeds.global_batch, _BATCH, len(index)))
        with feeds.evaluation(index) as feed, self._embeddings(embed) as embeddings:
            for batch in feed:
                count += len(batch.ids)
                show(count)
                embeddings.clear()
                shares_BC = self._shares(batch.images_BCHW, views)
                first_view_BD = _pooled(embeddings[0]) if embed else None
                yield batch, shares_BC, first_view_BD

    def feeds(self) -> Feeds:
        """Makes the batches of images of an index."""
        return build_feeds(self.config, World(), self.device)

    def overlay(self, content: bytes, label: int | None = None) -> Image.Image:
        """The image as the model gets it, red where it finds a class (Grad-CAM).

        `label` is the number of the class; None for the likeliest. The longer side has 224 pixels
        at least. DataError for an unreadable image, InputError for a model without a feature map.
        """
        images_BCHW = self.preprocess([content])
        if label is None:
            label = int(self.logits(images_BCHW).argmax())
        classes = torch.tensor([label], device=self.device)
        with self._arithmetic():
            (heat_HW,) = activation_maps(self.model, images_BCHW, classes)
        mean, std = (
            torch.tensor(of).view(-1, 1, 1) for of in (self.config.data.mean, self.config.data.std)
        )
        pixels_CHW = (images_BCHW[0].cpu().float() * std + mean).clamp(0, 1)
        shown_CHW = (pixels_CHW if len(pixels_CHW) >= 3 else pixels_CHW[:1].expand(3, -1, -1))[:3]
        side = max(1, -(-_LEAST_SHOWN // max(shown_CHW.shape[1:])))
        size = [side * of for of in shown_CHW.shape[1:]]
        shown_CHW = F.interpolate(shown_CHW[None], size)[0]
        heat_HW = F.interpolate(heat_HW[None, None].cpu(), size, mode="bilinear")[0, 0]
        red_CHW = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
        mixed_CHW = shown_CHW + 0.6 * heat_HW * (red_CHW - shown_CHW)
        return Image.fromarray((255 * mixed_CHW).round().byte().permute(1, 2, 0).numpy())

    def logits(self, images_BCHW: Tensor) -> Tensor:
        """float32[B, classes] at the recipe's precision, without gradients."""
        with self._arithmetic(), torch.no_grad():
            logits_BC: Tensor = self.model(images_BCHW)
        return logits_BC.float()

    def named(self, classes: NDArray[np.int64], probabilities: NDArray[np.float32]) -> list[Guess]:
        """One image's guesses, with names."""
        pairs = zip(classes.tolist(), probabilities.tolist(), strict=True)
        return [Guess(self.classes[number], probability) for number, probability in pairs]

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Inside, numbers have the recipe's precision; afterwards again the program's own."""
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        precision = self.config.batch.precision
        use_precision(precision)
        try:
            with autocast(self.device, AUTOCASTS[precision]):
                yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]

    @contextmanager
    def _embeddings(self, wanted: bool) -> Iterator[list[Tensor]]:
        """Inside, each forward pass adds the input of the classifier layer to the list."""
        inputs: list[Tensor] = []
        layers = classifier_layers(self.model)[:1] if wanted else []
        if wanted and not layers:
            raise CheckpointError(
                "checkpoint.no-embeddings",
                "{name}: has no get_classifier(), which would tell the layer that takes embeddings",
                name=self.config.model.name,
            )
        hooks = [
            layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
            for layer in layers
        ]
        try:
            yield inputs
        finally:
            for hook in hooks:
                hook.remove()

    def _shares(self, images_BCHW: Tensor, views: Views) -> Tensor:
        """float32[B, classes]: probabilities."""
        logits_VBC = torch.stack([self.logits(view_BCHW) for view_BCHW in views.of(images_BCHW)])
        return (logits_VBC.sigmoid() if self.has_lists else logits_VBC.softmax(dim=2)).mean(dim=0)

    @cached_property
    def _normalise(self) -> Normalise:
        return Normalise(
            self.device,
            mean=self.config.data.mean,
            std=self.config.data.std,
            channels_last=self.config.model.channels_last,
            dtype=AUTOCASTS[self.config.batch.precision] or torch.float32,
        )


def _pooled(features: Tensor) -> Tensor:
    """float32[B, D] of features with or without positions: [B, D, …]."""
    return features.detach().float().flatten(2).mean(2) if features.ndim > 2 else features.float()


def _likeliest(shares_BC: Tensor, top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The top classes; among equal ones the lower class number first, as in evaluate.py."""
    ordered = shares_BC.sort(dim=1, descending=True, stable=True)
    return ordered.indices[:, :top].cpu().numpy(), ordered.values[:, :top].cpu().numpy()


def listed(images: Picture | Iterable[Picture]) -> list[Picture]:
    """Images as a list; a single one is a list of one. An array of more axes holds several."""
    is_array = isinstance(images, np.ndarray) and images.ndim < 4
    if is_array or isinstance(images, str | os.PathLike | bytes | Image.Image):
        return [images]  # type: ignore[list-item]
    try:
        return list(images)
    except TypeError:
        raise DataError(
            "image.not-images",
            "an image is a path, a URL, bytes of a file, a Pillow image or an array of uint8, or "
            "several: not a {type}",
            type=type(images).__name__,
        ) from None


def content_of(image: Picture, number: int, data: DataConfig) -> bytes:
    """The encoded image; a Pillow image is turned here, as its EXIF is not encoded."""
    if isinstance(image, np.ndarray):
        image = array_file(image) if data.bands else _of_array(image, number, data.channels)
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        turn = orientation_of(image) if data.exif else 1
        if data.bands or data.channels == len(image.getbands()) not in (1, 3):
            return array_file(np.asarray(upright(image, turn)))
        file = io.BytesIO()
        try:
            picture = in_8_bits(image, data.rendering.range)
            shown = picture if is_grey(picture) else as_rgb(picture, data.rendering)
            upright(shown, turn).save(file, "PNG", compress_level=0, exif=b"")
        except BadImageError as error:
            raise DataError(
                "image.unreadable", name=_named(image, number), reason=str(error)
            ) from None
        return file.getvalue()
    if not isinstance(image, str | os.PathLike):
        raise DataError(
            "image.wrong-type",
            "image {number}: an image is a path, a URL, bytes of a file, a Pillow image or an "
            "array of uint8, not a {type}",
            number=number + 1,
            type=type(image).__name__,
        )
    try:
        if isinstance(image, str) and "://" in image:
            return fetch_image(image)
        return Path(image).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError("image.unreadable", name=_named(image, number), reason=reason) from None


def _of_array(pixels: NDArray[np.uint8], number: int, channels: int) -> Image.Image | bytes:
    """The image of an array: grey, or of 3 or so many channels. DataError for other arrays."""
    shape, kinds = pixels.shape, (channels,) if channels not in (1, 3) else (1, 3)
    depth = (*shape, 1)[2] if pixels.ndim in (2, 3) else None
    if pixels.dtype != np.uint8 or 0 in shape or depth not in kinds:
        raise DataError(
            "image.wrong-array",
            "image {number}: an array of {dtype}{shape}: give uint8[height, width, {channels}]",
            number=number + 1,
            dtype=str(pixels.dtype),
            shape=list(shape),
            channels=channels,
        )
    if kinds == (channels,):
        return array_file(pixels)
    return Image.fromarray(pixels[..., 0] if shape[2:] == (1,) else pixels)


def _named(image: Picture, number: int) -> str:
    return str(image) if isinstance(image, str | Path) else f"image {number + 1}"
