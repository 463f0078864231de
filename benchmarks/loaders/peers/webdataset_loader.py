"""webdataset: shards read in a row by worker processes, decoded by torchvision."""

from importlib import import_module
from typing import Any

import torch
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job

_TRANSFORM = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])


def _image(content: bytes) -> Any:
    encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return _TRANSFORM(decode_jpeg(encoded, ImageReadMode.RGB))


def make(job: Job) -> Epoch:
    webdataset = import_module("webdataset")
    shards = sorted(map(str, job.data.glob("*.tar")))
    data = webdataset.WebDataset(shards, resampled=True, shardshuffle=False)
    data = data.shuffle(500).to_tuple("jpg", "cls").map_tuple(_image, int).batched(BATCH)
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=job.cores)
    return lambda: loader
