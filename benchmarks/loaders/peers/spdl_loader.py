"""SPDL: a pipeline of threads; FFmpeg decodes, crops, scales and flips."""

import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import simplejpeg
import torch

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job
from benchmarks.loaders.peers.listing import listed
from benchmarks.loaders.peers.random_crop import random_box, random_image


def _by_ffmpeg(sample: tuple[str, int]) -> tuple[Any, int]:
    spdl = import_module("spdl.io")
    content = Path(sample[0]).read_bytes()
    height, width = simplejpeg.decode_jpeg_header(content)[:2]
    left, top, right, bottom = random_box(width, height)
    steps = f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1"
    steps += f",scale={SIDE}:{SIDE}:flags=bilinear" + ",hflip" * (random.random() < 0.5)
    frames = spdl.load_image(content, filter_desc=f"{steps},format=pix_fmts=rgb24")
    return torch.from_numpy(spdl.to_numpy(frames)), sample[1]


def _by_simplejpeg(sample: tuple[str, int]) -> tuple[Any, int]:
    return random_image(Path(sample[0]).read_bytes()), sample[1]


def _batch(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def ffmpeg(job: Job) -> Epoch:
    return _make(job, _by_ffmpeg)


def with_simplejpeg(job: Job) -> Epoch:
    return _make(job, _by_simplejpeg)


def _make(job: Job, load: Any) -> Epoch:
    pipeline, samples = import_module("spdl.pipeline"), listed(job.data)

    def epoch() -> Iterator[tuple[Any, Any]]:
        random.shuffle(samples)
        builder = pipeline.PipelineBuilder().add_source(list(samples))
        builder = builder.pipe(load, concurrency=job.cores).aggregate(BATCH, drop_last=True)
        built = builder.pipe(_batch).add_sink(3).build(num_threads=job.cores + 1)
        with built.auto_stop():
            yield from built.get_iterator()

    return epoch
