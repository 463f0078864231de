"""Trainyard's data path in anyone's training loop.

    from trainyard.torch import loader

    train = loader("data/digits", batch_size=64, image_size=32, flip=0.0)
    val = loader("data/digits", batch_size=256, image_size=32, train=False)
    for epoch in range(8):
        train.set_epoch(epoch)
        for images, labels in train: ...

`docs/any-loop.md` shows where it goes in the loops of other libraries.
"""

import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainyard.config import RunConfig, on_data, override, unknown_key
from trainyard.course import Course, Phase
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.extra import MultiHot
from trainyard.data.batch import BadSample, Batch
from trainyard.data.config import DataConfig
from trainyard.data.device import gpu_decode
from trainyard.data.device.feed import EvaluationFeeds
from trainyard.data.feeds import Feeds
from trainyard.data.index.learnable import check_learnable
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import (
    Datasets,
    open_split,
    source_of,
    what_is_left_out,
    what_is_lost,
)
from trainyard.data.order import training_plan
from trainyard.data.sampler.plan import EvenPassPlan, OnePassPlan
from trainyard.data.storage.source import Closing
from trainyard.distributed import discover
from trainyard.errors import DataError, InputError, RecipeError
from trainyard.monitor.progress import counter
from trainyard.monitor.quarantine import most_bad
from trainyard.monitor.terminal import console_of
from trainyard.printable import printable
from trainyard.run.depth import measure, with_range
from trainyard.training.losses import Loss, targets_of
from trainyard.world import World, together, with_cores

StrPath = str | os.PathLike[str]
Locations = StrPath | Sequence[StrPath]
Bad = Literal["drop", "weigh", "raise"]
_ENDLESS = 10**14  # steps
_SHOWN = 5  # unreadable images that are warned of one by one
_NOT_HERE = ("train", "val", "samples", "extra")  # keys whose place another argument takes


def loader(  # noqa: PLR0913  # what a loop decides, which no recipe says
    location: Locations,
    batch_size: int,
    *,
    train: bool = True,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    classes: Sequence[str] | None = None,
    bad: Bad = "drop",
    rank: int | None = None,
    world_size: int | None = None,
    **keys: Any,
) -> "TorchLoader":
    """Batches (images, labels) of a data set in any format that Trainyard reads.

    `location` is a data set, its train or val part, or several data sets. `train`: random crops,
    flips and the augmentations of the keys, shuffled; else each image of the validation data, or of
    data without parts, once and in order. `batch_size`: images of this rank in a batch. `keys` are
    those of a recipe's sections data and augment: image_size=224, val_share=0.1, randaugment="…",
    mixup=0.2, stage="/scratch", mean=(0.5, 0.5, 0.5), …

    Images are `dtype`[B, C, H, W] on `device`, normalised, or pixels from 0 to 255 with
    torch.uint8. Labels are int64[B], numbers of `dataset.classes`, which are the training data's
    or `classes`; with mixup, cutmix, label_smoothing or lists of labels float32[B, classes], as
    cross_entropy and binary_cross_entropy_with_logits take them.

    An image that cannot be read is counted in `num_bad` and warned of: "drop" leaves it out of its
    batch, "weigh" makes batches (images, labels, weights), in which it is black and weighs 0, and
    "raise" raises a DataError, as more of them than `max_bad` do.

    Ranks are those of torch.distributed, or else of the launcher's variables; they open the data
    together. With `rank` and `world_size` each opens them by itself. RecipeError and DataError for
    wrong keys and data.
    """
    overrides = _overrides(keys)
    config = _config(overrides | {"run.seed": seed, "batch.size": batch_size}, dtype, bad)
    world, opening = _worlds(rank, world_size)
    locations = [location] if isinstance(location, str | os.PathLike) else location
    with together(opening):
        config = on_data(config, [os.fspath(one) for one in locations], overrides, may_share=True)
    index = _open(config, opening, train=train, classes=classes)
    depth = measure(config, Datasets(index, index), opening, is_new=True)
    config = with_range(config, depth, is_new=True)
    feeds = Feeds(
        data=config.data,
        augment=config.augment if train else AugmentConfig(),
        global_batch=batch_size * world.size,
        seed=seed,
        channels_last=channels_last,
        world=world,
        device=torch.device(device),
        dtype=dtype,
    )
    if config.data.decode == "gpu":
        gpu_decode.check(feeds.device)
    return (TrainingLoader if train else EvaluationLoader)(feeds, index, bad)


class Dataset:
    """The attributes of a data set that other code reads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        """Files, offsets and labels: `index.locate(i)` gives the file of image i."""
        self.classes = list(index.classes)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def targets(self) -> NDArray[np.int32]:
        """The label of each image: int32[images]; with lists of labels the number of its list."""
        return self.index.label


class TorchLoader(Closing):
    """The base of both loaders: attributes of a DataLoader, and a clean end."""

    drop_last = False
    num_workers = 0  # the loader reads in a process of its own, whatever others ask for
    batch_sampler = None  # timm's train.py and Lightning ask for it; epochs go to `sampler`

    def __init__(self, feeds: Feeds, index: Index, bad: Bad) -> None:
        self.batch_size = feeds.global_batch // feeds.world.size
        self.dataset = Dataset(index)
        self.data: DataConfig = feeds.data
        """The keys of the data, with the range of "auto" as it was measured."""
        self.num_bad = 0
        """Images of this rank that could not be read, each counted once."""
        self._feeds, self._index, self._bad = feeds, index, bad
        self._seen_bad = set[int]()
        self._turn = 0
        self._soft = _soft_targets(feeds, index)
        self._open, self._process = ExitStack(), os.getpid()
        self._end = weakref.finalize(self, _close_here, self._open, self._process)

    @property
    def sampler(self) -> Self:
        """Itself, for loops that call `loader.sampler.set_epoch`."""
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]: ...

    def close(self) -> None:
        """Ends the loader's process; so do the end of the program and of the last reference."""
        self._end()

    def __reduce__(self) -> Any:
        raise InputError(
            "loader.no-copy",
            "a loader holds a process and cannot be copied or pickled: make another one, and give "
            "it state_dict()",
        )

    def _begin(self) -> int:
        self._turn += 1
        self._check(self._turn)
        return self._turn

    def _check(self, turn: int) -> None:
        """InputError unless this iteration may read on."""
        if os.getpid() != self._process:
            raise InputError(
                "loader.other-process",
                "the loader was made before this process was forked, and its batches are those of "
                "the other: make it here; with a DataLoader around it, num_workers=0",
            )
        if not self._end.alive:
            raise InputError("loader.closed", "the loader is closed: make another one")
        if turn != self._turn:
            raise InputError(
                "loader.two-iterators",
                "another iteration of this loader has begun since: make a second loader for two "
                "at a time",
            )

    def _given(self, batch: Batch) -> tuple[Tensor, ...]:
        """The tensors of a batch, without those of unreadable images, or with their weights."""
        tensors = batch.images_BCHW, self._targets(batch)
        if batch.bad:
            self._count(batch.bad)
        if self._bad == "weigh":
            return *tensors, batch.weights
        if not batch.bad:
            return tensors
        kept = batch.weights > 0
        if not kept.any():
            raise DataError(
                "loader.batch-of-bad",
                "all {count} images of a batch are unreadable: {file}, for one; take larger "
                "batches, or bad='weigh'",
                count=len(kept),
                file=batch.bad[0].file,
            )
        return tuple(tensor[kept] for tensor in tensors)

    def _targets(self, batch: Batch) -> Tensor:
        if self._soft is None:
            return batch.labels
        return self._soft(batch.lam.new_empty(len(batch.ids), len(self.dataset.classes)), batch)

    def _count(self, bad: Sequence[BadSample]) -> None:
        """Warns of unreadable images. DataError for one too many."""
        most = most_bad(self.data.max_bad, len(self._index))
        for one in bad:
            if self._bad == "raise" or (one.id not in self._seen_bad and self.num_bad >= most):
                raise DataError(
                    "loader.bad-sample",
                    "{file}: {reason}; {count} of {total:,} images cannot be read, and max_bad = "
                    "{most} allows fewer",
                    file=one.file,
                    reason=one.reason,
                    count=self.num_bad + 1,
                    total=len(self._index),
                    most=self.data.max_bad,
                )
            if one.id in self._seen_bad:
                continue
            self._seen_bad.add(one.id)
            self.num_bad += 1
            if self.num_bad <= _SHOWN:
                rest = "; further ones are counted in num_bad" if self.num_bad == _SHOWN else ""
                done = "black, of weight 0" if self._bad == "weigh" else "left out"
                _warn(f"{one.file}: {one.reason}: {done}{rest}")


class TrainingLoader(TorchLoader):
    """Endless shuffled batches in epochs of `len` batches; all ranks share the global batches.

    Epochs follow each other without a gap: what is left of a pass over the images, less than a
    batch, opens the next epoch. The batches depend on the seed, the epoch and the step alone.
    """

    drop_last = True

    def __init__(self, feeds: Feeds, index: Index, bad: Bad) -> None:
        super().__init__(feeds, index, bad)
        batch, size = feeds.global_batch, feeds.data.image_size
        plan = training_plan(feeds.data, index, global_batch=batch, seed=feeds.seed)
        course = Course(plan.epoch_samples, "", (Phase(0, _ENDLESS, 0, batch, size),))
        self._len = max(1, plan.epoch_samples // batch)
        self._feed = feeds.train(index, plan, course)
        self._open.callback(self._feed.close)
        self._origin = 0  # samples of the stream before epoch 0, after a change of the batch
        self._position = -1  # samples of the stream before the feed's next batch
        self._epoch, self._step = 0, 0
        self._next = (0, 0)

    def __len__(self) -> int:
        return self._len

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch. Without a call each iteration is the next epoch.

        After `load_state_dict` in the middle of this epoch it continues there.
        """
        if epoch != self._next[0] or not self._next[1]:
            self._epoch, self._step = self._next = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given, equal on all ranks."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "samples": self._samples(self._epoch, self._step),
            "batch": self._feeds.global_batch,
            "seed": self._feeds.seed,
            "data": self._index.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a loader of the same data and seed was, on any number of ranks.

        The next iteration gives the rest of its epoch. DataError for other data or another seed.
        """
        own = {"seed": self._feeds.seed, "data": self._index.fingerprint}
        for key, value in own.items():
            if state[key] != value:
                raise DataError(
                    "loader.other-state",
                    "the state is that of a loader with {key} {theirs!r}, and this one has "
                    "{ours!r}: resume with the same {key}",
                    key=key,
                    theirs=state[key],
                    ours=value,
                )
        self._origin, samples, batch = 0, state["samples"], self._feeds.global_batch
        epoch, step = state["epoch"], state["step"]
        if self._samples(epoch, step) != samples:  # of another number of ranks, or batch
            step = min(step * state["batch"] // batch, self._len - 1)
            self._origin = samples - self._samples(epoch, step)
        self._epoch, self._step = self._next = (epoch, step)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """The batches; an iteration begins, and where is decided, with its first one."""
        turn = self._begin()
        epoch, first = self._epoch, self._step = self._next
        position = self._samples(epoch, first)
        if position != self._position:
            self._feed.seek(*divmod(position, self._feeds.global_batch))
            self._position = position
        self._next = (epoch + 1, 0)
        for step in range(first, self._len):
            self._check(turn)
            batch = next(self._feed)
            self._position += self._feeds.global_batch
            self._epoch, self._step = divmod(epoch * self._len + step + 1, self._len)
            yield self._given(batch)

    def _samples(self, epoch: int, step: int) -> int:
        """Samples of the stream before a batch."""
        return self._origin + (epoch * self._len + step) * self._feeds.global_batch


class EvaluationLoader(TorchLoader):
    """Each image once, in the order of the index; all ranks have equally many batches."""

    def __init__(self, feeds: Feeds, index: Index, bad: Bad) -> None:
        super().__init__(feeds, index, bad)
        self._plan = _evaluation_plan(len(index), feeds)
        self._passes: EvaluationFeeds = feeds.evaluations(index, self._plan)
        self._open.callback(self._passes.close)

    def __len__(self) -> int:
        return self._plan.num_steps

    def set_epoch(self, epoch: int) -> None:
        """Every epoch is the same."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each iteration begins with the first image."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        turn = self._begin()
        with self._passes.one() as feed:
            for batch in feed:
                yield self._given(batch)
                self._check(turn)


def _evaluation_plan(num_images: int, feeds: Feeds) -> OnePassPlan:
    """Whole batches and a short one; if that has no image for some rank, even ones.

    A loop of DistributedDataParallel waits for ever where a rank has a batch less.
    """
    ranks, batch = feeds.world.size, feeds.global_batch
    plan = OnePassPlan(num_images, batch)
    if 0 < num_images % batch < ranks:
        if num_images < plan.num_steps * ranks:
            raise DataError(
                "loader.too-few-images",
                "{count:,} images cannot be divided so that each of {ranks} ranks has equally many "
                "batches of {size}: take other batches, or fewer ranks",
                count=num_images,
                ranks=ranks,
                size=batch // ranks,
            )
        return EvenPassPlan(num_images, batch)
    return plan


# --- from arguments to an index ---


def _overrides(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with their sections. RecipeError for one that does not exist, or has no place here."""
    sections = {"data": DataConfig.model_fields, "augment": AugmentConfig.model_fields}
    known = {name: section for section, names in sections.items() for name in names}
    for key in keys:
        if key not in known or key in _NOT_HERE:
            raise unknown_key(key, known.keys() - {*_NOT_HERE})
    return {f"{known[key]}.{key}": value for key, value in keys.items()}


def _config(overrides: Mapping[str, Any], dtype: torch.dtype, bad: str) -> RunConfig:
    """The recipe of the keys. RecipeError for one that cannot be followed here."""
    config = override(RunConfig(), overrides)
    augment = config.augment
    if config.data.order == "join":
        raise RecipeError(
            "loader.no-join",
            "order = 'join' reads data without an index, and epochs have no length: leave it out",
        )
    if dtype == torch.uint8 and (augment.mixes or augment.erasing):
        raise RecipeError(
            "loader.needs-floats",
            "mixup, cutmix and erasing work on normalised images: leave out dtype=torch.uint8",
        )
    if bad not in (choices := ("drop", "weigh", "raise")):
        raise InputError(
            "loader.unknown-choice",
            "bad = {value!r}: expected one of {choices}",
            value=bad,
            choices=", ".join(choices),
        )
    return config


def _worlds(rank: int | None, world_size: int | None) -> tuple[World, World]:
    """This rank among those that share the batches, and among those that open the data together."""
    if rank is not None or world_size is not None:
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise InputError(
                "loader.wrong-rank",
                "rank = {rank} and world_size = {size}: give both, a rank below the world size",
                rank=rank,
                size=world_size,
            )
        return World(rank, world_size), World()
    world = discover()
    if not (dist.is_available() and dist.is_initialized()):
        return world, World()
    ours = (dist.get_rank(), dist.get_world_size())
    if ours != (world.rank, world.size):
        world = World(*ours)
    world = with_cores(world)
    return world, world


def _open(
    config: RunConfig,
    world: World,
    *,
    train: bool,
    classes: Sequence[str] | None,
) -> Index:
    """The index of the training or the validation data; its labels are numbers of `classes`."""
    source, training = source_of(config.data, "train" if train else "val"), None
    if source.locations is None:  # data without parts
        source = source_of(config.data, "train")
    elif source.key == "data.val":
        training = source_of(config.data, "train")
    with counter(console_of(world), "indexing samples") as show:
        if classes is None and training is not None:
            classes = open_split(training, world, show).classes
        index = open_split(source, world, show, known=classes)
    with together(world):
        if train:
            check_learnable(index, str(source))
        if world.is_first:
            for text in (*what_is_left_out([index]), *what_is_lost(index)):
                _warn(text)
    return index


def _soft_targets(feeds: Feeds, index: Index) -> Loss | None:
    """Makes float labels of a batch, those of a recipe's loss; None where numbers will do."""
    lists, augment = index.lists, feeds.augment
    multi_hot = lists and MultiHot(lists, len(index.classes), feeds.device)
    if multi_hot is None and not (augment.mixes or augment.label_smoothing):
        return None
    return targets_of(augment.label_smoothing, augment.mixes, multi_hot)


def _warn(text: str) -> None:
    warnings.warn(printable(text), stacklevel=2)


def _close_here(opened: ExitStack, process: int) -> None:
    """Closes what this process has opened; a fork of it has the same objects."""
    if os.getpid() == process:
        opened.close()
