"""grain: a lazy data set over files, read and decoded by its threads."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loaders.measure import BATCH, Epoch, Job
from benchmarks.loaders.peers.listing import listed
from benchmarks.loaders.peers.random_crop import random_image


def _load(sample: tuple[str, int]) -> dict[str, Any]:
    path, label = sample
    return {"image": random_image(Path(path).read_bytes()).numpy(), "label": np.int64(label)}


def threads(job: Job) -> Epoch:
    grain = import_module("grain")
    data = grain.MapDataset.source(listed(job.data)).seed(0).shuffle().repeat(None).map(_load)
    data = data.batch(BATCH)
    options = grain.ReadOptions(num_threads=job.cores, prefetch_buffer_size=4)
    batches = data.to_iter_dataset(options)
    return lambda: (
        (torch.from_numpy(batch["image"]), torch.from_numpy(batch["label"])) for batch in batches
    )
