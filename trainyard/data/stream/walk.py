"""A rank's way through its shards: which, in what order, and how they are shuffled.

Pure functions of (seed, pass, rank) and of what the shards hold, so a walk can be done again.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from trainyard.data.augment import RandomResizedCrop
from trainyard.data.decode import Interpolation
from trainyard.data.formats.tar import Forward
from trainyard.data.formats.webdataset import Streamed, streamed
from trainyard.data.keyed import fold, permute, uniforms
from trainyard.data.stream.shards import open_shard
from trainyard.errors import DataError

_SHARD_STREAM, _SHUFFLE_STREAM = 9, 10  # keep these uses of a seed apart from others
_BUFFER = 2048  # samples that are shuffled at a time; 230 MB of ImageNet
_BUFFER_BYTES = 1 << 30  # that they have at most, however large they are
_FIRST = 256  # samples that are in the buffer before the first one leaves it
_DRAWS = 1024  # random numbers made at a time
_POSITION_BITS = 32


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """All that the loader process needs to know of a rank's walk; plain data."""

    shards: tuple[str, ...]
    num_classes: int
    seed: int
    rank: int
    size: int
    share: int  # samples of a whole batch of this rank
    first_pass: int
    seen: int  # batches of the first pass that are passed over
    num_passes: int | None  # after so many, from the first of all, it ends; None: never
    crop: RandomResizedCrop
    image_size: int  # pixels, square
    interpolation: Interpolation
    threads: int


class Item(NamedTuple):
    """A sample, and where it came from."""

    shard: int  # its number in the list
    position: int  # samples before it in the shard
    sample: Streamed

    @property
    def id(self) -> int:
        return self.shard << _POSITION_BITS | self.position


class PassBatch(NamedTuple):
    number: int  # of the pass
    items: list[Item]  # none, if a pass has nothing (left) for this rank
    is_last: bool  # of the rank's pass


def walk(spec: StreamSpec) -> Iterator[PassBatch]:
    """The batches of one pass after the other; each pass has one at least, which may be empty."""
    seen = spec.seen
    for number in count(spec.first_pass):
        if number == spec.num_passes:
            return
        draws = _draws(spec.seed, number, spec.rank)
        items = islice(shuffled(_items(spec, number), draws), seen * spec.share, None)
        batch = list(islice(items, spec.share))
        while following := list(islice(items, spec.share)):
            yield PassBatch(number, batch, is_last=False)
            batch = following
        yield PassBatch(number, batch, is_last=True)
        seen = 0


def shards_of(count: int, *, seed: int, number: int, rank: int, size: int) -> list[int]:
    """The shards that a rank walks through in a pass, in order: every size-th, shuffled anew."""
    mine = np.arange(rank, count, size, dtype=np.int64)
    places = np.arange(len(mine))
    keys = fold(seed, *(np.full_like(places, part) for part in (_SHARD_STREAM, number, rank)))
    order: list[int] = mine[permute(places, keys, len(mine))].tolist()
    return order


def _items(spec: StreamSpec, number: int) -> Iterator[Item]:
    order = shards_of(
        len(spec.shards), seed=spec.seed, number=number, rank=spec.rank, size=spec.size
    )
    for shard in order:
        name = spec.shards[shard]
        with closing(Forward(name, open_shard(name))) as tar:
            for position, sample in enumerate(streamed(tar)):
                if sample.label >= spec.num_classes:
                    raise DataError(
                        f"{name}: sample {sample.key!r} has label {sample.label}, but the "
                        f"validation data has {spec.num_classes} classes, counted from 0"
                    )
                yield Item(shard, position, sample)


def shuffled(items: Iterator[Item], draws: Iterator[float]) -> Iterator[Item]:
    """Every item once, in random order as far as a buffer reaches.

    It begins small and grows while items leave it, so that the first do not wait for a full one.
    """
    buffer: list[Item] = []
    held = 0  # bytes
    for number, item in enumerate(items):
        buffer.append(item)
        held += len(item.sample.image)
        is_one_due = len(buffer) > _BUFFER or (len(buffer) > _FIRST and number % 2)
        while is_one_due or held > _BUFFER_BYTES:
            chosen = _pop(buffer, next(draws))
            held -= len(chosen.sample.image)
            is_one_due = False
            yield chosen
    while buffer:
        yield _pop(buffer, next(draws))


def _pop(buffer: list[Item], draw: float) -> Item:
    place = int(draw * len(buffer))
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


def _draws(seed: int, number: int, rank: int) -> Iterator[float]:
    """Random numbers in [0, 1), the same again for the same pass and rank."""
    for first in count(0, _DRAWS):
        places = np.arange(first, first + _DRAWS)
        key = (np.full_like(places, part) for part in (_SHUFFLE_STREAM, number, rank))
        yield from uniforms(fold(seed, *key, places), 1)[:, 0].tolist()
