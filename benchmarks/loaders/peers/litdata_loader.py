"""litdata: chunks of its own kind, read by worker processes."""

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.loaders.measure import BATCH, Epoch, Job
from benchmarks.loaders.peers.listing import listed
from benchmarks.loaders.peers.random_crop import random_image


def make(job: Job) -> Epoch:
    litdata = import_module("litdata")
    data = litdata.StreamingDataset(str(job.data), shuffle=True, drop_last=True, transform=_load)
    loader = litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=job.cores, persistent_workers=True
    )
    return lambda: loader


def _load(sample: dict[str, Any]) -> tuple[Any, int]:
    return random_image(sample["image"]), sample["label"]


def _read(sample: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(sample[0]).read_bytes(), "label": sample[1]}


def write(folder: Path, out: Path) -> None:
    _write(folder, out, chunk_bytes="64MB")


def write_even(folder: Path, out: Path) -> None:
    """A dozen chunks. Of a chunk that two workers share, it reads all for every image."""
    _write(folder, out, chunk_size=-(-len(listed(folder)) // 12))


def _write(folder: Path, out: Path, **how: Any) -> None:
    import_module("litdata").optimize(
        fn=_read, inputs=listed(folder), output_dir=str(out), num_workers=1, **how
    )
