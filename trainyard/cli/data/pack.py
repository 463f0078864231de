"""`trainyard data pack`: converts a data set from any readable to any writable format."""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.arguments import Parser
from trainyard.cli.data.index import add_location
from trainyard.cli.data.packed import print_packed
from trainyard.cli.options import add_processes
from trainyard.errors import InputError

if TYPE_CHECKING:
    from trainyard.data.index.table import Index
    from trainyard.datasets.pack.journal import Part
    from trainyard.datasets.pack.recode import Recode
    from trainyard.datasets.pack.shards import PackOptions

_FORMATS = (
    "webdataset",
    "hdf5",
    "folder",
    "packed",
    "parquet",
)  # --help needs no import
_SAMPLES = 1000
_ANY_NUMBER = 1 << 62  # samples per shard, if bytes or nothing limit it
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data pack` to its parser."""
    add_location(parser)
    add = parser.add_argument
    add("destination", metavar="DESTINATION", help="folder to create")
    add_processes(parser)
    add = parser.add_argument_group("which samples, in which order").add_argument
    add(
        "--classes",
        metavar="N|FILE|A,B,…",
        help="N random classes, the lines of a file, or a list of names",
    )
    add("--seed", type=int, default=0, help="seed of the order and of --classes N")
    add("--no-shuffle", action="store_true", help="keep the stored order of train")
    _add_recoding(parser.add_argument_group("how images are stored"))
    add = parser.add_argument_group("what to write").add_argument
    add(
        "--format",
        choices=_FORMATS,
        required=True,
        help="format to write; a folder has checksums of its images, for sha256sum -c",
    )
    add("--name", help="prefix of shard names; default imagenet")
    add("--split", help="split name if LOCATION has no train and val")
    add(
        "--shard-samples",
        type=int,
        metavar="N",
        help=f"default {_SAMPLES:,}; HDF5: all in one file",
    )
    add("--shard-size", type=_bytes, metavar="SIZE", help="such as 1GB")
    add(
        "--part",
        type=_part,
        metavar="I/N",
        help="write one of N shares of the shards, on machines that share DESTINATION; then, once "
        "all are done, give the command without --part",
    )
    parser.set_defaults(run_command=data_pack)


def _add_recoding(parser: Parser) -> None:
    parser.add_argument(
        "--short",
        type=int,
        metavar="PIXELS",
        help="resize larger images to this short side, antialiased",
    )
    parser.add_argument(
        "--quality",
        type=int,
        metavar="Q",
        help="JPEG quality of resized images, 1 to 100; default 95",
    )
    parser.add_argument(
        "--pixels", action="store_true", help="packed: store raw pixels instead of coefficients"
    )


def data_pack(options: argparse.Namespace) -> int:
    """Run `trainyard data pack`. Returns the exit code."""
    from rich.console import Console

    from trainyard.cli.data.show import open_splits
    from trainyard.datasets.pack.pack import num_samples, pack
    from trainyard.datasets.pack.shards import choose_classes, only_classes, shuffled
    from trainyard.monitor.progress import counter

    _check_locations(options)
    pack_options = _pack_options(options)
    indices = _named(open_splits(options.location, one_label_space=True), options)
    first = next(iter(indices.values()))
    classes = first.classes if first.has_names else None
    splits = {
        name: shuffled(index, None if options.no_shuffle or name != "train" else options.seed)
        for name, index in indices.items()
    }
    if options.classes is not None:
        count = max(len(index.classes) for index in indices.values())
        keep, classes = choose_classes(options.classes, classes, count, options.seed)
        splits = {name: only_classes(selection, keep) for name, selection in splits.items()}
    destination = Path(options.destination)
    more: dict[str, Any] = {"about": _described(options)}
    total = num_samples(splits, pack_options, options.part)
    with counter(Console(stderr=True), "packing", total) as more["progress"]:
        manifest = pack(splits, classes, destination, pack_options, part=options.part, **more)
    if manifest is None:
        _print_part(options, total)
    else:
        print_packed(manifest, options)
    return 0


def _check_locations(options: argparse.Namespace) -> None:
    """InputError for a destination on a server, and for a random order of the Hub's images."""
    from trainyard.data.storage.hub import is_on_hub
    from trainyard.data.storage.source import is_remote

    if is_remote(options.destination):
        raise InputError(
            "pack.destination-on-server",
            "{location}: pack into a folder of this machine, then copy it",
            location=options.destination,
        )
    if is_on_hub(options.location) and not options.no_shuffle:
        raise InputError(
            "pack.shuffled-from-hub",
            "{location}: the Hub is for large requests, not for one per image: pack in its own "
            "order, by --no-shuffle",
            location=options.location,
        )


def _print_part(options: argparse.Namespace, samples: int) -> None:
    if options.json:
        result = {"destination": options.destination, "part": str(options.part), "samples": samples}
        print(json.dumps(result))
        return
    print(f"part {options.part}: {samples:,} samples; the same command without --part joins all")


def _pack_options(options: argparse.Namespace) -> "PackOptions":
    from trainyard.datasets.pack.shards import PackOptions

    if options.name is not None and options.format in ("folder", "parquet"):
        raise InputError(
            "option.name-without-effect",
            "--name is a prefix of shards, and --format {format} has names of its own: drop --name",
            format=options.format,
        )
    samples = options.shard_samples
    if samples is None:
        limited = options.shard_size is None and options.format != "hdf5"
        samples = _SAMPLES if limited else _ANY_NUMBER
    return PackOptions(
        format=options.format,
        name="imagenet" if options.name is None else options.name,
        shard_samples=samples,
        shard_bytes=options.shard_size,
        recode=_recode(options),
        pixels=options.pixels,
        workers=options.processes,
    )


def _recode(options: argparse.Namespace) -> "Recode | None":
    from trainyard.datasets.pack.recode import ShortSide

    if options.short is None:
        if options.quality is not None:
            raise InputError(
                "option.quality-without-short",
                "--quality applies to resized images: add --short, or drop --quality",
            )
        return None
    if options.pixels and options.quality is not None:
        raise InputError(
            "option.quality-with-pixels",
            "--quality applies to JPEGs, and --pixels stores none: drop one of them",
        )
    return ShortSide(options.short, 95 if options.quality is None else options.quality)


def _described(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "source": options.location,
        "seed": options.seed,
        "shuffled": not options.no_shuffle,
        "classes": options.classes,
    }


def _named(indices: "dict[str, Index]", options: argparse.Namespace) -> "dict[str, Index]":
    """Rename a single location's data to train, or to --split."""
    name = options.split
    if name is None:
        return {{"data": "train"}.get(split, split): index for split, index in indices.items()}
    if not re.fullmatch(r"\w+", name):
        raise InputError(
            "option.malformed-split", "--split {value!r}: use letters and digits", value=name
        )
    if len(indices) > 1:
        raise InputError(
            "pack.several-splits",
            "--split {split}: {location} holds {names}; name one of them as LOCATION, or drop "
            "--split",
            split=name,
            location=options.location,
            names=" and ".join(indices),
        )
    return dict.fromkeys([name], next(iter(indices.values())))


def _part(text: str) -> "Part":
    from trainyard.datasets.pack.journal import Part

    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    part = Part(int(match[1]), int(match[2])) if match else Part(0, 0)
    if not 1 <= part.number <= part.of:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 1/8, 2/8, … 8/8")
    return part


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 1GB or 300MB")
    return round(float(match[1]) * _UNITS[match[2].upper()])
