"""Temperature scaling: logits are divided by a number, so that confidence is the share of hits.

It is fitted on validation data (Guo et al. 2017, "On Calibration of Modern Neural Networks"), lies
beside the weights, temperature.json of a checkpoint, and becomes part of the classifier layer.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from trainyard.config import RunConfig
from trainyard.data.feeds import Feeds
from trainyard.data.index.table import Index
from trainyard.errors import CheckpointError, DataError, InputError
from trainyard.files import read_json, write_text
from trainyard.image_size import height_width
from trainyard.model.adapt import classifier_keys
from trainyard.run.predict import evaluator_of, shown
from trainyard.training.evaluate import predictions_of
from trainyard.training.label_scores import LabelScores
from trainyard.training.predictions import Predictions
from trainyard.world import together

_FILE = "temperature.json"
_LOW, _HIGH = 0.05, 20.0
_STEPS = 24  # of bisection: the temperature is exact to a part in a million

Temperatures = dict[str, float]
"""By the name of the weights; see averages.py."""


def load_temperatures(checkpoint: Path) -> Temperatures:
    """The temperatures of a checkpoint, {} if none was fitted; CheckpointError if damaged."""
    path = checkpoint / _FILE
    if not path.exists():
        return {}
    try:
        temperatures = {name: float(value) for name, value in read_json(path).items()}
        if not all(_LOW <= value <= _HIGH for value in temperatures.values()):
            raise ValueError(f"a temperature is not between {_LOW} and {_HIGH:g}")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            "temperature.damaged",
            "{path}: {reason}: trainyard calibrate RUN --remove deletes it, to be fitted again",
            path=path,
            reason=str(error),
        ) from None
    return temperatures


def save_temperatures(checkpoint: Path, temperatures: Temperatures) -> None:
    """Keep them in a checkpoint, beside those of other weights; without any, remove all.

    InputError if that fails.
    """
    path = checkpoint / _FILE
    try:
        if not temperatures:
            path.unlink(missing_ok=True)
            return
        write_text(path, json.dumps(load_temperatures(checkpoint) | temperatures))
    except OSError as error:
        raise InputError("file.unwritable", path=path, reason=error.strerror) from None


def divide(model: nn.Module, temperature: float) -> None:
    """Make a model's logits those of before, divided by the temperature."""
    weights = model.state_dict()
    for key in classifier_keys(model) if temperature != 1 else ():
        if weights[key].is_floating_point():  # not a batch norm's count of batches
            weights[key].div_(temperature)  # the model's own memory


def calibrate(
    config: RunConfig,
    feeds: Feeds,
    index: Index,
    models: Mapping[str, nn.Module],
    *,
    checkpoint: Path,
    fit: bool | None,
    numbers: Sequence[int] | None,
    console: Console,
) -> tuple[Temperatures, dict[str, Predictions]]:
    """Divide the logits of models, weights of a checkpoint by name, by their temperatures.

    `fit`: True fits and keeps them, False removes those that are kept, None takes those. `numbers`
    are the logits to keep, None for all. The predictions are those before a fit. All ranks call.
    """
    world = feeds.world
    with together(world):
        if fit is False and world.is_first:
            save_temperatures(checkpoint, {})
        temperatures = {} if fit is False else load_temperatures(checkpoint)
        for model in models.values() if fit else ():
            _check_linear(config, model, feeds.device)
        if fit and index.lists is not None:
            raise InputError(
                "temperature.label-lists",
                "a temperature is for images with one label each, and these have lists of labels",
            )
    before = {}
    if fit:
        scores = _scores(config, feeds, index, models, numbers=numbers, console=console)
        labels = torch.from_numpy(np.asarray(index.label, np.int64))
        for name in models:
            before[name] = predictions_of(scores[name], labels, temperatures.get(name, 1.0))
        temperatures = {name: best_temperature(scores[name], labels) for name in models}
        with together(world):
            if world.is_first:
                save_temperatures(checkpoint, temperatures)
    temperatures = {name: temperatures[name] for name in models if name in temperatures}
    for name, temperature in temperatures.items():
        divide(models[name], temperature)
    return temperatures, before


def _scores(
    config: RunConfig,
    feeds: Feeds,
    index: Index,
    models: Mapping[str, nn.Module],
    *,
    numbers: Sequence[int] | None,
    console: Console,
) -> dict[str, LabelScores]:
    """The logits of models. DataError if no image can be read."""
    evaluator = evaluator_of(config, feeds, index, numbers=numbers)
    title = "fitting the temperature"
    with shown(config, feeds, index, title=title, console=console) as batches:
        scores = evaluator.label_scores(models, batches)
    with together(feeds.world):
        if not any(each.read.any() for each in scores.values()):
            raise DataError("data.none-readable", location=index.root, num_images=len(index))
    return scores


def best_temperature(scores: LabelScores, labels: Tensor) -> float:
    """The temperature with the lowest mean cross-entropy, by bisection of its derivative.

    That of a model without errors would be 0: its targets are smoothed by 1 / (n + 2), as in Platt
    1999, and its temperature is 1 at most, so that no loss rises. `labels`: int64[samples].
    """
    logits_NC = torch.from_numpy(scores.logits).T
    chosen = torch.from_numpy(scores.read) & logits_NC.isfinite().all(dim=1)
    logits_NC, labels = logits_NC[chosen], labels[chosen]
    if not len(labels):
        return 1.0
    own_N = logits_NC.gather(1, labels[:, None])[:, 0]
    has_errors = bool((own_N < logits_NC.amax(dim=1)).any())
    smoothing = 0 if has_errors else 1 / (len(labels) + 2)
    wanted = ((1 - smoothing) * own_N + smoothing * logits_NC.mean(dim=1)).double().mean()
    low, high, middle = _LOW, _HIGH if has_errors else 1.0, 1.0
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        mean = ((logits_NC / middle).softmax(dim=1) * logits_NC).sum(dim=1).double().mean()
        low, high = (middle, high) if bool(mean > wanted) else (low, middle)
    return round(middle, 4)


def _check_linear(config: RunConfig, model: nn.Module, device: torch.device) -> None:
    """InputError unless dividing the classifier's tensors divides the logits."""
    size = height_width(config.data.eval_size or config.data.image_size)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, config.data.channels, *size, generator=generator).to(device)
    divided = deepcopy(model).eval()
    with torch.no_grad():
        before = divided(image)
        divide(divided, 2.0)
        if not torch.allclose(2 * divided(image), before, rtol=1e-3, atol=1e-4):
            raise InputError(
                "temperature.not-linear",
                "the logits of {name} do not scale with its classifier, so a "
                "temperature cannot become part of it",
                name=config.model.name,
            )
