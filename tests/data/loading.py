"""Loaders of digits, and what they give."""

import dataclasses
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.images import encode
from trainyard.data.batch import HostBatch
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.sampler.plan import ShuffledPlan

PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]


CROP = RandomResizedCrop(seed=3, scale=(0.5, 1.0), ratio=(0.8, 1.25), flip=0.5)


def spec(**changes: Any) -> LoaderSpec:
    """Steps 43 to 49 of 32 digits each: an epoch ends in the third of them."""
    usual = LoaderSpec(
        plan=ShuffledPlan(1433, 32, seed=3), crop=CROP, image_size=24, start=43, stop=49, threads=2
    )
    return dataclasses.replace(usual, **changes)


def copied(batch: HostBatch) -> HostBatch:
    columns = batch.map(np.copy).columns()
    return dataclasses.replace(batch, **columns, images_BHWC=batch.images_BHWC.copy())


def all_batches(index: Index, config: LoaderSpec) -> list[HostBatch]:
    with Loader(index, config) as loader:
        return [copied(batch) for batch in loader]


def jpeg(seed: int) -> bytes:
    """A stretch of a photograph, another one for each number."""
    left, top = seed * 7 % 400, seed * 5 % 200
    return encode(PHOTOGRAPHS[seed % 2].crop((left, top, left + 150, top + 130)), quality=90)
