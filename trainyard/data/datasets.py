"""From the [data] and [augment] sections of a recipe to feeds of batches."""

import socket
from dataclasses import dataclass
from typing import Any

import torch

from trainyard.data.augment import AugmentConfig, CentralCrop, RandomResizedCrop
from trainyard.data.feed import Feed
from trainyard.data.index import Index, check_same_classes, load_index
from trainyard.data.indexing import Progress, open_index
from trainyard.data.loader import DataConfig, Loader, LoaderSpec
from trainyard.data.plan import OnePassPlan, ShuffledPlan
from trainyard.errors import DataError, RecipeError
from trainyard.world import World, cores_per_rank, gather, in_turns, together


@dataclass(frozen=True)
class Datasets:
    train: Index
    val: Index

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"train": self.train.fingerprint, "val": self.val.fingerprint}


def open_datasets(config: DataConfig, world: World, progress: Progress) -> Datasets:
    """The indices of the recipe's data, whose classes are the same."""
    data = Datasets(
        open_split(config.train, "data.train", world, progress),
        open_split(config.val, "data.val", world, progress),
    )
    with together(world):
        check_same_classes(
            data.train.classes, data.val.classes, config.val or "", has_names=data.val.has_names
        )
    return data


def open_split(location: str | None, key: str, world: World, progress: Progress) -> Index:
    """The index of a location on every rank; the first rank makes it, or checks the saved one.

    The others take the first one's word for it: a thousand ranks that look whether a thousand
    folders have changed are a load on a file server. Only where they cannot see its file, in a
    cache on another node, do they make their own.
    """
    if location is None:
        raise RecipeError(f"{key} is not set: pass --data LOCATION, or --{key} LOCATION")
    with together(world):
        first = open_index(location, progress) if world.is_first else None
    found = gather(world, None if first is None else (first.path, first.fingerprint))[0]
    assert found is not None
    path, fingerprint = found

    def same_index() -> Index:
        index = first or load_index(path)
        if index is None or index.fingerprint != fingerprint:
            index = open_index(location, progress)
        if index.fingerprint != fingerprint:
            raise DataError(
                f"{location}: {socket.gethostname()} holds other data there than the first rank's "
                "node (other files, sizes or classes)"
            )
        return index

    return in_turns(world, same_index)


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Makes feeds of one rank's batches on its device."""

    data: DataConfig
    augment: AugmentConfig
    global_batch: int
    seed: int
    channels_last: bool
    world: World
    device: torch.device

    def train(self, index: Index, start: int, stop: int) -> Feed:
        """Shuffled and augmented, from one step to another."""
        augment = self.augment
        spec = LoaderSpec(
            plan=ShuffledPlan(len(index), self.global_batch, self.seed),
            crop=RandomResizedCrop(self.seed, augment.scale, augment.ratio, augment.flip),
            image_size=self.data.image_size,
            start=start,
            stop=stop,
            **self._common(),
        )
        return self._feed(index, spec)

    def evaluation(self, index: Index) -> Feed:
        """Every image once, its central crop."""
        plan = OnePassPlan(len(index), self.global_batch)
        size = self.data.eval_size or self.data.image_size
        spec = LoaderSpec(
            plan=plan,
            crop=CentralCrop(size, self.data.crop_pct),
            image_size=size,
            start=0,
            stop=plan.num_steps,
            **self._common(),
        )
        return self._feed(index, spec)

    def _common(self) -> dict[str, Any]:
        return {
            "interpolation": self.data.interpolation,
            "rank": self.world.rank,
            "size": self.world.size,
            "threads": self.data.threads or cores_per_rank(self.world),
        }

    def _feed(self, index: Index, spec: LoaderSpec) -> Feed:
        return Feed(
            Loader(index, spec),
            self.device,
            mean=self.data.mean,
            std=self.data.std,
            channels_last=self.channels_last,
        )
