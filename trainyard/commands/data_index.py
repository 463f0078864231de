"""`trainyard data index`: scan a data set anew."""

import argparse
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from trainyard.commands.parts import add_parts, parts_on_ray, print_part, words_of
from trainyard.data.storage.location import take_secrets
from trainyard.printable import printable

if TYPE_CHECKING:
    from trainyard.datasets.index_parts import IndexWork


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data index` to its parser."""
    add_location(parser)
    parser.add_argument(
        "--seek",
        action="store_true",
        help="also read every image once and save a seek table for faster decoding of crops; it "
        "takes about 1.5%% of the size of the data",
    )
    add_parts(parser, "scan", "the data")
    parser.set_defaults(run_command=data_index)


def add_location(parser: argparse.ArgumentParser) -> None:
    """Add the argument LOCATION."""
    parser.add_argument(
        "location",
        metavar="LOCATION",
        type=take_secrets,
        help="a folder, a file, shards or a URL",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def data_index(options: argparse.Namespace) -> int:
    """Run `trainyard data index`. Returns the exit code."""
    from trainyard.data.index.splits import all_splits
    from trainyard.datasets.index_parts import IndexWork, index_journals
    from trainyard.datasets.parts import units_of

    places = all_splits(options.location)
    journals = {split: index_journals(location) for split, location in places.items()}
    begun = [part for of_split in journals.values() for part in of_split.parts()]
    words = ["data", "index", options.location, *words_of(options, "seek")]
    parts_on_ray(options, words, begun)
    with ExitStack() as stack:  # no split is joined before all parts of all splits have finished
        works = {}
        for split, location in places.items():
            units = stack.enter_context(units_of(journals[split], options.part))
            works[split] = IndexWork(location, units, options.part, seek=options.seek)
        if options.part is not None:
            samples = sum(_write_part(work) for work in works.values())
            print_part(options, {"location": options.location}, samples)
            return 0
        found = {split: _indexed(work, options.seek) for split, work in works.items()}
    if options.json:
        print(json.dumps(found))
    for split, about in {} if options.json else found.items():
        print(printable(f"{split}: {about['samples']:,} samples, index in {about['index']}"))
        if options.seek:
            share = about["seek_bytes"] / max(about["image_bytes"], 1)
            print(f"  seek table of {about['seek_bytes']:,} bytes ({share:.1%}) in {about['seek']}")
    return 0


def _write_part(work: "IndexWork") -> int:
    from rich.console import Console

    from trainyard.monitor.progress import counter

    with counter(Console(stderr=True), f"indexing {work.location}") as progress:
        return work.write_part(progress)


def _indexed(work: "IndexWork", seek: bool) -> dict[str, Any]:
    from rich.console import Console

    from trainyard.monitor.progress import counter

    console = Console(stderr=True)
    with counter(console, f"indexing {work.location}") as progress:
        index = work.index(progress)
    found = {
        "samples": len(index),
        "index": str(index.path),
        "fingerprint": index.fingerprint,
    }
    if not seek:
        return found
    with counter(console, f"seek table of {work.location}", len(index)) as progress:
        table = work.seek_table(index, progress)
    return found | {
        "seek": str(table.path),
        "seek_bytes": table.num_bytes,
        "image_bytes": int(index.size.sum()),
    }
