"""Transforms of a batch on the device: microseconds an image, kernels, and the host's own time.

The clock runs over several batches, up to the end of the device's work. The host's time is that to
start the work: where it is nearly all, the host bounds the transform.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.findings import Findings, run_part
from benchmarks.gpu.profile import profiled
from tests.data.batches import batch_of_images
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.transforms import (
    PixelTransform,
    batch_transforms,
    pixel_transforms,
)
from trainyard.data.batch import Batch, Keys
from trainyard.data.device.feed import Normalise

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PIXELS: dict[str, dict[str, Any]] = {
    "RandAugment m9": {"randaugment": "rand-m9-mstd0.5-inc1"},
    "RandAugment m15 n2": {"randaugment": "rand-m15-n2-mstd0.5-mmax15-inc1"},
    "3-Augment": {"randaugment": "3a"},
    "colour jitter": {"color_jitter": (0.3, 0.3, 0.3)},
}
_BATCHES: dict[str, dict[str, Any]] = {
    "erasing": {"erasing": 0.25},
    "mixup and CutMix, a draw a batch": {"mixup": 0.8, "cutmix": 1.0},
    "mixup and CutMix, a draw an image": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "elem"},
}


def measure(findings: Findings, dry: bool) -> None:
    device = torch.device("cpu" if dry else "cuda")
    count, side, rounds = (8, 32, 2) if dry else (256, 224, 20)
    generator = torch.Generator().manual_seed(0)
    pixels_BHWC = torch.randint(256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
    pixels_BCHW = pixels_BHWC.to(device).permute(0, 3, 1, 2)
    works: dict[str, Callable[[Keys], Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        normalise = Normalise(device, mean=_MEAN, std=_STD, channels_last=True, dtype=dtype)
        works[f"normalise to {dtype}, channels last"] = partial(_normalised, normalise, pixels_BCHW)
    for name, options in _PIXELS.items():
        (pixel,) = pixel_transforms(AugmentConfig(**options), seed=0, mean=_MEAN)
        works[name] = partial(_augmented, pixel, pixels_BCHW)
    batch = _mixed_batch(pixels_BCHW)
    for name, options in _BATCHES.items():
        (transform,) = batch_transforms(AugmentConfig(**options), seed=0)
        works[name] = partial(transform, batch)
    for name, work in works.items():
        row = _timed(work, count, rounds, device)
        findings.add(f"{count} images of {side} pixels", {"transform": name} | row)


def _normalised(normalise: Normalise, pixels_BCHW: torch.Tensor, _: Keys) -> torch.Tensor:
    return normalise(pixels_BCHW)


def _augmented(transform: PixelTransform, pixels_BCHW: torch.Tensor, keys: Keys) -> torch.Tensor:
    return transform(pixels_BCHW.clone(), keys)  # it may alter its input


def _mixed_batch(pixels_BCHW: torch.Tensor) -> Batch:
    labels = torch.arange(len(pixels_BCHW), device=pixels_BCHW.device)
    return batch_of_images(pixels_BCHW.float().div(255), labels)


def _timed(
    work: Callable[[Keys], Any], count: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    keys = [
        Keys(np.arange(count), np.full(count, number), number * count)
        for number in range(rounds + 2)
    ]
    for one in keys[:2]:
        work(one)
    _finish(device)
    host, started = 0.0, time.perf_counter()
    for one in keys[2:]:
        begun = time.perf_counter()
        work(one)
        host += time.perf_counter() - begun
    _finish(device)
    seconds = time.perf_counter() - started
    row = {
        "us an image": seconds / rounds / count * 1e6,
        "ms a batch": seconds / rounds * 1e3,
        "host's ms a batch": host / rounds * 1e3,
    }
    return row | profiled(lambda: [work(one) for one in keys[2:]], rounds, device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run_part(measure)
