"""A function of the user's own on batches: `augment.extra`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainyard.data.batch import Batch, Keys
from trainyard.data.index.label_lists import LabelLists
from trainyard.data.rng import EXTRA, fold_in
from trainyard.errors import RecipeError
from trainyard.own_code import as_recipe_error, imported
from trainyard.world import seed_generators

KEY = "augment.extra"
Targets = Callable[[Tensor], Tensor]


class Extra:
    """Calls function(images, labels, generator) -> images on a rank's batch.

    The generator, and the global ones of Python, NumPy and torch, are seeded by (seed, position,
    rank) for each batch, so a replay is exact. RecipeError unless the result has the shape, dtype
    and device of the images. The labels are class numbers, int64[B]; of lists of labels, what
    `multi_hot` makes of the numbers of lists: float32[B, classes].
    """

    def __init__(
        self, name: str, *, seed: int, rank: int, multi_hot: Targets | None = None
    ) -> None:
        self._multi_hot = multi_hot
        self._name, self._seed, self._rank = name, seed, rank
        self._function: Callable[..., Any] = imported(KEY, name)

    def __call__(self, batch: Batch, keys: Keys) -> Batch:
        parts = (np.array([part]) for part in (EXTRA, keys.position, self._rank))
        seed = int(fold_in(self._seed, *parts)[0])
        images_BCHW = batch.images_BCHW
        generator = torch.Generator(images_BCHW.device).manual_seed(seed)
        seed_generators(seed, images_BCHW.device)  # for libraries that take no generator
        looks = _looks(images_BCHW)
        labels = batch.labels if self._multi_hot is None else self._multi_hot(batch.labels)
        changed = self._function(images_BCHW, labels, generator)
        if not isinstance(changed, Tensor):
            raise RecipeError(
                "function.wrong-type",
                key=KEY,
                value=self._name,
                type=type(changed).__name__,
                wanted="the images",
            )
        if _looks(changed) != looks:
            raise RecipeError(
                "function.wrong-images",
                "{key} = {value!r} returns {found}: return images as it gets them, {wanted}",
                key=KEY,
                value=self._name,
                found=_looks(changed),
                wanted=looks,
            )
        return replace(batch, images_BCHW=changed)


def check_extra(
    name: str,
    *,
    shape: tuple[int, int, int],
    num_classes: int,
    device: torch.device,
    has_lists: bool = False,
) -> None:
    """RecipeError if a function cannot be imported, fails on two grey images, or misbehaves.

    `shape`: channels, height and width of an image.
    """
    ids = torch.arange(2)
    labels = (ids % num_classes).to(device)
    batch = Batch(
        ids=ids,
        epochs=torch.zeros_like(ids),
        labels=labels,
        weights=torch.ones(2, device=device),
        images_BCHW=torch.zeros(2, *shape, device=device),
        mixed_labels=labels,
        lam=torch.ones(2, device=device),
    )
    targets = torch.zeros(2, num_classes if has_lists else 0, device=device)
    multi_hot = (lambda _: targets) if has_lists else None
    extra = Extra(name, seed=0, rank=0, multi_hot=multi_hot)
    with as_recipe_error(KEY, name):
        extra(batch, Keys(ids.numpy(), ids.numpy(), 0))


def _looks(images: Tensor) -> str:
    return f"{str(images.dtype).removeprefix('torch.')}{list(images.shape)} on {images.device}"


class MultiHot:
    """Turns numbers of lists, int64[B], into targets, float32[B, classes]: 1 for each label.

    The lists lie on the device: 8 bytes for each image and 4 for each label. A call waits for
    nothing, as every batch has as many places for labels per image as the longest list needs.
    """

    def __init__(self, lists: LabelLists, num_classes: int, device: torch.device) -> None:
        starts = np.concatenate([[0], lists.ends])
        values = np.append(lists.values, np.int32(num_classes))  # never empty
        self._starts = torch.from_numpy(starts).to(device)
        self._values = torch.from_numpy(values).to(device)
        self._offsets = torch.arange(int(np.diff(starts).max(initial=0)), device=device)
        self._num_classes = num_classes

    def __call__(self, numbers: Tensor) -> Tensor:
        positions = self._starts[numbers][:, None] + self._offsets
        is_label = positions < self._starts[numbers + 1][:, None]
        labels = self._values[positions.clamp(max=len(self._values) - 1)].long()
        labels = labels.where(is_label, self._num_classes)  # a column for places without a label
        targets = torch.zeros(len(numbers), self._num_classes + 1, device=numbers.device)
        return targets.scatter_(1, labels, 1.0)[:, : self._num_classes]
