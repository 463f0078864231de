"""The loss of a recipe, with its class weights and the teacher that it may distil from."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainyard.config import RunConfig, load_recipe
from trainyard.course import Course
from trainyard.data.device.multi_hot import MultiHot
from trainyard.data.index.table import Index
from trainyard.data.stream.shards import Stream
from trainyard.errors import InputError, RecipeError
from trainyard.files import find_checkpoint
from trainyard.image_size import height_width
from trainyard.run.build import trained_model
from trainyard.training import checkpoint
from trainyard.training.config import LossConfig
from trainyard.training.distill import as_teacher
from trainyard.training.losses import build_loss
from trainyard.training.precision import AUTOCASTS
from trainyard.training.step import Loss


def build_run_loss(
    config: RunConfig, data: Index | Stream, *, course: Course, device: torch.device
) -> Loss:
    """The loss of a recipe for its training data, with its teacher if it has one."""
    teacher = build_teacher(config, classes=data.classes, course=course, device=device)
    weights = class_weights(config.loss, data)
    multi_hot = None
    if isinstance(data, Index) and data.lists is not None:
        multi_hot = MultiHot(data.lists, len(data.classes), device)
    return build_loss(
        config.loss,
        config.augment.label_smoothing,
        teacher=teacher,
        mixes=config.augment.mixes,
        class_weights=None if weights is None else torch.tensor(weights, device=device),
        multi_hot=multi_hot,
    )


def class_weights(config: LossConfig, data: Index | Stream) -> list[float] | None:
    """The weight of each class of the data; None if all are equal. RecipeError if they do not fit.

    A class without training samples has weight 1 if the weights are balanced.
    """
    asked = config.class_weights
    if asked == "balanced":
        assert isinstance(data, Index)  # config.py refuses it for a stream
        counts = np.bincount(data.label, minlength=len(data.classes))
        mean = counts.sum() / np.count_nonzero(counts)
        return [float(mean / count) if count else 1.0 for count in counts]
    if asked is None:
        return None
    weights = _read_numbers(asked) if isinstance(asked, str) else list(asked)
    if len(weights) != len(data.classes):
        raise RecipeError(
            f"loss.class_weights has {len(weights)} numbers, but the data {len(data.classes)} "
            "classes: write one number for each, in the order of their names"
        )
    return weights


def _read_numbers(path: str) -> list[float]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise RecipeError(
            f"loss.class_weights = {path!r}: cannot be read ({reason}): write 'balanced', a list, "
            "or a text file with a number in each line"
        ) from None
    for number, line in enumerate(lines, start=1):
        if not re.fullmatch(r"\s*\d+\.?\d*([eE][-+]?\d+)?\s*", line):
            raise RecipeError(
                f"{path}, line {number}: {line!r} is no weight: write a number of at least 0 in "
                "each line"
            )
    return [float(line) for line in lines]


def build_teacher(
    config: RunConfig, *, classes: Sequence[str], course: Course, device: torch.device
) -> Callable[[Tensor], Tensor] | None:
    """The teacher as a function from images to logits, with its moving average if it has one.

    RecipeError if it cannot be read, or was made for other classes or images.
    """
    if config.loss.teacher is None:
        return None
    try:
        folder, path = find_checkpoint(Path(config.loss.teacher))
        recipe = load_recipe(str(folder / "recipe.toml"))
        checkpoint.check(path)
        known = checkpoint.read_progress(path)["classes"]
        _check_teacher(config, recipe, classes=classes, known=known)
        model = trained_model(recipe, path, len(known), ema=checkpoint.has_ema(path))
    except InputError as error:
        raise RecipeError(f"loss.teacher: {error}") from None
    teacher = as_teacher(model.to(device), AUTOCASTS[config.batch.precision])
    for size in sorted({height_width(phase.image_size) for phase in course.phases}):
        try:
            teacher(torch.zeros(1, config.data.channels, *size, device=device))
        except (AssertionError, RuntimeError) as error:
            raise RecipeError(
                f"loss.teacher: {recipe.model.name} in {path} does not accept the student's images "
                f"of {size[0]} x {size[1]} pixels ({error})"
            ) from None
    return teacher


def _check_teacher(
    config: RunConfig, recipe: RunConfig, *, classes: Sequence[str], known: Sequence[str]
) -> None:
    for number, (theirs, ours) in enumerate(zip_longest(known, classes)):
        if theirs != ours:
            raise RecipeError(
                f"{config.loss.teacher}: its class {number} is {theirs!r}, the data's is {ours!r}; "
                "names and order must be the same"
            )
    for key in ("channels", "mean", "std"):
        theirs, ours = (json.dumps(getattr(each.data, key)) for each in (recipe, config))
        if theirs != ours:
            raise RecipeError(
                f"{config.loss.teacher}: was trained with data.{key} = {theirs}: set the same here "
                f"instead of {ours}"
            )
