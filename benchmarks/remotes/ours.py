"""Trainyard as a contender of remote.py."""

from collections.abc import Iterator

from benchmarks.loaders.measure import BATCH, SIDE
from benchmarks.remotes.contender import RATIO, SCALE, THREADS
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.index.build import open_index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.staging import StagedShards
from trainyard.data.sampler.plan import ShuffledPlan


def trainyard(location: str, locality: int = 0, stage: str | None = None) -> Iterator[int]:
    """The size of each batch; with `stage`, from the moment that all copies are there."""
    index = open_index(location)
    spec = LoaderSpec(
        plan=ShuffledPlan(len(index), BATCH, seed=1, locality=locality),
        crop=RandomResizedCrop(seed=1, scale=SCALE, ratio=RATIO, flip=0.5),
        image_size=SIDE,
        stop=10**6,
        threads=THREADS,
        stage=stage,
    )
    staged = None if stage is None else StagedShards(index, stage)
    with Loader(index, spec) as loader:
        for batch in loader:
            assert not batch.bad
            if staged is not None and staged.missing():
                staged.refresh()
                continue
            yield len(batch.ids)
