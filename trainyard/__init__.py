"""Trainyard trains image classifiers: from raw archives to an evaluated model, with one recipe.

    outcome = trainyard.train("digits", "runs/digits", data="data/digits")
    trainyard.evaluate("runs/digits")["top1"]
    trainyard.load("runs/digits").predict(["three.png"])

`docs/library.md` describes these functions, and the data path for custom training loops. Names are
imported on first use, so that `import trainyard` stays light.
"""

import os

TYPE_CHECKING = False  # typing takes longer to import than this module
if TYPE_CHECKING:
    from typing import Any

    from trainyard.api import evaluate, history, predictions, train
    from trainyard.averaging.base import Averager, EqualReplicas
    from trainyard.averaging.weight_averager import WeightAverager
    from trainyard.classifier import Classifier, load
    from trainyard.config import RunConfig, load_recipe
    from trainyard.data.decode.crops import CentralCrop, RandomResizedCrop
    from trainyard.data.decode.rendering import Rendering
    from trainyard.data.device.feed import Normalise
    from trainyard.data.index.build import open_index
    from trainyard.data.index.table import Index
    from trainyard.data.loader.loader import Loader
    from trainyard.data.loader.spec import LoaderSpec
    from trainyard.data.sampler.plan import OnePassPlan, ShuffledPlan
    from trainyard.datasets.arrays import write_images
    from trainyard.distributed import discover
    from trainyard.errors import TrainyardError
    from trainyard.export.load import load_export
    from trainyard.monitor.history import History
    from trainyard.monitor.outcome import Outcome
    from trainyard.published import load_published
    from trainyard.world import World

__all__ = [
    "Averager",
    "CentralCrop",
    "Classifier",
    "EqualReplicas",
    "History",
    "Index",
    "Loader",
    "LoaderSpec",
    "Normalise",
    "OnePassPlan",
    "Outcome",
    "RandomResizedCrop",
    "Rendering",
    "RunConfig",
    "ShuffledPlan",
    "TrainyardError",
    "WeightAverager",
    "World",
    "discover",
    "evaluate",
    "history",
    "load",
    "load_export",
    "load_published",
    "load_recipe",
    "open_index",
    "predictions",
    "train",
    "write_images",
]

# Read when torch is loaded. Threads that spin while they wait occupy the loader's cores, and a
# trainer on a CPU that shares its cores becomes several times slower (benchmarks/LOG.md). In small
# letters: a Turkish locale has another small I, and libgomp would refuse the word.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_HOMES = {
    "trainyard.api": ("evaluate", "history", "predictions", "train"),
    "trainyard.averaging.base": ("Averager", "EqualReplicas"),
    "trainyard.averaging.weight_averager": ("WeightAverager",),
    "trainyard.classifier": ("Classifier", "load"),
    "trainyard.config": ("RunConfig", "load_recipe"),
    "trainyard.data.decode.crops": ("CentralCrop", "RandomResizedCrop"),
    "trainyard.data.decode.rendering": ("Rendering",),
    "trainyard.data.index.table": ("Index",),
    "trainyard.data.index.build": ("open_index",),
    "trainyard.data.loader.loader": ("Loader",),
    "trainyard.data.loader.spec": ("LoaderSpec",),
    "trainyard.data.device.feed": ("Normalise",),
    "trainyard.data.sampler.plan": ("OnePassPlan", "ShuffledPlan"),
    "trainyard.datasets.arrays": ("write_images",),
    "trainyard.errors": ("TrainyardError",),
    "trainyard.export.load": ("load_export",),
    "trainyard.monitor.history": ("History",),
    "trainyard.monitor.outcome": ("Outcome",),
    "trainyard.distributed": ("discover",),
    "trainyard.published": ("load_published",),
    "trainyard.world": ("World",),
}


def __getattr__(name: str) -> "Any":
    import importlib

    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'trainyard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
