"""FFCV: files of its own kind, a pipeline that numba compiles, threads."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job
from benchmarks.loaders.peers.listing import listed


def make(job: Job) -> Epoch:
    loader, transforms = import_module("ffcv.loader"), import_module("ffcv.transforms")
    decoders = import_module("ffcv.fields.decoders")
    image = [
        decoders.RandomResizedCropRGBImageDecoder((SIDE, SIDE)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
    label = [decoders.IntDecoder(), transforms.ToTensor()]
    epochs = loader.Loader(
        str(job.data),
        batch_size=BATCH,
        num_workers=job.cores,
        order=loader.OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": image, "label": label},
    )
    return lambda: epochs


class _Listed:
    """Encoded images and classes, as FFCV's writer takes a data set."""

    def __init__(self, folder: Path) -> None:
        self._samples = listed(folder)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        path, label = self._samples[number]
        return Path(path).read_bytes(), label


def write(folder: Path, out: Path) -> None:
    """The JPEGs as they are, not encoded anew."""
    _write(folder, out, "jpg")


def write_raw(folder: Path, out: Path) -> None:
    _write(folder, out, "raw")


def _write(folder: Path, out: Path, mode: str) -> None:
    fields = import_module("ffcv.fields")
    image = fields.RGBImageField(write_mode=mode)
    rgb = import_module("ffcv.fields.rgb_image").RGBImageField
    rgb.encode = _encode(rgb.encode, mode)
    writer = import_module("ffcv.writer").DatasetWriter(
        str(out), {"image": image, "label": fields.IntField()}, num_workers=1
    )
    writer.from_indexed_dataset(_Listed(folder), shuffle_indices=True)


def _encode(original: Callable[..., None], mode: str) -> Callable[..., None]:
    def encode(self: Any, destination: Any, content: bytes, malloc: Callable[..., Any]) -> None:
        if mode == "raw":
            original(self, destination, simplejpeg.decode_jpeg(content, "RGB"), malloc)
            return
        height, width = simplejpeg.decode_jpeg_header(content)[:2]
        destination["mode"] = 0
        destination["height"], destination["width"] = height, width
        destination["data_ptr"], storage = malloc(len(content))
        storage[:] = np.frombuffer(content, np.uint8)

    return encode
