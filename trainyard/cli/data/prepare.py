"""`trainyard data prepare`: makes published archives into data sets to train on."""

import argparse
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.cli.data.packed import print_packed
from trainyard.cli.options import add_json, add_processes
from trainyard.cli.printing import print_table

if TYPE_CHECKING:
    from trainyard.data.storage.manifest import Manifest
    from trainyard.datasets.prepare.preparation import Preparation

_FORMATS = ("webdataset", "folder", "hdf5")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data prepare` to its parser."""
    datasets = parser.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    digits = datasets.add_parser("digits", help="1,797 scanned handwritten digits, made offline")
    _add_destination(digits)
    digits.set_defaults(run_command=_prepare_digits)
    imagenet = datasets.add_parser("imagenet-1k", help="ILSVRC2012 from its three archives")
    _add_large(imagenet, "folder of the archives")
    _add_no_checksum(imagenet)
    imagenet.add_argument(
        "--repair",
        action="store_true",
        help="re-encode the PNG and CMYK files among the JPEGs as RGB JPEGs",
    )
    imagenet.set_defaults(run_command=_prepare_imagenet_1k)
    large = datasets.add_parser("imagenet-21k-p", help="ImageNet-21K-P from the processed tar")
    _add_large(large, "imagenet21k_resized.tar, or its folder")
    large.set_defaults(run_command=_prepare_imagenet_21k_p)
    for name in ("cifar10", "cifar100"):
        about = "as packed pixels, from the binary or the Python version"
        _add_small(datasets.add_parser(name, help=about), "the archive, or its folder, or unpacked")
    for name in ("mnist", "fashion-mnist"):
        about = "as packed pixels, from the four IDX files"
        _add_small(datasets.add_parser(name, help=about), "the folder of the files")


def _add_large(parser: argparse.ArgumentParser, source: str) -> None:
    _add_folders(parser, source)
    usual = _FORMATS[0]
    parser.add_argument("--format", choices=_FORMATS, default=usual, help=f"default {usual}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of training images")
    add_processes(parser)


def _add_small(parser: argparse.ArgumentParser, source: str) -> None:
    _add_folders(parser, source)
    _add_no_checksum(parser)
    parser.set_defaults(run_command=_prepare_small, format="packed", seed=0, processes=1)


def _add_folders(parser: argparse.ArgumentParser, source: str) -> None:
    parser.add_argument("source", metavar="SOURCE", help=source)
    _add_destination(parser)


def _add_destination(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("destination", metavar="DESTINATION", help="folder to create")
    add_json(parser)


def _add_no_checksum(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-checksum",
        action="store_true",
        help="accept archives other than the official ones, such as a subset",
    )


def _prepare_digits(options: argparse.Namespace) -> int:
    from trainyard.datasets.prepare.digits import prepare_digits

    counts = prepare_digits(Path(options.destination))
    text = f"{counts['train']:,} images to train, {counts['val']:,} to validate"
    print(json.dumps(counts) if options.json else f"{options.destination}: {text}")
    return 0


def _prepare_imagenet_1k(options: argparse.Namespace) -> int:
    from trainyard.datasets.prepare.imagenet import prepare_imagenet_1k

    manifest = prepare_imagenet_1k(*_arguments(options), repair=options.repair)
    print_packed(manifest, options)
    if options.json:
        return 0
    if manifest.about["odd"] and not options.repair:
        print("all are kept as they are; --repair makes RGB JPEGs of the PNG and CMYK ones")
    if left_out := manifest.about["val_left_out"]:
        print(f"{left_out:,} validation images are left out: no training image has their class")
    return 0


def _prepare_imagenet_21k_p(options: argparse.Namespace) -> int:
    from trainyard.datasets.prepare.imagenet import prepare_imagenet_21k_p

    manifest = prepare_imagenet_21k_p(*_arguments(options))
    print_packed(manifest, options)
    if not options.json:
        _print_published(manifest)
    return 0


def _prepare_small(options: argparse.Namespace) -> int:
    from trainyard.datasets.prepare.cifar import prepare_cifar
    from trainyard.datasets.prepare.mnist import prepare_mnist

    prepare = prepare_cifar if options.dataset.startswith("cifar") else prepare_mnist
    print_packed(prepare(options.dataset, *_arguments(options)), options)
    return 0


def _arguments(options: argparse.Namespace) -> "tuple[Path, Preparation]":
    from rich.console import Console

    from trainyard.datasets.prepare.preparation import Preparation
    from trainyard.monitor.progress import counter

    return Path(options.source), Preparation(
        Path(options.destination),
        functools.partial(counter, Console(stderr=True)),
        format=options.format,
        seed=options.seed,
        checksum=not getattr(options, "no_checksum", False),
        workers=options.processes,
    )


def _print_published(manifest: "Manifest") -> None:
    """The counts of ImageNet-21K-P beside the published ones."""
    from trainyard.datasets.prepare.imagenet import PUBLISHED

    counts = {name: split.samples for name, split in manifest.splits.items()}
    counts["classes"] = len(manifest.classes or ())
    rows = [["here", *(f"{counts[what]:,}" for what in counts)]]
    for release, published in PUBLISHED.items():
        rows.append([f"published, {release}", *(f"{published[what]:,}" for what in counts)])
    print_table(["", *counts], rows)
    if counts not in PUBLISHED.values():
        print("these are not the published counts: the source is a subset or another release")
