"""MosaicML's streaming: shards of its own kind (MDS), read by worker processes."""

from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.loaders.measure import BATCH, Epoch, Job
from benchmarks.loaders.peers.listing import listed
from benchmarks.loaders.peers.random_crop import random_image


def _decoded(samples: list[dict[str, Any]]) -> tuple[Any, Any]:
    import torch

    images = torch.stack([random_image(sample["image"]) for sample in samples])
    return images, torch.tensor([sample["label"] for sample in samples])


def make(job: Job) -> Epoch:
    streaming = import_module("streaming")
    data = streaming.StreamingDataset(local=str(job.data), shuffle=True, batch_size=BATCH)
    loader: Any = DataLoader(
        data,
        BATCH,
        num_workers=job.cores,
        persistent_workers=True,
        drop_last=True,
        collate_fn=_decoded,
    )
    return lambda: loader


def write(folder: Path, out: Path) -> None:
    columns = {"image": "bytes", "label": "int"}
    with import_module("streaming").MDSWriter(out=str(out), columns=columns) as writer:
        for path, label in listed(folder):
            writer.write({"image": Path(path).read_bytes(), "label": label})
