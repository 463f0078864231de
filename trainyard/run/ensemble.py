"""Several runs as one model: the mean of their weights, or of their probabilities.

The mean of weights is that of Wortsman et al. 2022, "Model soups": it costs no more than one run.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from trainyard.config import RunConfig
from trainyard.data.open_datasets import open_split, source_of
from trainyard.errors import CheckpointError, DataError
from trainyard.model.config import PIXELS
from trainyard.monitor.history import METRICS
from trainyard.monitor.progress import counter
from trainyard.run.build import build_feeds
from trainyard.run.labels import labels_of
from trainyard.run.model import trained_model
from trainyard.run.predict import predict, shown
from trainyard.run.pretrained import choose_weights
from trainyard.run.temperature import divide, load_temperatures
from trainyard.training import checkpoint
from trainyard.training.evaluate import mean_logits
from trainyard.training.predictions import summary
from trainyard.world import World, together

Runs = Sequence[tuple[RunConfig, Path]]
"""The recipes of runs, with overrides, and their checkpoints."""


class Vote(nn.Module):
    """The mean of the probabilities of models, as logits."""

    def __init__(self, models: Sequence[nn.Module], *, has_lists: bool) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self._has_lists = has_lists

    def forward(self, images_BCHW: Tensor) -> Tensor:
        each = [model(images_BCHW).float() for model in self.models]
        return mean_logits(each, has_lists=self._has_lists)


@dataclass(frozen=True)
class Ensemble:
    model: nn.Module
    alone: list[nn.Module]
    """The model of each run."""
    of: Literal["weights", "probabilities"]
    reason: str
    """What the mean of weights is worth on the validation images, or why there is none."""

    @property
    def note(self) -> str:
        """A line for users."""
        return f"the mean of the {self.of} of {len(self.alone)} runs: {self.reason}"


def combine(
    runs: Runs, *, ema: bool | float | None, world: World, device: torch.device, console: Console
) -> Ensemble:
    """The mean of weights, if runs share their start and validation images, and it is not worse
    than the best run there; else that of probabilities. All ranks call.

    Each run has its weights by `choose_weights`, and its temperature. CheckpointError for runs of
    different classes or pictures.
    """
    with together(world):
        states = [_checked(*run) for run in runs]
        for one, run in zip(states[1:], runs[1:], strict=True):
            _check_same(states[0], one, runs[0][1], run[1])
        models = [_model(*run, ema, device) for run in runs]
    has_lists = states[0]["lists of labels"]
    vote = Ensemble(Vote(models, has_lists=has_lists), models, "probabilities", _apart(runs))
    if vote.reason:
        return vote
    mean = mean_of_weights(models)
    by, classes = states[0]["metric"], states[0]["classes"]
    everyone = {"": mean} | {f"{number}": model for number, model in enumerate(models)}
    try:
        values = _validated(
            runs[0][0], everyone, by=by, classes=classes, world=world, console=console
        )
    except DataError as error:
        return Ensemble(vote.model, models, "probabilities", f"no validation images: {error}")
    first, *others = values
    figures = f"{METRICS[by]} {first:.2%} on the validation images, the best run {max(others):.2%}"
    if first >= max(others):
        return Ensemble(mean, models, "weights", figures)
    return Ensemble(vote.model, models, "probabilities", f"that of the weights has {figures}")


def _checked(config: RunConfig, path: Path) -> dict[str, Any]:
    """What runs that are taken together have in common, by names for a message, and the metric."""
    checkpoint.check(path)
    progress, data = checkpoint.read_progress(path), config.data
    pixels = {f"data.{key}": getattr(data, key) for key in (*PIXELS, "channels", "exif")}
    return {
        "classes": list(progress["classes"]),
        "lists of labels": progress.get("has_lists", False),
        "image size": data.eval_size or data.image_size,
        **pixels,
        "metric": progress.get("best_by", "top1"),
    }


def _check_same(
    one: Mapping[str, Any], other: Mapping[str, Any], path: Path, other_path: Path
) -> None:
    for what in (name for name in one if name != "metric" and one[name] != other[name]):
        found, wanted = (_shown(each[what]) for each in (other, one))
        raise CheckpointError(
            "ensemble.runs-differ",
            "{path}: {what} {found}, and {first}: {wanted}; runs are taken together that have the "
            "same classes and pictures",
            path=other_path,
            first=path,
            what=what,
            found=found,
            wanted=wanted,
        )


def _shown(value: Any) -> str:
    return f"{', '.join(value[:3])} … ({len(value):,})" if isinstance(value, list) else f"{value}"


def _model(
    config: RunConfig, path: Path, ema: bool | float | None, device: torch.device
) -> nn.Module:
    progress = checkpoint.read_progress(path)
    weights = choose_weights(path, progress, ema)
    model = trained_model(config, path, len(progress["classes"]), weights).to(device).eval()
    divide(model, load_temperatures(path).get(weights, 1.0))
    return model


def check_unseen(runs: Runs) -> None:
    """CheckpointError if the validation images of the first run may have trained another."""
    if _differ_in_validation(runs):
        raise CheckpointError(
            "ensemble.seen-images",
            "{path}: was validated on other images than the other runs, which were trained on its "
            "own, as in a cross-validation: name images that no run has seen, --data LOCATION",
            path=runs[0][1],
        )


def _differ_in_validation(runs: Runs) -> bool:
    return len({source_of(config.data, "val") for config, _ in runs}) > 1


def _apart(runs: Runs) -> str:
    """Why the mean of weights is not tried; "" if it is."""
    if _differ_in_validation(runs):
        return "each was validated on other images"
    starts = [
        (model.name, model.options, model.checkpoint, model.checkpoint_key, run.resume)
        + ((run.seed,) if model.checkpoint is None else ())
        for model, run in ((config.model, config.run) for config, _ in runs)
    ]
    return "they do not share their start" if any(s != starts[0] for s in starts) else ""


def mean_of_weights(models: Sequence[nn.Module]) -> nn.Module:
    """A model whose floating-point tensors are the means of those of models; others the first's."""
    mean = deepcopy(models[0])
    states = [model.state_dict() for model in models]
    for name, tensor in mean.state_dict().items():
        if tensor.is_floating_point():
            parts = torch.stack([state[name].double() for state in states])
            tensor.copy_(parts.mean(dim=0))  # the model's own memory
    return mean


def _validated(
    config: RunConfig,
    models: Mapping[str, nn.Module],
    *,
    by: str,
    classes: Sequence[str],
    world: World,
    console: Console,
) -> list[float]:
    """The metric of each model on the validation images of the recipe."""
    device = next(next(iter(models.values())).parameters()).device
    feeds = build_feeds(config, world, device)
    with counter(console, "indexing samples") as progress:
        index = open_split(source_of(config.data, "val"), world, progress, known=classes)
    with shown(config, feeds, index, title="validating the mean", console=console) as batches:
        scores = predict(config, feeds, batches, models, index=index)
    values = summary(scores, labels_of(index, len(classes)))
    return [float(values[f"{name}{by}"]) for name in models]
