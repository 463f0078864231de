"""Predictions of models for a whole data set, as the recipe of a run has it read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from rich.console import Console
from torch import nn

from trainyard.config import RunConfig
from trainyard.data.batch import Batch
from trainyard.data.device.feed import split
from trainyard.data.feeds import Feeds
from trainyard.data.index.table import Index
from trainyard.monitor.progress import counter
from trainyard.training.evaluate import ONE_VIEW, Evaluator, Views
from trainyard.training.label_scores import LabelScores
from trainyard.training.precision import AUTOCASTS
from trainyard.training.predictions import Predictions


def predict(
    config: RunConfig,
    feeds: Feeds,
    batches: Iterable[Batch],
    models: Mapping[str, nn.Module],
    *,
    index: Index,
    numbers: Sequence[int] | None = None,
    views: Views = ONE_VIEW,
) -> dict[str, Predictions] | dict[str, LabelScores]:
    """Predictions of each model for all samples of an index, whose batches are given.

    A model on another device, such as a moving average in host memory, is evaluated as a copy on
    the feeds' device.
    """
    placed = {name: on_device(feeds.device, model) for name, model in models.items()}
    if config.batch.virtual_ranks:
        batches = split(batches, config.batch.virtual_ranks // feeds.world.size)
    evaluator = evaluator_of(config, feeds, index, numbers=numbers, views=views)
    if index.lists is None:
        return evaluator.predictions(placed, batches)
    return evaluator.label_scores(placed, batches)


def evaluator_of(
    config: RunConfig,
    feeds: Feeds,
    index: Index,
    *,
    numbers: Sequence[int] | None,
    views: Views = ONE_VIEW,
) -> Evaluator:
    """The evaluator of a data set. `numbers`: indices of the logits to keep; None for all."""
    return Evaluator(
        num_samples=len(index),
        world=feeds.world,
        device=feeds.device,
        precision=AUTOCASTS[config.batch.precision],
        columns=None if numbers is None else torch.tensor(numbers, device=feeds.device),
        views=views,
    )


def on_device(device: torch.device, model: nn.Module) -> nn.Module:
    """The model, or a copy of it on the device."""
    current = next(model.parameters()).device
    return model if current == device else deepcopy(model).to(device)


@contextmanager
def shown(
    config: RunConfig, feeds: Feeds, index: Index, *, title: str, console: Console
) -> Iterator[Iterator[Batch]]:
    """Inside, the batches of an index, which a line on the console counts."""
    with counter(console, title, len(index)) as show, feeds.evaluation(index) as feed:
        yield counted(feed, config.batch.size, len(index), lambda _, count: show(count))


def counted(
    feed: Iterable[Batch], size: int, total: int, on_batch: Callable[[Batch, int], None]
) -> Iterator[Batch]:
    """The batches; `on_batch` gets each before, with the number of samples started so far."""
    for number, batch in enumerate(feed, start=1):
        on_batch(batch, min(number * size, total))
        yield batch
