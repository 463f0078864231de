"""Ours, as a run uses it: a loader process of so many threads, batches in shared memory."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.decode.seek_tables import seek_remark
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import all_splits
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.sampler.plan import ShuffledPlan

_STEPS = 1 << 40


CROP = RandomResizedCrop(seed=0, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)


def make(job: Job) -> Epoch:
    index = index_of(job.data)
    if said := seek_remark(index):  # a table that is not used would be measured as if it were
        sys.exit(said)
    plan = ShuffledPlan(len(index), global_batch=BATCH, seed=0)
    spec = LoaderSpec(plan=plan, crop=CROP, image_size=SIDE, stop=_STEPS, threads=job.cores)

    def epoch() -> Iterator[tuple[Any, Any]]:
        with Loader(index, spec) as loader:
            for batch in loader:
                assert not batch.bad
                yield torch.from_numpy(batch.images_BHWC), torch.from_numpy(batch.labels)

    return epoch


def index_of(folder: Path) -> Index:
    """Of the split that `data pack` has made in a folder, or of the folder of images itself."""
    return open_index(next(iter(all_splits(str(folder)).values())))
