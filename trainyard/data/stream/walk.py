"""The samples of a rank's shards: the choice and order of shards, and the shuffle.

All are pure functions of (seed, pass, rank) and of the shards' contents, so they can be repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from trainyard.data.decode.crops import Interpolation, RandomResizedCrop
from trainyard.data.decode.rendering import PLAIN, Rendering
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.tar import SequentialReader
from trainyard.data.formats.webdataset import Streamed, streamed
from trainyard.data.rng import SHARDS, SHUFFLES, fold_in, permute, uniforms
from trainyard.data.stream.open_shard import open_shard
from trainyard.errors import DataError
from trainyard.image_size import ImageSize
from trainyard.printable import print_line

_DRAWS = 1024  # random numbers made at a time
_POSITION_BITS = 32


class Room(NamedTuple):
    """What the shuffle buffer holds at most."""

    samples: int = 2048  # 230 MB of ImageNet
    first: int = 256  # samples before the first one leaves
    num_bytes: int = 1 << 30


_ROOM = Room()


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """The configuration of the loader process for a rank's stream; plain data."""

    shards: tuple[str, ...]
    numbers: tuple[int, ...]
    """The label of each class in the shards."""
    seed: int
    rank: int
    size: int
    share: int  # this rank's samples of a whole batch
    first_pass: int
    seen: int  # batches of the first pass to skip
    num_passes: int | None  # passes of the whole run; None: endless
    crop: RandomResizedCrop
    image_size: ImageSize
    interpolation: Interpolation
    threads: int
    channels: int = 3  # as in DataConfig
    rendering: Rendering = PLAIN


class Item(NamedTuple):
    """A sample with its shard and position."""

    shard: int  # number of the shard in the list
    position: int  # number of the sample in the shard
    sample: Streamed

    @property
    def id(self) -> int:
        return self.shard << _POSITION_BITS | self.position


class PassBatch(NamedTuple):
    number: int  # number of the pass
    items: list[Item]  # empty if a pass has no samples (left) for this rank
    is_last: bool  # True for the last batch of the rank's pass


def walk(spec: StreamSpec) -> Iterator[PassBatch]:
    """The batches of one pass after the other; each pass has at least one, possibly empty."""
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
    """The shards that a rank reads in a pass, in order: every size-th, shuffled for each pass."""
    mine = np.arange(rank, count, size, dtype=np.int64)
    places = np.arange(len(mine))
    keys = fold_in(seed, *(np.full_like(places, part) for part in (SHARDS, number, rank)))
    order: list[int] = mine[permute(places, keys, len(mine))].tolist()
    return order


def _items(spec: StreamSpec, number: int) -> Iterator[Item]:
    order = shards_of(
        len(spec.shards), seed=spec.seed, number=number, rank=spec.rank, size=spec.size
    )
    left_out, num_told = LeftOut(), 0
    class_of = {label: number for number, label in enumerate(spec.numbers)}
    for shard in order:
        name = spec.shards[shard]
        with SequentialReader(name, open_shard(name)) as tar:
            for position, sample in enumerate(streamed(tar, left_out)):
                if sample.label not in class_of:
                    raise DataError(
                        "stream.label-beyond-val",
                        "{path}: sample {sample!r} has label {label}, which none of the "
                        "{num_classes} classes of the validation data has",
                        path=name,
                        sample=sample.key,
                        label=sample.label,
                        num_classes=len(spec.numbers),
                    )
                label = class_of[sample.label]
                yield Item(shard, position, sample._replace(label=label))
        if left_out and not num_told and number == spec.first_pass:  # a pass may take hours
            num_told = left_out.total
            print_line(f"{name}: left out: {left_out}")
    if left_out.total > num_told and number == spec.first_pass:
        print_line(f"rank {spec.rank}: left out of {len(order):,} shards: {left_out}")


def shuffled(items: Iterator[Item], draws: Iterator[float], room: Room = _ROOM) -> Iterator[Item]:
    """Every item once, in random order within a buffer.

    The buffer begins small and grows while items leave it, so that the first items need not wait
    for a full one.
    """
    buffer: list[Item] = []
    held = 0  # bytes
    for number, item in enumerate(items):
        buffer.append(item)
        held += len(item.sample.image)
        is_one_due = len(buffer) > room.samples or (len(buffer) > room.first and number % 2)
        while is_one_due or held > room.num_bytes:
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
    """Random numbers in [0, 1), equal for the same pass and rank."""
    for first in count(0, _DRAWS):
        places = np.arange(first, first + _DRAWS)
        key = (np.full_like(places, part) for part in (SHUFFLES, number, rank))
        yield from uniforms(fold_in(seed, *key, places), 1)[:, 0].tolist()
