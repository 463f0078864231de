"""Ours, as a run uses it: a loader process of so many threads, batches in shared memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job
from trainyard.data.augment import RandomResizedCrop
from trainyard.data.indexing import open_index
from trainyard.data.loader import Loader, LoaderSpec
from trainyard.data.plan import ShuffledPlan

_STEPS = 1 << 40


def make(job: Job) -> Epoch:
    index = open_index(_location(job.data))
    crop = RandomResizedCrop(seed=0, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)
    plan = ShuffledPlan(len(index), global_batch=BATCH, seed=0)
    spec = LoaderSpec(
        plan=plan,
        crop=crop,
        image_size=SIDE,
        interpolation="bilinear",
        start=0,
        stop=_STEPS,
        rank=0,
        size=1,
        threads=job.cores,
    )

    def epoch() -> Iterator[tuple[Any, Any]]:
        with Loader(index, spec) as loader:
            for batch in loader:
                assert not batch.bad
                yield torch.from_numpy(batch.images_BHWC), torch.from_numpy(batch.labels)

    return epoch


def _location(folder: Path) -> str:
    """The split that `data pack` has made in a folder, or the folder of images itself."""
    from trainyard.data.splits import all_splits

    return next(iter(all_splits(str(folder)).values()))
