"""torchvision's and timm's ways: a DataLoader whose worker processes decode."""

from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job


def _loader(dataset: Any, job: Job) -> Any:
    return DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=job.cores,
        persistent_workers=True,
        prefetch_factor=2,
    )


def _transform(*last: Any) -> v2.Compose:
    crop = v2.RandomResizedCrop(SIDE, antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip(), *last])


def pil(job: Job) -> Epoch:
    loader = _loader(ImageFolder(str(job.data), _transform(v2.PILToTensor())), job)
    return lambda: loader


def _decode(path: str) -> torch.Tensor:
    image: torch.Tensor = decode_jpeg(read_file(path), ImageReadMode.RGB)
    return image


def tensors(job: Job) -> Epoch:
    loader = _loader(ImageFolder(str(job.data), _transform(), loader=_decode), job)
    return lambda: loader


def timm(job: Job) -> Epoch:
    """timm's own, up to the uint8 batch: what comes after is the device's work."""
    data = import_module("timm.data")
    loader = data.create_loader(
        data.create_dataset("", str(job.data)),
        input_size=(3, SIDE, SIDE),
        batch_size=BATCH,
        is_training=True,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=job.cores,
        device=torch.device("cpu"),
    )
    return lambda: loader.loader
