"""What one can build oneself: Python threads that make a batch each, around one decoder."""

import queue
import random
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job
from benchmarks.loaders.peers.functions import resized
from benchmarks.loaders.peers.listing import listed
from benchmarks.loaders.peers.random_crop import random_box, random_image

Fill = Callable[[list[bytes], Tensor], None]
"""Decodes a batch into uint8[64, 224, 224, 3]."""


def with_simplejpeg(job: Job) -> Epoch:
    def fill(contents: list[bytes], out_BHWC: Tensor) -> None:
        for number, content in enumerate(contents):
            out_BHWC[number] = random_image(content)

    return _threaded(job, lambda: fill)


def with_nvimgcodec(job: Job) -> Epoch:
    """One call for a batch; its CPU decoder takes the crop alone."""
    codec = import_module("nvidia.nvimgcodec")

    def decoder() -> Fill:
        kind = codec.Backend(codec.BackendKind.CPU_ONLY)
        cpu = codec.NVIMGCODEC_DEVICE_CPU_ONLY
        own = codec.Decoder(device_id=cpu, max_num_cpu_threads=1, backends=[kind])

        def fill(contents: list[bytes], out_BHWC: Tensor) -> None:
            streams = []
            for content in contents:
                stream = codec.CodeStream(content)
                left, top, right, bottom = random_box(stream.width, stream.height)
                region = codec.Region(top, left, bottom, right)
                streams.append(stream.get_sub_code_stream(region=region))
            for number, image in enumerate(own.decode(streams)):
                image_CHW = torch.from_numpy(np.asarray(image)).permute(2, 0, 1)
                pixels = resized(image_CHW, random.random() < 0.5)
                out_BHWC[number] = torch.from_numpy(pixels)

        return fill

    return _threaded(job, decoder)


def with_yardstick(job: Job) -> Epoch:
    """libjpeg-turbo's crop decode and a resize in C, one call for a batch."""
    from benchmarks.loaders.yardstick.build import Slice, Yardstick, address

    library = next(path for path in (p / "yardstick.so" for p in job.data.parents) if path.exists())

    def decoder() -> Fill:
        own = Yardstick(library)

        def fill(contents: list[bytes], out_BHWC: Tensor) -> None:
            sizes = [simplejpeg.decode_jpeg_header(content)[1::-1] for content in contents]
            addresses = [address(content) for content in contents]
            images = Slice(
                np.array(addresses, np.uintp),
                np.array([len(content) for content in contents], np.int64),
                np.array([random_box(*size) for size in sizes], np.int32),
                np.array([random.random() < 0.5 for _ in contents], np.uint8),
            )
            own.decode(images, out_BHWC.numpy())

        return fill

    return _threaded(job, decoder)


def _threaded(job: Job, decoder: Callable[[], Fill]) -> Epoch:
    samples = listed(job.data)

    def epoch() -> Iterator[tuple[Any, Any]]:
        random.shuffle(samples)
        batches = [samples[i : i + BATCH] for i in range(0, len(samples) - BATCH + 1, BATCH)]
        queues: list[queue.Queue[Any]] = [queue.Queue(2) for _ in range(job.cores)]

        def work(number: int) -> None:
            fill = decoder()
            for batch in batches[number :: job.cores]:
                out_BHWC = torch.empty((BATCH, SIDE, SIDE, 3), dtype=torch.uint8)
                fill([Path(path).read_bytes() for path, _ in batch], out_BHWC)
                queues[number].put((out_BHWC, torch.tensor([label for _, label in batch])))

        for number in range(job.cores):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        for number in range(len(batches)):
            yield queues[number % job.cores].get()

    return epoch
