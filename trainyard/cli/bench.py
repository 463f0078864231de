"""`trainyard bench loader`: loading speed of a data set on this machine, with advice."""

import argparse
import json
import shlex
from typing import TYPE_CHECKING, Any

from trainyard.arguments import above_zero, positive
from trainyard.cli.data.index import add_location
from trainyard.world import usable_cores

if TYPE_CHECKING:
    from trainyard.data.index.table import Index

_WAYS = {
    "libraries": "decoding, Pillow",
    "stored": "decoding",
    "seek": "decoding, with a seek table",
    "packed": "decoding, packed",
}
_WORTH = 1.1  # smallest speed-up that is worth advice
_NOTABLE = 0.05  # share of images that fall back to the libraries


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard bench` to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    loader = actions.add_parser(
        "loader", help="measure images per second: reading, decoding, loading"
    )
    add_location(loader)
    add = loader.add_argument
    add("--batch", type=positive, default=256, metavar="N", help="images per batch (256)")
    side = "side of a training image (224)"
    add("--size", type=positive, default=224, metavar="PIXELS", help=side)
    add("--channels", type=positive, default=3, metavar="N", help="channels of an image (3)")
    add("--threads", type=positive, metavar="N", help="loader threads; default: one per core")
    total = "total duration in seconds (10)"
    add("--seconds", type=above_zero, default=10.0, metavar="S", help=total)
    loader.set_defaults(run_command=bench_loader)


def bench_loader(options: argparse.Namespace) -> int:
    """Run `trainyard bench loader`. Returns the exit code."""
    speeds = measure(options, *_index_of(options.location))
    if options.json:
        print(json.dumps(speeds))
    else:
        _print(speeds)
    return 0


def _index_of(location: str) -> "tuple[str, Index]":
    """The training split, if there is one, else the first; with its index."""
    from trainyard.cli.data.show import open_splits

    indices = open_splits(location)
    split = "train" if "train" in indices else next(iter(indices))
    return split, indices[split]


def measure(options: argparse.Namespace, split: str, index: "Index") -> dict[str, Any]:
    """Rates of reading, decoding and loading, and advice: the JSON of `bench loader`."""
    from trainyard.data._native import core, is_built
    from trainyard.data.decode.seek_tables import open_seek
    from trainyard.datasets import throughput

    ways = list(_WAYS) if is_built() else ["libraries"]
    cores = usable_cores()
    task = throughput.MeasuredLoad(
        index=index,
        batch=options.batch,
        side=options.size,
        channels=options.channels,
        threads=options.threads or cores,
        seconds=options.seconds / (len(ways) + 2),
    )
    held = throughput.load_samples(task)
    if index.format == "packed":  # packed data uses neither
        ways = [way for way in ways if way in ("libraries", "stored")]
    reading = throughput.reading_rate(task)
    decoding = {way: throughput.decoding_rate(task, held, way) for way in ways}
    loader, first = throughput.loader_rate(task)
    speeds = {
        "location": options.location,
        "split": split,
        "format": index.format,
        "samples": len(index),
        "bytes_per_image": held.bytes_per_image,
        "channels": task.channels,
        "path": core.paths[0] if is_built() else None,
        "fallback": held.fallback,
        "seek_table": open_seek(index) is not None,
        "threads": task.threads,
        "cores": cores,
        "reading": reading,
        "decoding": {way: rate.images_per_second for way, rate in decoding.items()},
        "decoding_bytes": {way: rate.bytes_per_image for way, rate in decoding.items()},
        "loader": loader,
        "first_batch_s": first,
    }
    return speeds | {"advice": advice(speeds)}


def advice(speeds: dict[str, Any]) -> str:
    """One sentence of advice for faster loading here."""
    from trainyard.installation import NEEDS_EXTENSION

    location, decoding = shlex.quote(speeds["location"]), speeds["decoding"]
    if speeds["path"] is None:
        return f"the extension in C decodes several times as fast: {NEEDS_EXTENSION}"
    now = decoding["seek" if speeds["seek_table"] and "seek" in decoding else "stored"]
    if speeds["reading"] < _WORTH * now:
        return (
            "reading is what takes long: with `data.stage` set to a folder on a local disk, "
            "training reads copies"
        )
    if speeds["threads"] < speeds["cores"]:
        return f"more threads: this machine has {speeds['cores']} cores"
    if speeds["fallback"] > _NOTABLE and speeds["channels"] in (1, 3):
        return (
            f"{speeds['fallback']:.0%} of the images are no baseline JPEGs, which are "
            "decoded several times as fast: see `trainyard data pack --short`"
        )
    better = []
    if not speeds["seek_table"] and decoding.get("seek", 0) > _WORTH * now:
        gain = decoding["seek"] / now
        better.append(f"`trainyard data index {location} --seek` ({gain:.1f} x)")
    if decoding.get("packed", 0) > _WORTH * now:
        gain = decoding["packed"] / now
        larger = speeds["decoding_bytes"]["packed"] / speeds["bytes_per_image"]
        better.append(
            f"`trainyard data pack {location} DESTINATION --format packed` ({gain:.1f} x, in "
            f"{larger:.1f} times the bytes)"
        )
    if better:
        return f"decoding is faster after {', or after '.join(better)}"
    return "nothing that we know of would be faster, but smaller images and more cores"


def _print(speeds: dict[str, Any]) -> None:
    from trainyard.cli.printing import print_table, print_text
    from trainyard.printable import in_bytes

    threads = speeds["threads"]
    per_core = min(threads, speeds["cores"])
    rates = {"reading": speeds["reading"]}
    rates |= {_WAYS[way]: rate for way, rate in speeds["decoding"].items()}
    rates["whole loader" + ", with its seek table" * speeds["seek_table"]] = speeds["loader"]
    rows = [[what, f"{rate:,.0f}", f"{rate / per_core:,.0f}"] for what, rate in rates.items()]
    path = speeds["path"] or "not built"
    print_text(
        f"{speeds['split']}: {speeds['samples']:,} samples of "
        f"{in_bytes(speeds['bytes_per_image'])}, {speeds['format']}; threads {threads}, "
        f"cores {speeds['cores']}, extension {path}, "
        f"left to the libraries {speeds['fallback']:.1%}"
    )
    print_table(["", "images/s", "of a core"], rows)
    print_text(f"First batch after {speeds['first_batch_s']:.2f} s. Advice: {speeds['advice']}.")
