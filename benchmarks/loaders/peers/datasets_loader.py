"""Hugging Face's datasets: Parquet, copied into Arrow files once, read by worker processes."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job
from benchmarks.loaders.peers.listing import listed

_ROWS, _GROUP = 5000, 100  # of a file, of a row group
_CROP = [v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()]
_FROM_PILLOW = v2.Compose([*_CROP, v2.PILToTensor()])
_FROM_TENSOR = v2.Compose(_CROP)


def load(folder: str) -> Any:
    """The data set of a folder of Parquet; the first call copies it into Arrow files."""
    files = sorted(map(str, Path(folder).glob("*.parquet")))
    return import_module("datasets").load_dataset("parquet", data_files=files, split="train")


def pil(job: Job) -> Epoch:
    """As the documentation of datasets has it."""
    return _loader(load(str(job.data)).with_transform(_from_pillow), job)


def tensors(job: Job) -> Epoch:
    """Decoded by torchvision instead of Pillow."""
    data = load(str(job.data))
    data = data.cast_column("image", import_module("datasets").Image(decode=False))
    return _loader(data.with_transform(_from_bytes), job)


def _loader(data: Any, job: Job) -> Epoch:
    loader: Any = DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=job.cores,
        persistent_workers=True,
        drop_last=True,
        collate_fn=_collated,
    )
    return lambda: loader


def _from_pillow(rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {"image": [_FROM_PILLOW(image.convert("RGB")) for image in rows["image"]]}


def _from_bytes(rows: dict[str, Any]) -> dict[str, Any]:
    contents = [
        torch.frombuffer(bytearray(row["bytes"]), dtype=torch.uint8) for row in rows["image"]
    ]
    images = [_FROM_TENSOR(decode_jpeg(content, ImageReadMode.RGB)) for content in contents]
    return rows | {"image": images}


def _collated(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    return torch.stack([row["image"] for row in rows]), torch.tensor([row["label"] for row in rows])


def write(folder: Path, out: Path) -> None:
    """Class folders as datasets writes them for the Hub: row groups of 100, uncompressed."""
    for path, data in _files(folder, out):
        data.to_parquet(path, batch_size=_GROUP)


def write_snappy(folder: Path, out: Path) -> None:
    """As older versions of datasets did: pyarrow's own settings."""
    parquet = import_module("pyarrow.parquet")
    for path, data in _files(folder, out):
        with parquet.ParquetWriter(path, data.features.arrow_schema) as writer:
            writer.write_table(data.data.table, row_group_size=_GROUP)


def _files(folder: Path, out: Path) -> Iterator[tuple[Path, Any]]:
    """Paths, and the data sets to be written there."""
    datasets = import_module("datasets")
    samples = listed(folder)
    names = [f"c{number:02d}" for number in range(1 + max(label for _, label in samples))]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    out.mkdir()
    for first in range(0, len(samples), _ROWS):
        rows = samples[first : first + _ROWS]
        images = [{"bytes": Path(path).read_bytes(), "path": Path(path).name} for path, _ in rows]
        table = {"image": images, "label": [label for _, label in rows]}
        path = out / f"train-{first // _ROWS:05d}.parquet"
        yield path, datasets.Dataset.from_dict(table, features=features)
