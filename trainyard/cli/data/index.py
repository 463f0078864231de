"""`trainyard data index`: scan a data set anew."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from trainyard.arguments import whole_number
from trainyard.cli.options import add_json
from trainyard.data.storage.location import take_secrets
from trainyard.printable import printable

if TYPE_CHECKING:
    from trainyard.data.index.val_share import Side


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data index` to its parser."""
    add_location(parser)
    parser.add_argument(
        "--seek",
        action="store_true",
        help="also read every image once and save a seek table for faster decoding of crops; it "
        "takes about 1.5%% of the size of the data",
    )
    parser.set_defaults(run_command=data_index)


def add_location(parser: argparse.ArgumentParser) -> None:
    """Add the argument LOCATION and the option --json."""
    parser.add_argument(
        "location",
        metavar="LOCATION",
        type=take_secrets,
        help="a folder, a file, shards or a URL",
    )
    add_json(parser)


def add_division(parser: argparse.ArgumentParser) -> None:
    """Add the options for data without val data, which `division_of` reads."""
    parts = parser.add_mutually_exclusive_group()
    for name, metavar in (("share", "SHARE"), ("fold", "K/N")):
        text = f"take data without val data in the parts that data.val_{name} makes of it"
        parts.add_argument(f"--val-{name}", metavar=metavar, help=text)
    parser.add_argument(
        "--val-seed",
        metavar="N",
        type=whole_number,
        default=0,
        help="data.val_seed of them; default: 0",
    )
    parser.add_argument(
        "--group", metavar="COLUMN|REGEX", help="data.group of them: what keeps images on one side"
    )


def division_of(options: argparse.Namespace) -> "tuple[Side, ...]":
    """Both sides, if the data is to be divided; RecipeError for values that no recipe has."""
    if options.val_share is None and options.val_fold is None:
        return ()
    from trainyard.config import DIVISION, RunConfig, override
    from trainyard.data.index.val_share import both_sides

    keys = {f"data.{name}": getattr(options, name) for name in DIVISION}
    data = override(RunConfig(), {key: of for key, of in keys.items() if of is not None}).data
    return () if data.val_part is None else both_sides(data.val_part, data.val_seed, data.group)


def data_index(options: argparse.Namespace) -> int:
    """Run `trainyard data index`. Returns the exit code."""
    from trainyard.data.decode.seek_tables import check_extension
    from trainyard.data.index.splits import all_splits

    if options.seek:
        check_extension()
    splits = all_splits(options.location)
    described = {split: _indexed(location, options.seek) for split, location in splits.items()}
    if options.json:
        print(json.dumps(described))
    for split, facts in {} if options.json else described.items():
        print(printable(f"{split}: {facts['samples']:,} samples, index in {facts['index']}"))
        if options.seek:
            share = facts["seek_bytes"] / max(facts["image_bytes"], 1)
            print(f"  seek table of {facts['seek_bytes']:,} bytes ({share:.1%}) in {facts['seek']}")
    return 0


def _indexed(location: str, seek: bool) -> dict[str, Any]:
    from rich.console import Console

    from trainyard.data.decode.seek_tables import build_seek
    from trainyard.data.index.build import build_index
    from trainyard.monitor.progress import counter

    console = Console(stderr=True)
    with counter(console, f"indexing {location}") as progress:
        index = build_index(location, progress, beside=True)
    described = {
        "samples": len(index),
        "index": str(index.path),
        "fingerprint": index.fingerprint,
    }
    if not seek:
        return described
    with counter(console, f"seek table of {location}", len(index)) as progress:
        table = build_seek(index, progress)
    return described | {
        "seek": str(table.path),
        "seek_bytes": table.num_bytes,
        "image_bytes": int(index.size.sum()),
    }
