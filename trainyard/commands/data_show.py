"""`trainyard data show`: what is in a data set."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from trainyard.commands.data_index import add_location
from trainyard.commands.printing import print_table, size

if TYPE_CHECKING:
    from trainyard.data.index import Index

_MAX_CLASSES = 25  # rows of a class table; more is for machines


def add(parser: argparse.ArgumentParser) -> None:
    add_location(parser)
    parser.set_defaults(run_command=data_show)


def data_show(options: argparse.Namespace) -> int:
    found = {split: _describe(index) for split, index in open_splits(options.location).items()}
    if options.json:
        print(json.dumps(next(iter(found.values())) if len(found) == 1 else found))
        return 0
    rows = [_summary(split, about) for split, about in found.items()]
    print_table(["data", "format", "samples", "size", "classes"], rows)
    names = next(iter(found.values()))["classes"]
    rows = []
    for number, name in enumerate(names[:_MAX_CLASSES]):
        counts = [f"{about['per_class'].get(name, 0):,}" for about in found.values()]
        rows.append([str(number), name, *counts])
    print_table(["number", "class", *found], rows)
    if len(names) > _MAX_CLASSES:
        print(f"and {len(names) - _MAX_CLASSES:,} classes more: --json lists them all")
    return 0


def open_splits(location: str) -> dict[str, "Index"]:
    """The indices of all splits of a data set, with a counter on the screen."""
    from rich.console import Console

    from trainyard.data.indexing import open_index
    from trainyard.data.splits import all_splits
    from trainyard.monitor.progress import counter

    indices = {}
    for split, place in all_splits(location).items():
        with counter(Console(stderr=True), f"indexing {place}") as progress:
            indices[split] = open_index(place, progress)
    return indices


def _describe(index: "Index") -> dict[str, Any]:
    import numpy as np

    counts = np.bincount(index.label, minlength=len(index.classes)).tolist()
    return {
        "format": index.format,
        "samples": len(index),
        "bytes": int(index.size.sum()),
        "classes": list(index.classes),
        "per_class": dict(zip(index.classes, counts, strict=True)),
    }


def _summary(split: str, about: dict[str, Any]) -> list[str]:
    samples, classes = f"{about['samples']:,}", f"{len(about['classes']):,}"
    return [split, about["format"], samples, size(about["bytes"]), classes]
