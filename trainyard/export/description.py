"""The properties and inputs of an exported model, written into every file and its card."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn

from trainyard.classifier import Classifier
from trainyard.config import RunConfig
from trainyard.data.decode.crops import Fit
from trainyard.data.decode.rendering import Colour, Limits
from trainyard.data.open_datasets import Source, source_of
from trainyard.data.storage.credentials import PIPE, without_secrets
from trainyard.data.storage.location import split_of
from trainyard.data.storage.manifest import is_inside
from trainyard.data.storage.source import is_remote
from trainyard.image_size import ImageSize, height_width
from trainyard.installation import VERSION
from trainyard.monitor.history import METRICS
from trainyard.own_code import is_own
from trainyard.printable import as_text
from trainyard.training import checkpoint
from trainyard.training.weight_names import prefix_of

INPUT, OUTPUT = "images", "logits"  # names, in formats that have names
_MEASURED = (*METRICS, "loss")
# Options of timm that affect training alone.
_OF_TRAINING = ("drop_rate", "drop_path_rate", "drop_block_rate")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Plain data. Sizes are in pixels, `mean` and `std` on a scale of 0 to 1."""

    architecture: str
    """timm's or Trainyard's name of the architecture, or the user's "module:function"."""
    model_args: dict[str, Any]
    """Further arguments of timm.create_model, or of the function, that the weights need."""
    classes: tuple[str, ...]
    image_size: ImageSize
    fit: Fit
    crop_pct: float
    padding: tuple[int, ...] | None
    """The pixel beside an image of `fit` pad, 0 to 255; None for others."""
    interpolation: str
    exif: bool
    """True if images are turned upright by their EXIF first."""
    range: Limits | None
    """The values of images of more than 8 bits that are 0 and 255, or "window"; None for the
    upper 8 bits."""
    bands: tuple[int, ...]
    """The bands of a file that are its channels, from 1; none for all."""
    background: Colour
    """What transparent pixels show."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    parameters: int
    step: int
    weights: str
    """ "ema" for the moving average, "ema-0.99" for one of several, "raw" for the weights."""
    temperature: float
    """The temperature, by which the exported logits are divided; see run/temperature.py."""
    precision: str
    """Precision of training and evaluation; exported models compute in float32."""
    evaluation: dict[str, Any]
    """samples, the metrics by their keys, and loss of these weights; {} if they were not evaluated.
    Without the loss, which was measured before, if there is a temperature."""
    has_lists: bool
    """True if an image may have any number of classes: a sigmoid makes their probabilities."""
    train: str
    val: str
    """The data of the run, whatever this export is compared on."""
    license: str | None
    """The user's identifier of a license, for the card."""
    recipe: dict[str, dict[str, Any]]
    """The keys of the training that differ from their defaults."""
    versions: dict[str, str]

    @property
    def own_module(self) -> str | None:
        """The user's or Trainyard's module of the architecture; None if timm itself has it."""
        if is_own(self.architecture):
            return self.architecture.partition(":")[0]
        module: str = timm.models.model_entrypoint(self.architecture).__module__
        return module if module.startswith("trainyard.") else None

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def pixels(self) -> str:
        """The channels of an image, in words."""
        usual = {1: "luminance", 3: "RGB"}
        return usual.get(self.channels, f"{self.channels} channels")

    def input(self, *, takes_photographs: bool = False) -> str:
        """The input of an exported file, in words."""
        height, width = height_width(self.image_size)
        if takes_photographs:
            return f"uint8[height, width, {self.channels}], {self.pixels}, of any size"
        images = f"float32[batch, {self.channels}, {height}, {width}]"
        return f"{images}, {self.pixels} from 0 to 1, minus mean, by std"

    def metadata(self, *, takes_photographs: bool = False) -> dict[str, str]:
        """Metadata for the header of a file, by name; values other than text are JSON."""
        values = {
            "architecture": self.architecture,
            "model_args": self.model_args,
            "classes": self.classes,
            "probabilities": "sigmoid" if self.has_lists else None,
            "num_classes": len(self.classes),
            "image_size": self.image_size,
            "input": self.input(takes_photographs=takes_photographs),
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "fit": self.fit,
            "crop_pct": self.crop_pct,
            "exif": self.exif,
            "range": self.range,
            "bands": self.bands or None,
            "background": self.background,
            "step": self.step,
            "weights": self.weights,
            "temperature": self.temperature,
            "evaluation": self.evaluation,
            "versions": self.versions,
        }
        return {key: as_text(value) for key, value in values.items() if value is not None}


def describe(classifier: Classifier, license: str | None = None) -> Description:
    """The description of a model that goes into an exported file and its card."""
    config, model, trained = classifier.config, classifier.model, classifier.recipe
    return Description(
        architecture=_architecture(config.model.name),
        model_args=_model_args(model),
        classes=classifier.classes,
        image_size=classifier.image_size,
        fit=config.data.fit,
        crop_pct=config.data.crop_pct,
        padding=config.data.padding,
        interpolation=config.data.interpolation,
        exif=config.data.exif,
        range=config.data.rendering.range,
        bands=config.data.rendering.bands,
        background=config.data.background,
        mean=config.data.mean,
        std=config.data.std,
        parameters=sum(weight.numel() for weight in model.parameters()),
        step=classifier.step,
        weights=classifier.weights or "raw",
        temperature=classifier.temperature,
        precision=config.batch.precision,
        evaluation=_evaluation(classifier),
        has_lists=classifier.has_lists,
        train=_public_source(source_of(trained.data, "train")),
        val=_public_source(source_of(trained.data, "val")),
        license=license,
        recipe=_recipe(trained),
        versions={
            "trainyard": VERSION,
            "torch": torch.__version__,
            "timm": timm.__version__,
        },
    )


def _architecture(name: str) -> str:
    """A model's name; timm's without the name of its pretrained weights."""
    return name if is_own(name) else name.partition(".")[0]


def _model_args(model: nn.Module) -> dict[str, Any]:
    """Arguments recorded by timm's factory, or model/own.py; the check finds missing ones."""
    recorded: dict[str, Any] = getattr(model, "_model_args", {})
    left_out = (*_OF_TRAINING, "num_classes")
    return {key: value for key, value in recorded.items() if key not in left_out}


def _evaluation(classifier: Classifier) -> dict[str, Any]:
    """The evaluation of these weights, if the run made one with these settings."""
    assert classifier.checkpoint is not None  # as load() returns it
    last = checkpoint.read_progress(classifier.checkpoint)["last"]
    prefix = prefix_of(classifier.weights)
    is_of_these = classifier.is_as_evaluated and last.get("step") == classifier.step
    found = {key: last.get(f"{prefix}{key}") for key in _MEASURED}
    measured = {key: value for key, value in found.items() if isinstance(value, float)}
    samples = last.get("samples")
    if not is_of_these or "loss" not in measured or not isinstance(samples, int):
        return {}
    if classifier.temperature != 1:  # it is that before; classes, and so all else, are the same
        del measured["loss"]
    return {"samples": samples, **measured}


def _recipe(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The recipe without keys that concern this machine, and without full paths of it."""
    tree = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    tree.pop("watch", None)
    for key in ("train", "val", "corrections", "threads", "stage", "stage_gb"):
        tree.get("data", {}).pop(key, None)
    return {section: _public(values) for section, values in tree.items() if values}


def _public(value: Any) -> Any:
    """A value of a recipe whose texts are locations that may be published, at any depth."""
    if isinstance(value, dict):
        return {key: _public(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    return _public_location(value) if isinstance(value, str) else value


def _public_source(source: Source) -> str:
    """The locations of a source, to publish."""
    found = source.locations or ()
    locations = (found,) if isinstance(found, str) else found
    return str(source._replace(locations=tuple(map(_public_location, locations))))


def _public_location(text: str) -> str:
    """A location to publish: without secrets, commands and options.

    Of a path that is absolute, or leads out of the working directory, it has the last two parts.
    """
    if text.startswith(PIPE):
        return "a pipe"
    if is_remote(text):
        return without_secrets(text)
    path, split = split_of(text)
    if not is_inside(path):
        path = "/".join(path.rstrip("/").rsplit("/", 2)[-2:])
    return f"{path}#{split}" if split else path
