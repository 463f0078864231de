"""Evaluation of a checkpoint on a data set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from trainyard.config import RunConfig
from trainyard.data.batch import BadSample
from trainyard.data.config import Locations
from trainyard.data.feeds import Feeds
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.index.real_labels import Labels, read_labels
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import (
    Source,
    open_labelled,
    open_split,
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
from trainyard.run.build import build_feeds, check_decoding
from trainyard.run.ensemble import Runs, check_unseen, combine
from trainyard.run.labels import check_kind, labels_of
from trainyard.run.model import trained_model
from trainyard.run.predict import counted, predict, shown
from trainyard.run.pretrained import NEW_CLASSES, choose_weights
from trainyard.run.temperature import Temperatures, calibrate
from trainyard.training import checkpoint
from trainyard.training.evaluate import ONE_VIEW, Views
from trainyard.training.precision import use_precision
from trainyard.training.predictions import Predictions, reassessed_top1, summary
from trainyard.training.reliability import calibration_error, wilson
from trainyard.training.weight_names import prefix_of
from trainyard.world import World, check_devices, gather, pick_device, together, with_cores

Calibrated = tuple[Temperatures, dict[str, Predictions]]
"""The temperatures of models by prefix, by which logits are divided; predictions before a fit."""

NOT_CALIBRATED: Calibrated = ({}, {})


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of an evaluation."""

    data: Locations | None = None
    """None for the recipe's own data; several locations are one data set."""
    split: Literal["train", "val"] = "val"
    """The recipe's own images to take."""
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
    others: Runs = ()
    """Further runs, which are evaluated together with the first, and alone."""


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
    options: EvaluationOptions
    unread: LeftOut
    """The images that could not be read, by reason."""
    temperatures: Temperatures = field(default_factory=dict)
    """The temperatures of the weights by prefix, where they are not 1."""
    before: dict[str, Predictions] = field(default_factory=dict)
    """The predictions before a fit of temperatures, by prefix."""
    mean: str = ""
    """What the mean of several runs, whose prefix is "mean_", is of; see Ensemble.note."""
    new_classes: tuple[str, ...] = ()
    """Classes that the initial weights of the run did not have."""

    @cached_property
    def labels(self) -> NDArray[Any]:
        """The class of each sample, or bool[samples, classes]; see labels_of."""
        return labels_of(self.data.index, len(self.classes))

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values for JSON."""
        tree: dict[str, Any] = {"data": self.data.where}
        tree |= summary(self.predictions, self.labels)
        tree["bad_reasons"] = [
            {"reason": reason, "samples": count, "file": file}
            for reason, (count, file) in self.unread.kinds.items()
        ]
        for prefix, scores in self.predictions.items():
            if isinstance(scores, Predictions):
                tree[f"{prefix}top1_interval"] = wilson(tree[f"{prefix}top1"], tree["samples"])
                tree[f"{prefix}ece"] = calibration_error(scores)
            tree |= {f"{prefix}not_finite": scores.not_finite()}
        for prefix, temperature in self.temperatures.items():
            tree[f"{prefix}temperature"] = temperature
        for prefix, scores in self.before.items():
            tree[f"{prefix}loss_before"] = scores.evaluation().loss
            tree[f"{prefix}ece_before"] = calibration_error(scores)
        tree |= {"ema_decay": float(self.best_average)} if self.best_average else {}
        tree |= {"mean": self.mean} if self.mean else {}
        tree |= {
            "classes": len(self.classes),
            "model_classes": self.model_classes,
            "flip": self.options.views.flip,
            "scales": [*self.options.views.scales],
        }
        tree |= self._apart() if self.new_classes and self.data.index.lists is None else {}
        return tree | ({"reassessed": self._reassessed()} if self.data.labels else {})

    def _apart(self) -> dict[str, Any]:
        """Top-1 of the images of classes that the initial weights had, and of the new ones."""
        new = [n for n, name in enumerate(self.classes) if name in self.new_classes]
        is_new, tree = np.isin(self.labels, new), dict[str, Any]()
        for name, chosen in (("old", ~is_new), ("new", is_new)):
            for prefix, scores in self.predictions.items():
                ranks = scores.rank_of_truth[scores.is_read() & chosen]
                tree[f"{name}_samples"] = len(ranks)
                tree[f"{prefix}{name}_top1"] = float((ranks == 1).sum()) / max(len(ranks), 1)
        return tree

    def _reassessed(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"labels": str(self.options.labels)}
        for prefix, scores in self.predictions.items():
            assert isinstance(scores, Predictions)  # _open refuses other data
            tree["samples"], tree[f"{prefix}top1"] = reassessed_top1(scores, self.data.labels or [])
        return tree


def evaluate_checkpoint(
    config: RunConfig,
    path: Path,
    options: EvaluationOptions = EvaluationOptions(),
    *,
    world: World,
    console: Console,
) -> DataSetResult:
    """Evaluate a checkpoint and its averages, every image once; all ranks call, and get all."""
    with init_distributed(world):
        device = pick_device(world := with_cores(world))
        check_devices(world, device)
        use_precision(config.batch.precision)
        with together(world):
            if options.data is None:
                check_unseen([(config, path), *options.others])
            if world.is_first:
                checkpoint.check(path)
            check_decoding(config, device)
            progress = checkpoint.read_progress(path)
            classes, has_lists = progress["classes"], progress.get("has_lists", False)
            averages, ema = checkpoint.averages(path), options.ema
            names = ["", *averages] if ema is None else [choose_weights(path, progress, ema)]
            best = choose_weights(path, progress, True).partition("-")[2] if averages else ""
        data = _open(config, options, classes, world, console=console)
        if world.is_first:
            warn(console, _remarks(config, path, options, data))
        with together(world):
            check_kind(data.index, has_lists, data.where)
        feeds, mean, calibrated = build_feeds(config, world, device), "", NOT_CALIBRATED
        if options.others:
            models, mean = _together(config, feeds, options=options, path=path, console=console)
        else:
            models, calibrated = _calibrated(
                config, feeds, data, names, options=options, path=path, console=console
            )
        scores, unread = _predicted(config, feeds, data, models, options=options, console=console)
        with together(world):
            found = _result(
                data, scores, classes, options, unread=unread, best=best, calibrated=calibrated
            )
            return replace(found, mean=mean, new_classes=tuple(_noted(path, NEW_CLASSES, [])))


def _together(
    config: RunConfig, feeds: Feeds, *, options: EvaluationOptions, path: Path, console: Console
) -> tuple[dict[str, nn.Module], str]:
    """The mean of the runs and each of them, by name, and what the mean is of."""
    runs, device = [(config, path), *options.others], feeds.device
    mean = combine(runs, ema=options.ema, world=feeds.world, device=device, console=console)
    each = {f"run-{number}": model for number, model in enumerate(mean.alone, 1)}
    return {"mean": mean.model} | each, mean.note


def evaluate_model(
    config: RunConfig,
    model: nn.Module,
    classes: Sequence[str],
    options: EvaluationOptions,
    *,
    feeds: Feeds,
    has_lists: bool,
    console: Console,
) -> DataSetResult:
    """Evaluate a model of no run, on this process alone. `feeds` makes what it takes."""
    data = _open(config, options, classes, feeds.world, console=console)
    check_kind(data.index, has_lists, data.where)
    warn(console, [*slow_paths(data.index), *what_is_left_out([data.index])])
    models = {"": model}
    scores, unread = _predicted(config, feeds, data, models, options=options, console=console)
    none: tuple[Temperatures, dict[str, Predictions]] = {}, {}
    return _result(data, scores, classes, options, unread=unread, best="", calibrated=none)


def _predicted(
    config: RunConfig,
    feeds: Feeds,
    data: DataSet,
    models: Mapping[str, nn.Module],
    *,
    options: EvaluationOptions,
    console: Console,
) -> tuple[dict[str, Any], LeftOut]:
    """The scores by prefix, and the images of all ranks that could not be read, by reason."""
    title, index, bad = f"evaluating on {data.where}", data.index, list[BadSample]()
    with shown(config, feeds, index, title=title, console=console) as batches:
        scores: dict[str, Any] = predict(
            config,
            feeds,
            counted(batches, 1, len(index), lambda batch, _: bad.extend(batch.bad)),
            {prefix_of(name): model for name, model in models.items()},
            index=index,
            numbers=data.numbers,
            views=options.views,
        )
    unread = LeftOut()
    for sample in sorted({each for of_rank in gather(feeds.world, bad) for each in of_rank}):
        unread.add(sample.reason, sample.file)
    return scores, unread


def _calibrated(
    config: RunConfig,
    feeds: Feeds,
    data: DataSet,
    names: Sequence[str],
    *,
    options: EvaluationOptions,
    path: Path,
    console: Console,
) -> tuple[dict[str, nn.Module], Calibrated]:
    """The models of a checkpoint by the names of their weights, divided by their temperatures."""
    num_classes = len(checkpoint.read_progress(path)["classes"])
    with together(feeds.world):
        models = {
            name: trained_model(config, path, num_classes, name).to(feeds.device) for name in names
        }
    by_name, before = calibrate(
        config,
        feeds,
        data.index,
        models,
        checkpoint=path,
        fit=options.temperature,
        numbers=data.numbers,
        console=console,
    )
    return models, (
        {prefix_of(name): temperature for name, temperature in by_name.items()},
        {prefix_of(name): scores for name, scores in before.items()},
    )


def _open(
    config: RunConfig,
    options: EvaluationOptions,
    classes: Sequence[str],
    world: World,
    *,
    console: Console,
) -> DataSet:
    where, numbers = options.data, None
    with counter(console, "indexing samples") as progress:
        if where is None:
            source = source_of(config.data, options.split)
            index = open_split(source, world, progress, known=classes)
        else:
            index, numbers = open_labelled(where, classes, world, progress)
    if numbers is not None and options.all_classes:
        numbers = [*numbers, *sorted(set(range(len(classes))) - set(numbers))]
    as_they_are = numbers == list(range(len(classes)))
    name = str(source_of(config.data, options.split) if where is None else Source(where, ""))
    data = DataSet(where=name, index=index, numbers=None if as_they_are else numbers)
    with together(world):
        if options.temperature and numbers is not None and len(numbers) < len(classes):
            raise InputError(
                "temperature.classes-left-out",
                "{location} has {num_found} of {num_classes} classes, and predict "
                "and export choose among all: add --all-classes, or name other data",
                location=name,
                num_found=len(numbers),
                num_classes=len(classes),
            )
        if options.labels is None:
            return data
        if index.lists is not None:
            raise DataError(
                "option.labels-beside-lists",
                "--labels: {location} has lists of labels itself",
                location=data.where,
            )
        return replace(data, labels=read_labels(options.labels, index))


def _noted(path: Path, key: str, default: Any) -> Any:
    """What the start of a run noted, of this kind; else the default, without the run too."""
    try:
        found = read_json(RunDirectory(path.parents[1]).environment)[key]
    except (OSError, ValueError, KeyError, TypeError):
        return default
    return found if isinstance(found, type(default)) else default


def _remarks(
    config: RunConfig, path: Path, options: EvaluationOptions, data: DataSet
) -> Iterator[str]:
    yield from slow_paths(data.index)
    yield from what_is_left_out([data.index])
    yield from trained_on(config.data, options.data)
    if options.data is not None or options.split == "train":
        return
    before = _noted(path, "fingerprints", {}).get("val")
    if before is not None and data.index.fingerprint != before:
        yield (
            f"{data.where}: differs from the data that validated the run, as images or the recipe "
            "have changed, or another release divided them: the run may have been trained on some"
        )


def _result(
    data: DataSet,
    predictions: dict[str, Any],
    classes: Sequence[str],
    options: EvaluationOptions,
    *,
    unread: LeftOut,
    best: str,
    calibrated: Calibrated,
) -> DataSetResult:
    if not next(iter(predictions.values())).is_read().any():
        raise DataError("data.none-readable", location=data.where, num_images=len(data.index))
    numbers = range(len(classes)) if data.numbers is None else data.numbers
    temperatures, before = calibrated
    return DataSetResult(
        data=data,
        classes=tuple(classes[number] for number in numbers),
        model_classes=len(classes),
        predictions=predictions,
        best_average=best,
        options=options,
        unread=unread,
        temperatures=temperatures,
        before=before,
    )
