"""`trainyard data index`: scan a data set anew."""

import argparse
import json


def add(parser: argparse.ArgumentParser) -> None:
    add_location(parser)
    parser.set_defaults(run_command=data_index)


def add_location(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("location", metavar="LOCATION", help="a folder, a file, shards or a URL")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def data_index(options: argparse.Namespace) -> int:
    from rich.console import Console

    from trainyard.data.indexing import build_index
    from trainyard.data.splits import all_splits
    from trainyard.monitor.progress import counter

    found = {}
    for split, location in all_splits(options.location).items():
        with counter(Console(stderr=True), f"indexing {location}") as progress:
            index = build_index(location, progress)
        found[split] = {
            "samples": len(index),
            "index": str(index.path),
            "fingerprint": index.fingerprint,
        }
    if options.json:
        print(json.dumps(found))
    for split, about in {} if options.json else found.items():
        print(f"{split}: {about['samples']:,} samples, index in {about['index']}")
    return 0
