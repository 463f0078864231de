"""Images with one label each, or with lists of labels: what a recipe and other data must suit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.config import RunConfig
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets
from trainyard.data.stream.shards import Stream
from trainyard.errors import DataError, RecipeError

_OF_LISTS = ("map", "micro_f1", "macro_f1")  # values of run.best_by
_OF_SINGLE = ("top1", "balanced_accuracy", "macro_f1")


def has_lists(data: Index | Stream) -> bool:
    """True if images have lists of labels; those of a stream never do."""
    return isinstance(data, Index) and data.lists is not None


def labels_of(index: Index, num_classes: int) -> NDArray[Any]:
    """The class of each sample, int32[samples]; with lists of labels, bool[samples, classes]."""
    if index.lists is None:
        return index.label
    return index.lists.multi_hot(np.asarray(index.label), num_classes)


def check_kind(index: Index, has_lists: bool, where: str) -> None:
    """DataError unless data has lists of labels, or one label for each image, as was trained on."""
    if (index.lists is not None) != has_lists:
        given, wanted = "lists of labels", "one label for each image"
        if has_lists:
            given, wanted = wanted, given
        raise DataError(
            "data.kind-of-labels-differs",
            "{location}: has {found}, but the training data {wanted}",
            location=where,
            found=given,
            wanted=wanted,
        )


def check_labels(config: RunConfig, data: Datasets) -> None:
    """RecipeError or DataError if the recipe, or the validation data, does not suit the labels."""
    several, by = has_lists(data.train), config.run.best_by
    check_kind(data.val, several, "the validation data")
    if not several:
        if by not in _OF_SINGLE:
            raise RecipeError(
                "recipe.best-by-needs-lists",
                "run.best_by = {value!r} is for data with lists of labels: use {allowed}",
                value=by,
                allowed=" or ".join(_OF_SINGLE),
            )
        return
    loss = config.loss
    needed = {
        f"loss.name = 'bce' instead of {loss.name!r}": loss.name != "bce",
        f"run.best_by = 'map' instead of {by!r}": by not in _OF_LISTS,
        f"no data.balance instead of {config.data.balance}": config.data.balance > 0,
        "no loss.teacher": loss.teacher is not None,
    }
    wrong = [text for text, is_so in needed.items() if is_so]
    if wrong:
        raise RecipeError(
            "recipe.unfit-for-lists",
            "images with lists of labels need {hint}",
            hint=", and ".join(wrong),
        )
