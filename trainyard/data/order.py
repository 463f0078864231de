"""Builds the order of training samples from the [data] section of a recipe and an index."""

import numpy as np
from numpy.typing import NDArray

from trainyard.data.config import DataConfig
from trainyard.data.index.table import Index
from trainyard.data.sampler.plan import (
    EndlessPlan,
    Ids,
    RepeatedPlan,
    ResampledPlan,
    ShuffledPlan,
    WeightedPlan,
    balanced_plan,
)
from trainyard.data.stream.shards import Stream
from trainyard.errors import RecipeError

Order = EndlessPlan | Stream
"""The order of samples: a plan's, or that of a stream's shards."""
_MAX_RUN = 64  # consecutive samples read from a drawn shard; 7 MB of ImageNet


def training_order(
    config: DataConfig, data: Index | Stream, *, global_batch: int, seed: int
) -> Order:
    """The order that a recipe sets. RecipeError if its keys do not fit the data."""
    if isinstance(data, Stream):
        return data
    return training_plan(config, data, global_batch=global_batch, seed=seed)


def training_plan(config: DataConfig, index: Index, *, global_batch: int, seed: int) -> EndlessPlan:
    """The order that a recipe sets, for data with an index."""
    plan = _plan(config, index, global_batch=global_batch, seed=seed)
    return plan if config.repeats == 1 else RepeatedPlan(plan, config.repeats, global_batch)


def _plan(config: DataConfig, index: Index, *, global_batch: int, seed: int) -> EndlessPlan:
    if config.balance:
        return balanced_plan(index.label, config.balance, global_batch=global_batch, seed=seed)
    sizes = index.parts or (len(index),)
    common = {"global_batch": global_batch, "seed": seed}
    if config.order == "resample":
        if config.locality:
            raise RecipeError(
                "recipe.locality-with-resample",
                "data.locality = {value} is for data.order = 'exact'; 'resample' reads "
                "neighbouring samples in any case",
                value=config.locality,
            )
        run, shards = _shards(index.file, sizes)
        return ResampledPlan(sizes, _draws(config, sizes), shards, run, **common)
    if config.weights is None:
        return ShuffledPlan(len(index), **common, locality=config.locality)
    return WeightedPlan(sizes, _draws(config, sizes), **common, locality=config.locality)


def _draws(config: DataConfig, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Number of samples of each part in an epoch."""
    weights = config.weights or (1.0,) * len(sizes)
    if len(weights) != len(sizes):
        raise RecipeError(
            "recipe.wrong-weight-count",
            "data.weights has {num_weights} numbers, but data.train {num_locations} locations: "
            "write one number for each, in the same order",
            num_weights=len(weights),
            num_locations=len(sizes),
        )
    draws = tuple(round(weight * size) for weight, size in zip(weights, sizes, strict=True))
    if 0 in draws:
        part = draws.index(0)
        raise RecipeError(
            "recipe.weight-too-small",
            "data.weights: {value} times the {num_samples:,} samples of location {number} is less "
            "than one: raise all weights alike, or leave it out",
            value=weights[part],
            num_samples=sizes[part],
            number=part + 1,
        )
    return draws


def _shards(file: NDArray[np.int32], sizes: tuple[int, ...]) -> tuple[int, Ids]:
    """Samples per run, and the first ids of the shards, followed by the number of samples.

    For files of one image each, a run is one sample, and each part is one shard. A shard that is
    shorter than a run is joined with its neighbour.
    """
    ends = np.cumsum(sizes).tolist()
    files = [file[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    least = min(len(part) // int(part[-1] - part[0] + 1) for part in files)
    run = max(1, min(_MAX_RUN, least))  # with empty shards there may be more shards than samples
    borders = [0]
    for part, end in zip(files, ends, strict=True):
        # The column's own type: a search for another would convert, and so load, the whole column.
        later = np.arange(part[0] + 1, part[-1] + 1, dtype=file.dtype) if run > 1 else part[:0]
        for start in (end - len(part) + np.searchsorted(part, later)).tolist():
            if run <= start - borders[-1] and run <= end - start:
                borders.append(start)
        borders.append(end)
    return run, np.array(borders)
