"""Peers as contenders of remote.py: each gives the size of every batch.

webdataset decodes by torchvision. litdata and streaming leave decoding to their users, and get what
the benchmark of local data gives them: simplejpeg and torch, which is faster. Both fetch whole
shards into a folder and keep them: they are measured in their first epoch.
"""

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from benchmarks.loaders.measure import BATCH, SIDE
from benchmarks.remotes.contender import RATIO, SCALE, THREADS

_S3 = {
    "AWS_ACCESS_KEY_ID": "anyone",
    "AWS_SECRET_ACCESS_KEY": "anything",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def webdataset(location: str, _: str) -> Iterator[int]:
    """Shards read in a row by curl for two worker processes, decoded by torchvision."""
    import_module("torch").set_num_threads(1)
    return _webdataset(location, _torchvision())


def webdataset_bytes(location: str, _: str) -> Iterator[int]:
    """The same without decoding."""
    return _webdataset(location, len)


def _webdataset(location: str, decode: Callable[[bytes], Any]) -> Iterator[int]:
    package = import_module("webdataset")
    data = package.WebDataset(f"pipe:curl -sfL {location}", resampled=True, shardshuffle=False)
    data = data.shuffle(500).to_tuple("jpg", "cls").map_tuple(decode, int).batched(BATCH)
    for images, _ in package.WebLoader(data, batch_size=None, num_workers=THREADS):
        yield len(images)


def _torchvision() -> Callable[[bytes], Any]:
    torch, io = import_module("torch"), import_module("torchvision.io")
    v2 = import_module("torchvision.transforms.v2")
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, scale=SCALE, ratio=RATIO, antialias=True),
            v2.RandomHorizontalFlip(),
        ]
    )

    def image(content: bytes) -> Any:
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return transform(io.decode_jpeg(encoded, io.ImageReadMode.RGB))

    return image


def litdata(location: str, folder: str) -> Iterator[int]:
    endpoint, bucket = _endpoint(location)
    import_module("torch").set_num_threads(1)
    package, peer = import_module("litdata"), _peer("litdata")
    # Its client of chunks takes https alone, unless it is told so.
    options = import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS
    options["allow_http"] = "true"
    data = package.StreamingDataset(
        bucket,
        cache_dir=folder,
        shuffle=True,
        drop_last=True,
        transform=peer._load,
        storage_options={"endpoint_url": endpoint},
    )
    loader = package.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=THREADS, persistent_workers=True
    )
    return _sizes(loader)


def streaming(location: str, folder: str) -> Iterator[int]:
    endpoint, bucket = _endpoint(location)
    os.environ["S3_ENDPOINT_URL"] = endpoint
    torch, package, peer = import_module("torch"), import_module("streaming"), _peer("streaming")
    torch.set_num_threads(1)
    import_module("streaming.base.util").clean_stale_shared_memory()
    data = package.StreamingDataset(remote=bucket, local=folder, shuffle=True, batch_size=BATCH)
    for stream in data.streams:  # the workers would share its connection, and mix up the answers
        stream._downloader.clean_up()
    loader = torch.utils.data.DataLoader(
        data,
        BATCH,
        num_workers=THREADS,
        persistent_workers=True,
        drop_last=True,
        collate_fn=peer._decoded,
    )
    return _sizes(loader)


def _endpoint(location: str) -> tuple[str, str]:
    """The server as an S3 endpoint, and the URL of a bucket, of http://HOST/BUCKET."""
    os.environ.update(_S3)
    parts = urlsplit(location)
    return f"{parts.scheme}://{parts.netloc}", f"s3:/{parts.path}"


def _peer(name: str) -> Any:
    return import_module(f"benchmarks.loaders.peers.{name}_loader")


def _sizes(loader: Any) -> Iterator[int]:
    for _ in count():
        for images, _ in loader:
            yield len(images)
