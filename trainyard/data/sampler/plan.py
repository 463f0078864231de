"""The order of samples: pure functions from a step to the sample ids of its global batch.

A rank is only a slice of positions, so the stream of ids is the same for every world size, and
the position of a run is one integer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.data.rng import PASSES, STARTS, WINDOWS, UInt64s, fold_in, permute, splitmix64

Ids = NDArray[np.int64]

# These numbers keep uses of a seed independent of each other and of crops, which use stream 1.
_BLOCKS_PER_WINDOW = 16
_SHARE_BITS = 16  # shares of classes are multiples of 2**-16 draws, equal on all machines
_RESAMPLING_WINDOW = 5120  # samples; about the shuffle buffer usual with WebDataset


class Plan(Protocol):
    """The order of samples, as the loader uses it; plain data."""

    @property
    def global_batch(self) -> int:
        """Number of samples of a step."""

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        """Sample ids of `rank` of `size` at `step`: element `rank::size` of the batch."""

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        """Epoch index of each id. A sample never has the same index twice."""


class EndlessPlan(ABC):
    """A stream of epochs cut into equal batches.

    Batches span epoch borders, so no batch is short and no sample is dropped or repeated.
    """

    global_batch: int

    @property
    @abstractmethod
    def epoch_samples(self) -> int:
        """Number of samples in an epoch."""

    @abstractmethod
    def _ids(self, positions: Ids) -> Ids:
        """The ids at positions of the stream."""

    @abstractmethod
    def _visits(self, positions: Ids) -> Ids: ...

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        return self._ids(self._positions(step, rank, size))

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        return self._visits(self._positions(step, rank, size))

    def _positions(self, step: int, rank: int, size: int) -> Ids:
        start = step * self.global_batch
        return np.arange(start + rank, start + self.global_batch, size, dtype=np.int64)


@dataclass(frozen=True)
class PlanSlice(EndlessPlan):
    """A plan's stream from a position on, cut into batches of another size; steps start at 0."""

    stream: EndlessPlan
    first: int  # position in the stream, in samples
    global_batch: int

    @property
    def epoch_samples(self) -> int:
        return self.stream.epoch_samples

    def _ids(self, positions: Ids) -> Ids:
        return self.stream._ids(self.first + positions)

    def _visits(self, positions: Ids) -> Ids:
        return self.stream._visits(self.first + positions)


@dataclass(frozen=True)
class RepeatedPlan(EndlessPlan):
    """A stream that repeats every sample several times in a row, each time with another crop.

    Repeated augmentation (Hoffer et al. 2020, as in DeiT): an epoch keeps its length, so it
    shows a part of the samples; R epochs with R repeats show every sample R times.
    """

    stream: EndlessPlan
    repeats: int
    global_batch: int

    @property
    def epoch_samples(self) -> int:
        return self.stream.epoch_samples

    def _ids(self, positions: Ids) -> Ids:
        return self.stream._ids(positions // self.repeats)

    def _visits(self, positions: Ids) -> Ids:
        visits = self.stream._visits(positions // self.repeats)
        return visits * self.repeats + positions % self.repeats


@dataclass(frozen=True)
class ShuffledPlan(EndlessPlan):
    """Every sample once an epoch, in a new permutation each epoch.

    With a locality of N samples, blocks of neighbours are permuted, then shuffled N samples at a
    time, so that training reads few places at once; without, all samples are permuted.
    """

    num_samples: int
    global_batch: int
    seed: int
    locality: int = 0

    @property
    def epoch_samples(self) -> int:
        return self.num_samples

    def _ids(self, positions: Ids) -> Ids:
        epochs = self._visits(positions)
        within = positions % self.num_samples
        return _shuffled(within, epochs, self.num_samples, seed=self.seed, locality=self.locality)

    def _visits(self, positions: Ids) -> Ids:
        return positions // self.num_samples


@dataclass(frozen=True)
class WeightedPlan(EndlessPlan):
    """Consecutive parts of a data set, each with a weight.

    An epoch has a fixed number of draws of each part. Over all epochs, the draws of a part make
    passes through it, each a new permutation: a pass has every sample of the part once.
    """

    sizes: tuple[int, ...]
    """Number of samples of each part."""
    draws: tuple[int, ...]
    """Number of samples of each part in an epoch."""
    global_batch: int
    seed: int
    locality: int = 0

    @property
    def epoch_samples(self) -> int:
        return sum(self.draws)

    def _ids(self, positions: Ids) -> Ids:
        part, draw = self._draws(positions)
        ids = np.empty_like(positions)
        first = 0
        for number, size in enumerate(self.sizes):
            mine = np.flatnonzero(part == number)
            passes = draw[mine] // size
            keys = _keys(self.seed, PASSES, np.full_like(passes, number), passes)
            within = draw[mine] % size
            if self.locality:
                ids[mine] = first + _permute_blocks(within, keys, size, _block(self.locality))
            else:
                ids[mine] = first + permute(within, keys, size)
            first += size
        return ids

    def _visits(self, positions: Ids) -> Ids:
        part, draw = self._draws(positions)
        sizes: Ids = np.array(self.sizes)
        return draw // sizes[part]

    def _draws(self, positions: Ids) -> tuple[Ids, Ids]:
        """The part at each position, and the number of the part's draw, over all epochs."""
        total = self.epoch_samples
        epochs = positions // total
        within = _shuffled(positions % total, epochs, total, seed=self.seed, locality=self.locality)
        ends = np.cumsum(self.draws)
        part = np.searchsorted(ends, within, side="right")
        draws = np.array(self.draws)[part]
        return part, epochs * draws + within - (ends[part] - draws)


@dataclass(frozen=True, eq=False)
class BalancedPlan(EndlessPlan):
    """Classes in other proportions than the data's; an epoch has as many samples as the data.

    The draws of class c after e epochs are e times its share, up to one draw. Over all epochs, they
    make passes through the class, each a new permutation: a pass has every sample of it once.
    """

    ids: NDArray[np.int32]
    """All sample ids, those of a class together."""
    ends: Ids
    """The end of each class in `ids`."""
    shares: Ids
    """Draws of each class and all before it in an epoch, as multiples of 2**-16."""
    global_batch: int
    seed: int

    @property
    def epoch_samples(self) -> int:
        return len(self.ids)

    def _ids(self, positions: Ids) -> Ids:
        part, draw = self._draws(positions)
        first = np.concatenate([[0], self.ends])[part]
        passes, within = np.divmod(draw, self.ends[part] - first)
        keys = _keys(self.seed, PASSES, part, passes)
        order = np.argsort(part, kind="stable")
        borders = np.flatnonzero(np.diff(part[order])) + 1
        for mine in np.split(order, borders):
            number = part[mine[0]]
            size = int(self.ends[number] - first[mine[0]])
            within[mine] = permute(within[mine], keys[mine], size)
        ids: Ids = self.ids[first + within].astype(np.int64)
        return ids

    def _visits(self, positions: Ids) -> Ids:
        part, draw = self._draws(positions)
        sizes: Ids = np.diff(self.ends, prepend=0)
        return draw // sizes[part]

    def _draws(self, positions: Ids) -> tuple[Ids, Ids]:
        """The class at each position, and the number of the class's draw, over all epochs."""
        epochs, within = np.divmod(positions, self.epoch_samples)
        within = permute(within, fold_in(self.seed, epochs), self.epoch_samples)
        part, draw = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            before, after = (number * self.shares >> _SHARE_BITS for number in (epoch, epoch + 1))
            here = np.searchsorted(after - before, within[mine], side="right")
            # Draws of this class before the epoch, plus the place in the class's part of the epoch.
            above = np.concatenate([[0], after])[here]
            part[mine], draw[mine] = here, before[here] - above + within[mine]
        return part, draw


def balanced_plan(
    labels: NDArray[np.int32], balance: float, *, global_batch: int, seed: int
) -> BalancedPlan:
    """The plan that draws a sample of a class of n samples with a weight of n**-balance.

    Of N samples an epoch, the class is drawn N * n**(1 - balance) / sum of all n**(1 - balance)
    times, at least once. Classes without samples are left out.
    """
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    parts = counts ** (1.0 - balance)
    shares = np.cumsum(parts) / parts.sum() * len(labels)
    return BalancedPlan(
        ids=np.argsort(labels, kind="stable").astype(np.int32),
        ends=np.cumsum(counts),
        shares=np.rint(shares * 2**_SHARE_BITS).astype(np.int64),
        global_batch=global_batch,
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class ResampledPlan(EndlessPlan):
    """Runs of neighbours from shards drawn with replacement, shuffled in windows of many runs.

    A replayable form of WebDataset's ResampledShards with a shuffle buffer. A draw picks a sample,
    so shards are drawn in proportion to their samples; the run begins at the sample, and continues
    from the shard's end at its beginning. Every draw is therefore uniform over a part's samples.
    """

    sizes: tuple[int, ...]
    """Number of samples of each part; see WeightedPlan."""
    draws: tuple[int, ...]
    """Average number of draws of each part in an epoch."""
    shards: Ids
    """The first id of each shard, and the number of samples."""
    run: int
    """Number of samples of a run; no shard has fewer."""
    global_batch: int
    seed: int

    @property
    def epoch_samples(self) -> int:
        return sum(self.draws)

    def _ids(self, positions: Ids) -> Ids:
        length = _RESAMPLING_WINDOW // self.run * self.run
        windows = positions // length
        keys = _keys(self.seed, WINDOWS, windows)
        runs, step = np.divmod(
            windows * length + permute(positions % length, keys, length), self.run
        )
        start = self._starts(runs)
        shard = np.searchsorted(self.shards, start, side="right")
        first, end = self.shards[shard - 1], self.shards[shard]
        return first + (start - first + step) % (end - first)

    def _visits(self, positions: Ids) -> Ids:
        return positions  # a sample may occur twice in an epoch, even in a batch

    def _starts(self, runs: Ids) -> Ids:
        """The id at which each run begins."""
        keys = _keys(self.seed, STARTS, runs)
        draw = _remainder(keys, self.epoch_samples)
        part = np.searchsorted(np.cumsum(self.draws), draw, side="right")
        sizes: Ids = np.array(self.sizes)
        first = np.cumsum(sizes) - sizes
        return first[part] + _remainder(splitmix64(keys), sizes[part])


@dataclass(frozen=True)
class OnePassPlan:
    """Every sample once, in stored order; the last batch may be short."""

    num_samples: int
    global_batch: int

    @property
    def num_steps(self) -> int:
        return -(-self.num_samples // self.global_batch)

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        start = step * self.global_batch
        stop = min(start + self.global_batch, self.num_samples)
        return np.arange(start + rank, stop, size, dtype=np.int64)

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        return np.zeros_like(self.batch(step, rank, size))


@dataclass(frozen=True)
class EvenPassPlan(OnePassPlan):
    """As many batches as OnePassPlan has, which differ by one sample at most."""

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        start, stop = (self.num_samples * one // self.num_steps for one in (step, step + 1))
        return np.arange(start + rank, stop, size, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class WholeBatchesPlan:
    """Some samples once, in batches that are the same on any number of ranks.

    A step has a whole batch for each rank; ranks may be left without one in the last step.
    """

    ids: Ids
    size_of_batch: int
    num_ranks: int

    @property
    def global_batch(self) -> int:
        return self.size_of_batch * self.num_ranks

    @property
    def num_steps(self) -> int:
        return -(-len(self.ids) // self.global_batch)

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        start = (step * size + rank) * self.size_of_batch
        return self.ids[start : start + self.size_of_batch]

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        return np.zeros_like(self.batch(step, rank, size))


@dataclass(frozen=True)
class VirtualRanksPlan:
    """A plan cut for `total` virtual ranks; rank r of n gets those of r, r + n, … one by one."""

    plan: Plan
    total: int

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        virtual = range(rank, self.total, size)
        return np.concatenate([self.plan.batch(step, one, self.total) for one in virtual])

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        virtual = range(rank, self.total, size)
        return np.concatenate([self.plan.epochs(step, one, self.total) for one in virtual])


# --- permutations of range(size) ---


def _shuffled(positions: Ids, epochs: Ids, size: int, *, seed: int, locality: int) -> Ids:
    """Positions under the permutations of their epochs; see ShuffledPlan for the locality."""
    keys = fold_in(seed, epochs)
    if not locality:
        return permute(positions, keys, size)
    block = _block(locality)
    length = locality // block * block  # of a window; the last one is shorter
    windows = positions // length
    window_keys = _keys(seed, WINDOWS, epochs, windows)
    within = positions % length
    is_last = windows == size // length
    for some, length_here in ((~is_last, length), (is_last, size % length)):
        within[some] = permute(within[some], window_keys[some], length_here)
    return _permute_blocks(windows * length + within, keys, size, block)


def _block(locality: int) -> int:
    return max(1, locality // _BLOCKS_PER_WINDOW)


def _permute_blocks(positions: Ids, keys: UInt64s, size: int, block: int) -> Ids:
    """Permutes whole blocks of neighbours, then rotates range(size) by a random amount.

    The short block at the end is not moved; the rotation makes it another one for each key.
    """
    number, within = np.divmod(positions, block)
    whole = np.flatnonzero(number < size // block)
    number[whole] = permute(number[whole], keys[whole], size // block)
    return (number * block + within + _remainder(splitmix64(keys), size)) % size


def _keys(seed: int, stream: int, *parts: Ids) -> UInt64s:
    return fold_in(seed, np.full_like(parts[0], stream), *parts)


def _remainder(words: UInt64s, size: int | Ids) -> Ids:
    """Uniform numbers below `size`, which is far below 2**64."""
    return (words % np.asarray(size, np.uint64)).astype(np.int64)
