"""Trainyard trains image classifiers: from raw archives to an evaluated model, with one recipe.

The public names are imported on first use, so that `import trainyard` stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.config import RunConfig, load_recipe
    from trainyard.data.index import Index
    from trainyard.data.indexing import open_index
    from trainyard.data.loader import Loader, LoaderSpec
    from trainyard.data.plan import OnePassPlan, ShuffledPlan
    from trainyard.evaluation import evaluate_checkpoint
    from trainyard.rendezvous import discover
    from trainyard.run import train
from trainyard.world import World

__all__ = [
    "Index",
    "Loader",
    "LoaderSpec",
    "OnePassPlan",
    "RunConfig",
    "ShuffledPlan",
    "World",
    "discover",
    "evaluate_checkpoint",
    "load_recipe",
    "open_index",
    "train",
]

_HOMES = {
    "trainyard.config": ("RunConfig", "load_recipe"),
    "trainyard.data.index": ("Index",),
    "trainyard.data.indexing": ("open_index",),
    "trainyard.data.loader": ("Loader", "LoaderSpec"),
    "trainyard.data.plan": ("OnePassPlan", "ShuffledPlan"),
    "trainyard.evaluation": ("evaluate_checkpoint",),
    "trainyard.run": ("train",),
    "trainyard.rendezvous": ("discover",),
    "trainyard.world": ("World",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'trainyard' has no attribute {name!r}")
