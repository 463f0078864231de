"""The range of training images with more than 8 bits a channel: measured, or asked for."""

from trainyard.config import RunConfig, override
from trainyard.data.decode.lost import Measured, measured
from trainyard.data.decode.rendering import written
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets
from trainyard.errors import RecipeError
from trainyard.world import World, broadcast, together


def measure(config: RunConfig, data: Datasets, world: World, *, is_new: bool) -> Measured | None:
    """What the first rank measures, on every rank; None without need, or for images of 8 bits."""
    found, limits = None, config.data.range
    with together(world):
        if world.is_first and (limits == "auto" or (limits is None and is_new)):
            index = data.train if isinstance(data.train, Index) else data.val
            found = measured(index, config.data.channels, config.data.bands or ())
    return broadcast(world, found)


def with_range(config: RunConfig, depth: Measured | None, *, is_new: bool) -> RunConfig:
    """The recipe with the range of "auto". RecipeError where a new run has, or needs, none."""
    limits = config.data.range
    if depth is not None and depth.channels and is_new:
        raise RecipeError(
            "recipe.channels-not-set",
            "{depth}, and data.channels = {channels}: the same command takes them with {options}",
            depth=str(depth),
            channels=config.data.channels,
            options=depth.options(config.data.channels),
        )
    if limits == "auto":
        if depth is None:
            raise RecipeError(
                "recipe.range-without-depth",
                "data.range = 'auto': the training images looked at have 8 bits a channel: leave "
                "it out",
            )
        return override(config, {"data.range": list(depth.limits)})
    if depth is not None and depth.limits and limits is None and is_new:
        raise RecipeError(
            "recipe.range-not-set",
            "{depth}: set data.range = {limits}, or 'auto'",
            depth=str(depth),
            limits=written(depth.limits),
        )
    return config
