"""One loader on one location, in a process of its own that prints a line of JSON; see remote.py.

python -m benchmarks.remotes.contender NAME LOCATION [--locality N] [--stage] [--seconds S]

LOCATION is a brace list of shards, as a path or a URL of server.py.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.loaders.measure import cpu_seconds, end_tree, processes
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.index.build import open_index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.staged_copies import Copies
from trainyard.data.sampler.plan import ShuffledPlan

BATCH, SIDE, THREADS = 64, 224, 2
_WARM_S = 1.0
_SAMPLE_S = 0.1  # between two looks at the memory
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def trainyard(location: str, locality: int, stage: str | None) -> Iterator[int]:
    """The size of each batch; with `stage`, from the moment that all copies are there."""
    index = open_index(location)
    spec = LoaderSpec(
        plan=ShuffledPlan(len(index), BATCH, seed=1, locality=locality),
        crop=RandomResizedCrop(seed=1, scale=SCALE, ratio=RATIO, flip=0.5),
        image_size=SIDE,
        stop=10**6,
        threads=THREADS,
        stage=stage,
    )
    copies = None if stage is None else Copies(index, Path(stage))
    with Loader(index, spec) as loader:
        for batch in loader:
            assert not batch.bad
            if copies is not None and copies.missing():
                copies.refresh()
                continue
            yield len(batch.ids)


def webdataset(location: str, *_: object) -> Iterator[int]:
    """Shards read in a row by curl for two worker processes, decoded by torchvision."""
    torch = import_module("torch")
    package, image = import_module("webdataset"), _torchvision()
    torch.set_num_threads(1)
    data = package.WebDataset(f"pipe:curl -sfL {location}", resampled=True, shardshuffle=False)
    data = data.shuffle(500).to_tuple("jpg", "cls").map_tuple(image, int).batched(BATCH)
    for images, _ in package.WebLoader(data, batch_size=None, num_workers=THREADS):
        yield len(images)


def webdataset_bytes(location: str, *_: object) -> Iterator[int]:
    """The same without decoding."""
    package = import_module("webdataset")
    data = package.WebDataset(f"pipe:curl -sfL {location}", resampled=True, shardshuffle=False)
    data = data.shuffle(500).to_tuple("jpg", "cls").map_tuple(len, int).batched(BATCH)
    for sizes, _ in package.WebLoader(data, batch_size=None, num_workers=THREADS):
        yield len(sizes)


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


CONTENDERS = {
    "trainyard": trainyard,
    "webdataset": webdataset,
    "webdataset-bytes": webdataset_bytes,
}


# --- what is measured ---


def counts(location: str) -> dict[str, int]:
    """The requests that the server has counted since the last call; none for a local path."""
    if not location.startswith("http"):
        return {"requests": 0, "bytes": 0, "most": 0}
    with urlopen(f"{location.rpartition('/')[0]}/-/counts") as answer:
        found: dict[str, int] = json.load(answer)
        return found


class Memory:
    """The most memory of the processes below this one: of no file, in proportion to who shares."""

    def __init__(self) -> None:
        self.most_mb = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most_mb = max(self.most_mb, sum(map(_anonymous_mb, processes()[1:])))
            time.sleep(_SAMPLE_S)


def _anonymous_mb(pid: int) -> float:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        fields = dict(line.split()[:2] for line in lines[1:])
        return (int(fields["Pss_Anon:"]) + int(fields["Pss_Shmem:"])) / 1e3
    return 0.0


def measure(batches: Iterator[int], location: str, seconds: float) -> dict[str, float]:
    memory, begun = Memory(), time.perf_counter()
    count = next(batches)
    first_s = time.perf_counter() - begun
    while time.perf_counter() < begun + first_s + _WARM_S:
        next(batches)
    counts(location)
    begun, cpu, count = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() < begun + seconds:
        count += next(batches)
    seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
    asked = counts(location)
    return {
        "images_per_second": count / seconds,
        "cpu_ms": cpu / count * 1000,
        "requests": asked["requests"] / count,
        "kb": asked["bytes"] / count / 1e3,
        "in_flight": asked["most"],
        "first_s": first_s,
        "memory_mb": memory.most_mb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("location")
    parser.add_argument("--locality", type=int, default=0)
    parser.add_argument("--stage", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stage = folder if options.stage else None
        batches = CONTENDERS[options.name](options.location, options.locality, stage)
        print(json.dumps(measure(batches, options.location, options.seconds)), flush=True)
    end_tree()


if __name__ == "__main__":
    main()
