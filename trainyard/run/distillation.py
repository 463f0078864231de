"""The loss of a recipe, with the teacher that it may distil from."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from trainyard.config import RunConfig, load_recipe
from trainyard.course import Course
from trainyard.errors import InputError, RecipeError
from trainyard.files import find_checkpoint
from trainyard.image_size import height_width
from trainyard.run.build import trained_model
from trainyard.training import checkpoint
from trainyard.training.distill import as_teacher
from trainyard.training.losses import build_loss
from trainyard.training.precision import AUTOCASTS
from trainyard.training.step import Loss


def build_run_loss(
    config: RunConfig, *, classes: Sequence[str], course: Course, device: torch.device
) -> Loss:
    """The loss of a recipe, with its teacher if it has one."""
    teacher = build_teacher(config, classes=classes, course=course, device=device)
    smoothing, mixes = config.augment.label_smoothing, config.augment.mixes
    return build_loss(config.loss, smoothing, teacher=teacher, mixes=mixes)


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
            teacher(torch.zeros(1, 3, *size, device=device))
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
    for key in ("mean", "std"):
        theirs, ours = getattr(recipe.data, key), getattr(config.data, key)
        if theirs != ours:
            raise RecipeError(
                f"{config.loss.teacher}: was trained with data.{key} = {list(theirs)}: set the "
                f"same here instead of {list(ours)}"
            )
