"""DALI on the CPU: its threads read, decode the crop, resize and flip."""

from importlib import import_module
from typing import Any

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job


def files(job: Job) -> Epoch:
    return _make(job, antialias=True)


def not_antialiased(job: Job) -> Epoch:
    return _make(job, antialias=False)


def webdataset(job: Job) -> Epoch:
    return _make(job, antialias=True, shards=sorted(map(str, job.data.glob("*.tar"))))


def _make(job: Job, *, antialias: bool, shards: list[str] | None = None) -> Epoch:
    dali, fn = import_module("nvidia.dali"), import_module("nvidia.dali.fn")
    plugin = import_module("nvidia.dali.plugin.pytorch")

    def graph() -> tuple[Any, Any]:
        common = {"random_shuffle": True, "initial_fill": 500, "name": "reader"}
        if shards is None:
            encoded, labels = fn.readers.file(file_root=str(job.data), **common)
        else:
            encoded, text = fn.readers.webdataset(paths=shards, ext=["jpg", "cls"], **common)
            labels = text
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        linear = dali.types.INTERP_LINEAR
        images = fn.resize(images, size=[SIDE, SIDE], interp_type=linear, antialias=antialias)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    pipeline = dali.pipeline_def(graph)(
        batch_size=BATCH, num_threads=job.cores, device_id=None, prefetch_queue_depth=2
    )
    policy = plugin.LastBatchPolicy.DROP
    names = ["images", "labels"]
    loader = plugin.DALIGenericIterator(
        pipeline, names, reader_name="reader", last_batch_policy=policy, auto_reset=True
    )
    return lambda: ((batch[0]["images"], batch[0]["labels"]) for batch in loader)
