"""Decoders alone: the same photographs and crops, of one core, in turns; run by loader.py.

python -m benchmarks.loaders.decoders FOLDER --images N --rounds N

Each contender turns a JPEG in memory into a random crop of 224 x 224, antialiased, flipped or not,
in a uint8 batch of 64. The clock counts the CPU time of the process and all its threads, on one
core. Beside each stands how near its pixels come to those of Pillow's full decode and resize, in dB
(PSNR). Prints one line of JSON.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import sklearn.datasets
import torch
from numpy.typing import NDArray

from benchmarks.loaders.catalogue import FULL, SMALL
from benchmarks.loaders.peers import functions
from benchmarks.loaders.pool import BATCH, SIDE, Pool, load_pool
from benchmarks.loaders.variants import data_of
from benchmarks.loaders.yardstick.build import Yardstick, slice_of
from trainyard.data._native import core, own_decoder
from trainyard.data.decode.crops import Crops
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.packed_record import record_of_pixels
from trainyard.data.storage.encoded import in_memory

Pixels = NDArray[np.uint8]
Decode = Callable[[Pixels], None]
"""Decodes the same 64 images into uint8[64, 224, 224, 3]."""
Contender = Callable[[Pool, range], Decode]

YARDSTICK = "libjpeg-turbo, crop decode + resize in C"


def one_by_one(function: functions.Function) -> Contender:
    def prepare(pool: Pool, numbers: range) -> Decode:
        def decode(out: Pixels) -> None:
            for place, n in enumerate(numbers):
                out[place] = function(pool.encoded[n], pool.box(n), bool(pool.flips[n]))

        return decode

    return prepare


def yardstick(folder: Path) -> Contender:
    own = Yardstick(folder / "yardstick.so")

    def prepare(pool: Pool, numbers: range) -> Decode:
        images = slice_of(pool, numbers)
        return lambda out: own.decode(images, out)

    return prepare


def trainyard(kind: str, path: str | None = None) -> Contender:
    """One call for 64 images, as the loader's threads make it."""
    own = core.Decoder(path)

    def prepare(pool: Pool, numbers: range) -> Decode:
        contents = [_stored_as(kind, pool.encoded[n], own) for n in numbers]
        images = in_memory(contents)
        boxes, flips = pool.boxes[list(numbers)].astype(np.float64), pool.flips[list(numbers)]
        status = np.zeros(BATCH, np.uint8)
        options: dict[str, Any] = {"height": SIDE, "width": SIDE}
        if kind == "seek":
            options["seek"] = in_memory([own.seek_table(content) or b"" for content in contents])

        def decode(out: Pixels) -> None:
            own.decode(*images, boxes, flips, out, status, **options)
            assert not status.any()

        return decode

    return prepare


def _stored_as(kind: str, content: bytes, own: "core.Decoder") -> bytes:
    if kind == "pixels":
        return record_of_pixels(simplejpeg.decode_jpeg(content, "RGB"))
    packed = own.pack(content) if kind == "packed" else None
    return packed or content


def without_extension(pool: Pool, numbers: range) -> Decode:
    """Ours where there is no compiler."""
    chosen = list(numbers)
    contents = [pool.encoded[n] for n in chosen]
    crops = Crops(pool.boxes[chosen].astype(np.float64), pool.flips[chosen])

    def decode(out: Pixels) -> None:
        assert not decode_batch(contents, lambda _: crops, out, "bilinear")

    return decode


def ours() -> dict[str, Contender]:
    found: dict[str, Contender] = {"Trainyard without its extension": without_extension}
    if own_decoder() is None:
        return found
    for name, kind in (
        ("packed", "packed"), ("seek table", "seek"), ("plain JPEG", "plain")
    ):  # fmt: skip
        found[f"Trainyard, {name}"] = trainyard(kind)
    for path in core.paths[1:]:
        found[f"Trainyard, plain JPEG, path {path!r}"] = trainyard("plain", path)
    return found


def peers(folder: Path) -> dict[str, Contender]:
    found = {
        "nvImageCodec's crop decode + torch": functions.nvimgcodec,
        "simplejpeg + torch": functions.simplejpeg_torch,
        "simplejpeg + OpenCV's INTER_AREA": functions.simplejpeg_area,
        "torchvision, tensors": functions.torchvision_tensors,
        "torchcodec + torch": functions.torchcodec,
        "PyTurboJPEG's lossless crop + torch": functions.pyturbojpeg(folder),
        "Pillow, draft": functions.pillow_draft,
        "Pillow: torchvision's and timm's PIL": functions.pillow,
    }
    return {name: one_by_one(function) for name, function in found.items() if _works(function)}


def _works(function: functions.Function) -> bool:
    images = Path(sklearn.datasets.__file__).parent / "images"
    content = (images / "china.jpg").read_bytes()
    try:
        function(content, (10, 10, 200, 200), False)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"left out: {function.__name__}: {error}", file=sys.stderr)
        return False
    return True


# --- measuring ---


def wanted(pool: Pool) -> list[Pixels]:
    """Pillow's batches."""
    found = []
    for numbers in pool.batches():
        found.append(np.empty((BATCH, SIDE, SIDE, 3), np.uint8))
        one_by_one(functions.pillow)(pool, numbers)(found[-1])
    return found


def quality(decoders: list[Decode], references: list[Pixels]) -> dict[str, float]:
    """PSNR of each crop against Pillow's, in dB."""
    found = []
    out = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)
    for decode, reference in zip(decoders, references, strict=True):
        decode(out)
        for pixels, right in zip(out.astype(np.float32), reference, strict=True):
            error = np.square(pixels - right).mean(dtype=np.float64)
            found.append(10 * np.log10(255**2 / max(error, 1e-5)))
    low, median = np.percentile(found, [5, 50])
    return {"median_db": median, "low_db": low, "least_db": min(found)}


def measure(contenders: dict[str, list[Decode]], rounds: int) -> dict[str, list[float]]:
    """Images a second of each round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    out = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)
    for number in range(rounds + 1):  # what the first one costs is not counted
        names = list(contenders)
        random.Random(number).shuffle(names)
        for name in names:
            begun = time.process_time()
            for decode in contenders[name]:
                decode(out)
            seconds = time.process_time() - begun
            if number:
                rates[name].append(BATCH * len(contenders[name]) / seconds)
    return rates


def pools(folder: Path, images: int) -> dict[str, Pool]:
    found = {}
    for title, variant in ((FULL, "photographs"), (SMALL, "small")):
        paths = sorted((data_of(folder) / variant).glob("*/*.jp*g"), key=lambda path: path.name)
        found[title] = load_pool(paths[:images])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    torch.set_num_threads(1)
    own, found = ours(), {}
    full = {YARDSTICK: yardstick(options.folder)} | own | peers(options.folder)
    small = {name: full[name] for name in (YARDSTICK, *list(own)[1:4], "simplejpeg + torch")}
    if core is not None:
        small["Trainyard, packed pixels"] = trainyard("pixels")
    for (title, pool), chosen in zip(
        pools(options.folder, options.images).items(), (full, small), strict=True
    ):
        prepared = {
            name: [prepare(pool, numbers) for numbers in pool.batches()]
            for name, prepare in chosen.items()
        }
        rates, references = measure(prepared, options.rounds), wanted(pool)
        found[title] = {
            name: {"images_per_second": rates[name]} | quality(prepared[name], references)
            for name in chosen
        }
        _say(title, rates)
    version = Yardstick(options.folder / "yardstick.so").version
    about: dict[str, Any] = {"libjpeg_turbo": version, "path": core and core.paths[0]}
    print(json.dumps({"decoders": found} | about))


def _say(title: str, rates: dict[str, list[float]]) -> None:
    base = statistics.median(rates[YARDSTICK])
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"{title}: {name}: {rate:,.0f}, {rate / base:.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
