"""Evaluation of a checkpoint on one or more data sets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from trainyard.data.index.build import Progress
from trainyard.data.index.real_labels import Labels, read_labels
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import (
    Source,
    open_labelled,
    open_split,
    open_validation,
    source_of,
    trained_on,
)
from trainyard.data.remarks import slow_paths, warn, what_is_left_out
from trainyard.distributed import init_distributed
from trainyard.errors import DataError, RecipeError
from trainyard.files import RunDirectory, read_json
from trainyard.monitor.progress import counter
from trainyard.run.build import build_feeds, check_decoding, trained_model
from trainyard.run.labels import check_kind, labels_of
from trainyard.run.pretrained import choose_weights
from trainyard.training import checkpoint
from trainyard.training.averages import prefix_of
from trainyard.training.bn_statistics import batch_norms, estimate_statistics
from trainyard.training.evaluate import evaluate, score_labels
from trainyard.training.label_scores import LabelScores
from trainyard.training.precision import AUTOCASTS, use_precision
from trainyard.training.predictions import Predictions, calibration_error, reassessed_top1, summary
from trainyard.world import World, check_devices, pick_device, together, with_cores


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of an evaluation."""

    data: tuple[Locations | None, ...] = (None,)
    """The data sets, in order; None for the recipe's own validation data."""
    all_classes: bool = False
    """True if classes that a data set lacks may be predicted too."""
    labels: Path | None = None
    """Relabelled classes of the first data set; see data/index/real_labels.py."""
    flip: bool = False
    """True to use the mean softmax of an image and of its mirror image."""
    ema: bool | float | None = None
    """True for the moving average alone, the best of several, a decay for one of them, False for
    the weights alone; None for all."""
    bn_samples: int = 0
    """Training images for batch norm statistics, estimated first; 0: none. In a Result, the number
    used: whole batches, without unreadable images."""


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
                tree |= {f"{prefix}ece": calibration_error(said)}
            tree |= {f"{prefix}not_finite": said.not_finite()}
        tree |= {"ema_decay": float(self.best_average)} if self.best_average else {}
        tree |= {
            "classes": len(self.classes),
            "model_classes": self.model_classes,
            "flip": self.question.flip,
            "bn_samples": self.question.bn_samples,
        }
        return tree | ({"reassessed": self._reassessed()} if self.data.labels else {})

    def _reassessed(self) -> dict[str, Any]:
        found: dict[str, Any] = {"labels": str(self.question.labels)}
        for prefix, said in self.predictions.items():
            assert isinstance(said, Predictions)  # _open_all refuses other data
            found["samples"], found[f"{prefix}top1"] = reassessed_top1(said, self.data.labels or [])
        return found


def evaluate_checkpoint(
    config: RunConfig,
    path: Path,
    question: EvaluationOptions = EvaluationOptions(),
    *,
    world: World,
    console: Console,
) -> list[DataSetResult]:
    """Evaluate a checkpoint and its moving averages, every image once, on any number of ranks.

    Every rank of the world calls it, and gets the result of each data set.
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
        data = _open_all(config, question, classes, world, console=console)
        warn(console, _other_parts(config, path, question, data) if world.is_first else [])
        with together(world):
            for one in data:
                check_kind(one.index, has_lists, one.where)
            models = {
                prefix_of(name): trained_model(config, path, len(classes), name).to(device)
                for name in names
            }
        feeds = build_feeds(config, world, device)
        if question.bn_samples:
            used = _estimate(config, feeds, models, samples=question.bn_samples, console=console)
            question = replace(question, bn_samples=used)
        say = partial(_said, config, feeds, models=models, flip=question.flip, console=console)
        said = [say(one) for one in data]
        with together(world):
            best, results = _best_average(path, progress), zip(data, said, strict=True)
            return [_result(*one, classes, question, best=best) for one in results]


def _said(
    config: RunConfig,
    feeds: Feeds,
    data: DataSet,
    *,
    models: Mapping[str, nn.Module],
    flip: bool,
    console: Console,
) -> dict[str, Predictions] | dict[str, LabelScores]:
    with counter(console, f"evaluating on {data.where}", len(data.index)) as show:
        return predict(
            config,
            feeds,
            feeds.evaluation(data.index),
            models,
            index=data.index,
            on_batch=lambda _, count: show(count),
            numbers=data.numbers,
            flip=flip,
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
    flip: bool = False,
) -> dict[str, Predictions] | dict[str, LabelScores]:
    """Predictions of each model for a whole data set; see training/evaluate.py.

    `opened` gives the data set's batches: `feeds.evaluation`, or one of `feeds.evaluations`.
    `on_batch` receives each batch and the number of samples started so far. A model on another
    device, such as a moving average in host memory, is evaluated as a copy on the feeds' device.
    """
    with opened as feed:
        here = {name: _on(feeds.device, model) for name, model in models.items()}
        batches = _counted(feed, config.batch.size, len(index), on_batch)
        if config.batch.virtual_ranks:
            batches = split(batches, config.batch.virtual_ranks // feeds.world.size)
        how: dict[str, Any] = {
            "num_samples": len(index),
            "world": feeds.world,
            "device": feeds.device,
            "precision": AUTOCASTS[config.batch.precision],
            "columns": None if numbers is None else torch.tensor(numbers, device=feeds.device),
            "flip": flip,
        }
        return (evaluate if index.lists is None else score_labels)(here, batches, **how)


def _counted(
    feed: Iterable[Batch], size: int, total: int, on_batch: Callable[[Batch, int], None]
) -> Iterator[Batch]:
    for number, batch in enumerate(feed, start=1):
        on_batch(batch, min(number * size, total))
        yield batch


def _on(device: torch.device, model: nn.Module) -> nn.Module:
    found = next(model.parameters()).device
    return model if found == device else deepcopy(model).to(device)


def _open_all(
    config: RunConfig,
    question: EvaluationOptions,
    classes: Sequence[str],
    world: World,
    *,
    console: Console,
) -> list[DataSet]:
    with counter(console, "indexing samples") as progress:
        data = [
            _open(config, where, classes, world, progress=progress, every=question.all_classes)
            for where in question.data
        ]
    if world.is_first:
        warn(console, slow_paths(*(one.index for one in data)))
        warn(console, what_is_left_out(one.index for one in data))
        warn(console, trained_on(config.data, question.data))
    with together(world):
        if question.labels is not None:
            if data[0].index.lists is not None:
                raise DataError(f"--labels: {data[0].where} has lists of labels itself")
            labels = read_labels(question.labels, data[0].index)
            data[0] = replace(data[0], labels=labels)
    return data


def _other_parts(
    config: RunConfig, path: Path, question: EvaluationOptions, data: Sequence[DataSet]
) -> list[str]:
    """A remark if the run's validation part is no longer that of its training."""
    if source_of(config.data, "val").side is None or None not in question.data:
        return []
    try:
        before = read_json(RunDirectory(path.parents[1]).environment)["fingerprints"]["val"]
    except (OSError, ValueError, KeyError, TypeError):  # a checkpoint without its run
        return []
    return [
        f"{one.where}: differs from the part that validated the run, as images have changed or "
        "another release divided them: the run may have been trained on some of it"
        for where, one in zip(question.data, data, strict=True)
        if where is None and one.index.fingerprint != before
    ]


def _open(
    config: RunConfig,
    where: Locations | None,
    classes: Sequence[str],
    world: World,
    *,
    progress: Progress,
    every: bool,
) -> DataSet:
    """A data set. With `every`, all classes of the model may be predicted, not only its own."""
    if where is None:
        index = open_validation(config.data, classes, world, progress)
        return DataSet(where=str(source_of(config.data, "val")), index=index, numbers=None)
    index, numbers = open_labelled(where, classes, world, progress)
    if every:
        numbers = [*numbers, *sorted(set(range(len(classes))) - set(numbers))]
    as_they_are = numbers == list(range(len(classes)))
    name = str(Source(where, "data.val"))
    return DataSet(where=name, index=index, numbers=None if as_they_are else numbers)


def _names(path: Path, progress: dict[str, Any], ema: bool | float | None) -> list[str]:
    """Names of the weights of a checkpoint to evaluate."""
    if ema is None:
        return ["", *checkpoint.averages(path)]
    return [choose_weights(path, progress, ema)]


def _best_average(path: Path, progress: dict[str, Any]) -> str:
    """Its decay, if there are several."""
    averages = checkpoint.averages(path)
    return choose_weights(path, progress, True).partition("-")[2] if averages else ""


def _estimate(
    config: RunConfig,
    feeds: Feeds,
    models: Mapping[str, nn.Module],
    *,
    samples: int,
    console: Console,
) -> int:
    """Set batch norm statistics from `samples` training images. Returns the number used."""
    with together(feeds.world):
        if not any(map(batch_norms, models.values())):
            raise RecipeError(f"--bn-samples: {config.model.name} has no batch norm")
    with counter(console, "indexing samples") as progress:
        index = open_split(source_of(config.data, "train"), feeds.world, progress)
    with (
        counter(console, "estimating batch norm statistics", samples) as show,
        feeds.statistics(index, samples, config.data.image_size) as feed,
    ):
        return estimate_statistics(
            list(models.values()),
            _counted(feed, min(config.batch.size, samples), samples, lambda _, count: show(count)),
            world=feeds.world,
            precision=AUTOCASTS[config.batch.precision],
        )


def _result(
    data: DataSet,
    predictions: dict[str, Any],
    classes: Sequence[str],
    question: EvaluationOptions,
    *,
    best: str,
) -> DataSetResult:
    if not next(iter(predictions.values())).is_read().any():
        raise DataError(f"{data.where}: none of its {len(data.index):,} images can be read")
    numbers = range(len(classes)) if data.numbers is None else data.numbers
    return DataSetResult(
        data=data,
        classes=tuple(classes[number] for number in numbers),
        model_classes=len(classes),
        predictions=predictions,
        best_average=best,
        question=question,
    )
