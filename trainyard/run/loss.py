"""The loss of a recipe, with its class weights and the teacher that it may distil from."""

import json
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import nn

from trainyard.config import RunConfig, load_recipe
from trainyard.course import Course
from trainyard.data.augment.extra import MultiHot
from trainyard.data.index.table import Index
from trainyard.data.stream.shards import Stream
from trainyard.errors import InputError, RecipeError
from trainyard.files import find_checkpoint, sha256
from trainyard.image_size import ImageSize, height_width, num_pixels
from trainyard.model.adapt import adapt_weights
from trainyard.model.build import build_model
from trainyard.model.config import ModelConfig
from trainyard.model.weights import pretrained_weights, read_weights
from trainyard.run.model import trained_model
from trainyard.run.pretrained import choose_weights
from trainyard.training import checkpoint
from trainyard.training.config import LossConfig
from trainyard.training.losses import Loss, Teacher, as_teacher, build_loss
from trainyard.training.precision import AUTOCASTS


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


def files_of_loss(config: LossConfig) -> dict[str, str]:
    """The files that a recipe's loss is read from, by key, with their SHA-256.

    That of a checkpoint is its manifest. Weights of timm's have none.
    """
    files: dict[str, Path] = {}
    if config.teacher is not None:
        path = Path(config.teacher)
        folder = find_checkpoint(path)[1] if path.is_dir() else None
        files["loss.teacher"] = folder / "manifest.json" if folder else path
    if isinstance(config.class_weights, str) and config.class_weights != "balanced":
        files["loss.class_weights"] = Path(config.class_weights)
    return {
        key: f"{Path(*path.parts[-2:])} {sha256(path)[:12]}"
        for key, path in files.items()
        if path.is_file()
    }


def class_weights(config: LossConfig, data: Index | Stream) -> list[float] | None:
    """The weight of each class of the data; None if all are equal. RecipeError if they do not fit.

    A class without training samples has weight 1 if the weights are balanced.
    """
    value = config.class_weights
    if value == "balanced":
        assert isinstance(data, Index)  # config.py refuses it for a stream
        counts = np.bincount(data.label, minlength=len(data.classes))
        mean = counts.sum() / np.count_nonzero(counts)
        return [float(mean / count) if count else 1.0 for count in counts]
    if value is None:
        return None
    weights = _read_numbers(value) if isinstance(value, str) else list(value)
    if len(weights) != len(data.classes):
        raise RecipeError(
            "recipe.class-weights-wrong-count",
            "loss.class_weights has {num_weights} numbers, but the data {num_classes} classes: "
            "write one number for each, in the order of their names",
            num_weights=len(weights),
            num_classes=len(data.classes),
        )
    if not any(weights):
        raise RecipeError(
            "recipe.class-weights-zero",
            "loss.class_weights has 0 for every class, so that no image counts: write a number "
            "above 0 for one class at least",
        )
    return weights


def _read_numbers(path: str) -> list[float]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise RecipeError(
            "recipe.class-weights-unreadable",
            "loss.class_weights = {path!r}: cannot be read ({reason}): write 'balanced', a list, "
            "or a text file with a number in each line",
            path=path,
            reason=reason,
        ) from None
    for number, line in enumerate(lines, start=1):
        if not re.fullmatch(r"\s*\d+\.?\d*([eE][-+]?\d+)?\s*", line):
            raise RecipeError(
                "recipe.malformed-class-weight",
                "{path}, line {line}: {value!r} is no weight: write a number of at least 0 in "
                "each line",
                path=path,
                line=number,
                value=line,
            )
    return [float(line) for line in lines]


def build_teacher(
    config: RunConfig, *, classes: Sequence[str], course: Course, device: torch.device
) -> Teacher | None:
    """The teacher as a function from images to logits, with its moving average if it has one.

    RecipeError if it cannot be read, or was made for other classes or images.
    """
    location = config.loss.teacher
    if location is None:
        return None
    sizes = {phase.image_size for phase in course.phases}
    try:
        if Path(location).is_dir():
            model, description = _of_run(config, location, classes)
        else:
            model, description = _of_timm(config, location, classes, sizes)
    except InputError as error:
        if error.code.startswith("teacher."):
            raise
        raise RecipeError("teacher.unusable", "loss.teacher: {error}", error=error) from None
    teacher = as_teacher(model.to(device), AUTOCASTS[config.batch.precision])
    for height, width in sorted(map(height_width, sizes)):
        try:
            teacher(torch.zeros(1, config.data.channels, height, width, device=device))
        except (AssertionError, RuntimeError) as error:
            raise RecipeError(
                "teacher.size-not-accepted",
                "loss.teacher: {source} does not accept the student's images of {height} x "
                "{width} pixels ({reason})",
                source=description,
                height=height,
                width=width,
                reason=str(error),
            ) from None
    return teacher


def _of_run(config: RunConfig, location: str, classes: Sequence[str]) -> tuple[nn.Module, str]:
    """The model of a run or checkpoint, and a description."""
    folder, path = find_checkpoint(Path(location))
    recipe = load_recipe(str(folder / "recipe.toml"))
    checkpoint.check(path)
    progress = checkpoint.read_progress(path)
    known = progress["classes"]
    for number, (theirs, ours) in enumerate(zip_longest(known, classes)):
        if theirs != ours:
            raise RecipeError(
                "teacher.class-differs",
                "loss.teacher: {path}: its class {number} is {found!r}, the data's is {wanted!r}; "
                "names and order must be the same",
                path=location,
                number=number,
                found=theirs,
                wanted=ours,
            )
    data = recipe.data
    keys = ("channels", "bands", "range", "background", "mean", "std")
    theirs = {key: getattr(data, key) for key in keys}
    _check_pixels(config, location, **theirs)
    weights = choose_weights(path, progress, True if checkpoint.averages(path) else None)
    model = trained_model(recipe, path, len(known), weights)
    return model, f"{recipe.model.name} in {path}"


def _of_timm(
    config: RunConfig, location: str, classes: Sequence[str], sizes: set[ImageSize]
) -> tuple[nn.Module, str]:
    """A timm model with pretrained weights, or those of a file, and a description.

    Only the number of classes is known of timm's weights: their order is that of ImageNet's.
    """
    import timm

    is_file, name = Path(location).is_file(), config.loss.teacher_model or location
    if is_file and config.loss.teacher_model is None:
        raise RecipeError(
            "teacher.without-model",
            "loss.teacher: {path} is a file of weights: name its model with loss.teacher_model",
            path=location,
        )
    if not is_file and not timm.is_model(location):
        raise RecipeError(
            "teacher.not-found",
            "loss.teacher: {value}: neither a run directory nor a checkpoint, nor a file, nor a "
            "model of timm",
            value=location,
        )
    largest = max(sizes, key=num_pixels)
    model = build_model(
        ModelConfig(name=name, channels_last=config.model.channels_last),
        num_classes=len(classes),
        image_size=largest,
        other_sizes=sizes - {largest},
        channels=config.data.channels,
    )
    if is_file:
        source = read_weights(Path(location))
    else:
        cfg = timm.get_pretrained_cfg(location)
        if cfg is not None:
            _check_pixels(config, location, mean=cfg.mean, std=cfg.std)
        source = pretrained_weights(location, key="loss.teacher", value=location)
    _, reason = adapt_weights(model, source, classes=classes, name=name)
    if reason is not None:
        raise RecipeError(
            "teacher.classifier-unusable",
            "loss.teacher: {value}: its classifier cannot teach: {reason}",
            value=location,
            reason=reason,
        )
    return model, source.description


def _check_pixels(config: RunConfig, location: str, **theirs: object) -> None:
    """RecipeError if the images of the student differ in a key of [data]."""
    for key, value in theirs.items():
        ours = getattr(config.data, key)
        if value != ours:
            raise RecipeError(
                "teacher.pixels-differ",
                "loss.teacher: {value}: was trained with {key} = {found}: set the same here "
                "instead of {wanted}",
                value=location,
                key=f"data.{key}",
                found=json.dumps(value),
                wanted=json.dumps(ours),
            )
