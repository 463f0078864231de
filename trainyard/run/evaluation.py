"""Evaluation of a checkpoint on a data set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from trainyard.config import RunConfig
from trainyard.data.batch import Batch
from trainyard.data.config import Locations
from trainyard.data.device.feed import split
from trainyard.data.feeds import Feeds
from trainyard.data.index.real_labels import Labels, read_labels
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import (
    Source,
    open_labelled,
    open_validation,
    slow_paths,
    source_of,
    trained_on,
    warn,
    what_is_left_out,
)
from trainyard.distributed import init_distributed
from trainyard.errors import DataError, InputError
from trainyard.files import RunDirectory, read_json
from trainyard.monitor.progress import counter
from trainyard.run.build import build_feeds, check_decoding, trained_model
from trainyard.run.labels import check_kind, labels_of
from trainyard.run.pretrained import choose_weights
from trainyard.run.temperature import Temperatures, calibrate, counted
from trainyard.training import checkpoint
from trainyard.training.averages import prefix_of
from trainyard.training.evaluate import ONE_VIEW, Views, evaluate, score_labels
from trainyard.training.label_scores import LabelScores
from trainyard.training.precision import AUTOCASTS, use_precision
from trainyard.training.predictions import Predictions, reassessed_top1, summary
from trainyard.training.reliability import calibration_error, wilson
from trainyard.world import World, check_devices, pick_device, together, with_cores


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of an evaluation."""

    data: Locations | None = None
    """None for the recipe's own validation data; several locations are one data set."""
    all_classes: bool = False
    """True if classes that the data lacks may be predicted too."""
    labels: Path | None = None
    """Relabelled classes of the data; see data/index/real_labels.py."""
    views: Views = ONE_VIEW
    """The views of an image whose mean softmax is used."""
    ema: bool | float | None = None
    """True for the moving average alone, the best of several, a decay for one of them, False for
    the weights alone; None for all."""
    temperature: bool | None = None
    """True to fit temperatures and keep them in the checkpoint, False to forget those that it has;
    see run/temperature.py. None uses those that it has."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Data to evaluate on, in terms of a model's classes."""

    where: str
    index: Index
    numbers: list[int] | None
    """Indices of the logits to keep, in the order of the index's labels; None for all."""
    labels: Labels | None = None


@dataclass(frozen=True, kw_only=True)
class DataSetResult:
    """The result for one data set."""

    data: DataSet
    classes: tuple[str, ...]
    """Classes that could be predicted; labels and guesses are indices into them."""
    model_classes: int
    predictions: dict[str, Any]
    """Predictions, or LabelScores for images with lists of labels: of the weights under "", and of
    their moving averages, if any, under "ema_" or "ema_0.99_", …"""
    best_average: str
    """Of several averages, the decay of the one that was the best in the run's evaluation."""
    question: EvaluationOptions
    temperatures: Temperatures = field(default_factory=dict)
    """The temperatures of the weights by prefix, where they are not 1."""

    @cached_property
    def labels(self) -> NDArray[Any]:
        """The class of each sample, or bool[samples, classes]; see labels_of."""
        return labels_of(self.data.index, len(self.classes))

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values for JSON."""
        tree: dict[str, Any] = {"data": self.data.where}
        tree |= summary(self.predictions, self.labels)
        for prefix, said in self.predictions.items():
            if isinstance(said, Predictions):
                tree[f"{prefix}top1_interval"] = wilson(tree[f"{prefix}top1"], tree["samples"])
                tree[f"{prefix}ece"] = calibration_error(said)
            tree |= {f"{prefix}not_finite": said.not_finite()}
        for prefix, temperature in self.temperatures.items():
            tree[f"{prefix}temperature"] = temperature
        tree |= {"ema_decay": float(self.best_average)} if self.best_average else {}
        tree |= {
            "classes": len(self.classes),
            "model_classes": self.model_classes,
            "flip": self.question.views.flip,
            "scales": [*self.question.views.scales],
        }
        return tree | ({"reassessed": self._reassessed()} if self.data.labels else {})

    def _reassessed(self) -> dict[str, Any]:
        found: dict[str, Any] = {"labels": str(self.question.labels)}
        for prefix, said in self.predictions.items():
            assert isinstance(said, Predictions)  # _open refuses other data
            found["samples"], found[f"{prefix}top1"] = reassessed_top1(said, self.data.labels or [])
        return found


def evaluate_checkpoint(
    config: RunConfig,
    path: Path,
    question: EvaluationOptions = EvaluationOptions(),
    *,
    world: World,
    console: Console,
) -> DataSetResult:
    """Evaluate a checkpoint and its moving averages, every image once, on any number of ranks.

    Every rank of the world calls it, and gets the result.
    """
    with init_distributed(world):
        device = pick_device(world := with_cores(world))
        check_devices(world, device)
        use_precision(config.batch.precision)
        with together(world):
            if world.is_first:
                checkpoint.check(path)
        with together(world):
            check_decoding(config, device)
            progress = checkpoint.read_progress(path)
            classes, has_lists = progress["classes"], progress.get("has_lists", False)
            names = _names(path, progress, question.ema)
        data = _open(config, question, classes, world, console=console)
        if world.is_first:
            warn(console, _remarks(config, path, question, data))
        with together(world):
            check_kind(data.index, has_lists, data.where)
            models = {
                name: trained_model(config, path, len(classes), name).to(device) for name in names
            }
        feeds = build_feeds(config, world, device)
        temperatures = _calibrated(
            config, feeds, data, models, question=question, path=path, console=console
        )
        found = _predictions(config, feeds, data, models, views=question.views, console=console)
        with together(world):
            best = _best_average(path, progress)
            result = _result(data, found, classes, question, best=best)
            return replace(result, temperatures=temperatures)


def _calibrated(
    config: RunConfig,
    feeds: Feeds,
    data: DataSet,
    models: Mapping[str, nn.Module],
    *,
    question: EvaluationOptions,
    path: Path,
    console: Console,
) -> Temperatures:
    """The temperatures of models by prefix; their logits are divided by them."""
    found = calibrate(
        config,
        feeds,
        data.index,
        models,
        checkpoint=path,
        fit=question.temperature,
        numbers=data.numbers,
        console=console,
    )
    return {prefix_of(name): temperature for name, temperature in found.items()}


def _predictions(
    config: RunConfig,
    feeds: Feeds,
    data: DataSet,
    models: Mapping[str, nn.Module],
    *,
    views: Views,
    console: Console,
) -> dict[str, Predictions] | dict[str, LabelScores]:
    with counter(console, f"evaluating on {data.where}", len(data.index)) as show:
        return predict(
            config,
            feeds,
            feeds.evaluation(data.index),
            {prefix_of(name): model for name, model in models.items()},
            index=data.index,
            on_batch=lambda _, count: show(count),
            numbers=data.numbers,
            views=views,
        )


def predict(
    config: RunConfig,
    feeds: Feeds,
    opened: AbstractContextManager[Iterable[Batch]],
    models: Mapping[str, nn.Module],
    *,
    index: Index,
    on_batch: Callable[[Batch, int], None],
    numbers: Sequence[int] | None = None,
    views: Views = ONE_VIEW,
) -> dict[str, Predictions] | dict[str, LabelScores]:
    """Predictions of each model for a whole data set; see training/evaluate.py.

    `opened` gives the data set's batches: `feeds.evaluation`, or one of `feeds.evaluations`.
    `on_batch` receives each batch and the number of samples started so far. A model on another
    device, such as a moving average in host memory, is evaluated as a copy on the feeds' device.
    """
    with opened as feed:
        here = {name: on_device(feeds.device, model) for name, model in models.items()}
        batches = counted(feed, config.batch.size, len(index), on_batch)
        if config.batch.virtual_ranks:
            batches = split(batches, config.batch.virtual_ranks // feeds.world.size)
        how: dict[str, Any] = {
            "num_samples": len(index),
            "world": feeds.world,
            "device": feeds.device,
            "precision": AUTOCASTS[config.batch.precision],
            "columns": None if numbers is None else torch.tensor(numbers, device=feeds.device),
            "views": views,
        }
        return (evaluate if index.lists is None else score_labels)(here, batches, **how)


def on_device(device: torch.device, model: nn.Module) -> nn.Module:
    """The model, or a copy of it on the device."""
    found = next(model.parameters()).device
    return model if found == device else deepcopy(model).to(device)


def _open(
    config: RunConfig,
    question: EvaluationOptions,
    classes: Sequence[str],
    world: World,
    *,
    console: Console,
) -> DataSet:
    where, numbers = question.data, None
    with counter(console, "indexing samples") as progress:
        if where is None:
            index = open_validation(config.data, classes, world, progress)
        else:
            index, numbers = open_labelled(where, classes, world, progress)
    if numbers is not None and question.all_classes:
        numbers = [*numbers, *sorted(set(range(len(classes))) - set(numbers))]
    as_they_are = numbers == list(range(len(classes)))
    name = str(source_of(config.data, "val") if where is None else Source(where, "data.val"))
    data = DataSet(where=name, index=index, numbers=None if as_they_are else numbers)
    with together(world):
        if question.temperature and numbers is not None and len(numbers) < len(classes):
            raise InputError(
                "temperature.classes-left-out",
                location=name,
                num_found=len(numbers),
                num_classes=len(classes),
            )
        if question.labels is None:
            return data
        if index.lists is not None:
            raise DataError("option.labels-beside-lists", location=data.where)
        return replace(data, labels=read_labels(question.labels, index))


def _remarks(
    config: RunConfig, path: Path, question: EvaluationOptions, data: DataSet
) -> Iterator[str]:
    yield from slow_paths(data.index)
    yield from what_is_left_out([data.index])
    yield from trained_on(config.data, question.data)
    if question.data is not None:
        return
    try:
        before = read_json(RunDirectory(path.parents[1]).environment)["fingerprints"]["val"]
    except (OSError, ValueError, KeyError, TypeError):  # a checkpoint without its run
        return
    if data.index.fingerprint != before:
        yield (
            f"{data.where}: differs from the data that validated the run, as images or the recipe "
            "have changed, or another release divided them: the run may have been trained on some"
        )


def _names(path: Path, progress: dict[str, Any], ema: bool | float | None) -> list[str]:
    """Names of the weights of a checkpoint to evaluate."""
    if ema is None:
        return ["", *checkpoint.averages(path)]
    return [choose_weights(path, progress, ema)]


def _best_average(path: Path, progress: dict[str, Any]) -> str:
    """Its decay, if there are several."""
    averages = checkpoint.averages(path)
    return choose_weights(path, progress, True).partition("-")[2] if averages else ""


def _result(
    data: DataSet,
    predictions: dict[str, Any],
    classes: Sequence[str],
    question: EvaluationOptions,
    *,
    best: str,
) -> DataSetResult:
    if not next(iter(predictions.values())).is_read().any():
        raise DataError("data.none-readable", location=data.where, num_images=len(data.index))
    numbers = range(len(classes)) if data.numbers is None else data.numbers
    return DataSetResult(
        data=data,
        classes=tuple(classes[number] for number in numbers),
        model_classes=len(classes),
        predictions=predictions,
        best_average=best,
        question=question,
    )
