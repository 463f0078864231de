"""The configuration of a loader process.

Both sides import this module, and the loader process starts with every feed: pydantic and torch
stay out.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from trainyard.data.decode.crops import (
    CentralCrop,
    FittedCrop,
    Interpolation,
    RandomResizedCrop,
)
from trainyard.data.decode.rendering import PLAIN, Rendering
from trainyard.data.sampler.plan import Plan
from trainyard.errors import STOPS
from trainyard.image_size import ImageSize
from trainyard.world import World, cores_per_rank

ENDING_SIGNALS = tuple(STOPS)
"""The signals that end a run. A loader process outlives them: its trainer ends it."""

AGAIN = 255
"""The message that asks a loader process for another pass; a smaller number is a free slot."""


Crop = RandomResizedCrop | CentralCrop | FittedCrop


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """The configuration of the loader process; plain data."""

    plan: Plan
    crop: Crop
    image_size: ImageSize
    channels: int = 3  # as in DataConfig
    interpolation: Interpolation = "bilinear"
    rendering: Rendering = PLAIN
    start: int = 0  # first step
    stop: int  # one past the last step
    rank: int = 0
    size: int = 1
    threads: int = field(default_factory=partial(cores_per_rank, World()))  # all cores
    decode: Literal["cpu", "gpu"] = "cpu"  # as in DataConfig
    stage: str | None = None  # as in DataConfig
    stage_gb: float | None = None
