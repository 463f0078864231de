"""`trainyard data stage`: copies a data set to this node's own disk before training jobs."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from trainyard.arguments import above_zero
from trainyard.cli.data.index import add_location
from trainyard.cli.data.show import open_splits
from trainyard.errors import DataError
from trainyard.printable import in_bytes, printable

if TYPE_CHECKING:
    from trainyard.data.reading.staging import StagedShards


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data stage` to its parser."""
    add_location(parser)
    parser.add_argument(
        "--to", required=True, metavar="FOLDER", help="a folder on the node; data.stage names it"
    )
    parser.add_argument(
        "--gb", type=above_zero, help="largest total size of the copies in the folder"
    )
    parser.set_defaults(run_command=data_stage)


def data_stage(options: argparse.Namespace) -> int:
    """Run `trainyard data stage`. Returns the exit code."""
    from trainyard.data.reading.staging import StagedShards

    result: dict[str, dict[str, Any]] = {}
    for split, index in open_splits(options.location).items():
        staged = StagedShards(index, options.to, options.gb)
        _stage(staged, split)
        result[split] = {
            "bytes": staged.num_bytes(),
            "copies": len(staged),
            "made": staged.num_made,
            "folder": str(staged.folder),
        }
    if options.json:
        print(json.dumps(result))
    for split, summary in {} if options.json else result.items():
        news = f"{summary['made']:,} made now" if summary["made"] else "all were there already"
        print(
            printable(
                f"{split}: copies {summary['copies']:,}, {in_bytes(summary['bytes'])}; {news}"
            )
        )
    return 0


def _stage(staged: "StagedShards", split: str) -> None:
    from concurrent.futures import wait

    from rich.console import Console

    from trainyard.monitor.progress import counter

    done = staged.start()
    with counter(Console(stderr=True), f"staging {split}, files", len(staged)) as show:
        while wait([done], timeout=0.5).not_done:
            show(len(staged) - len(staged.missing()))
    problem = done.result()
    if problem is not None:
        raise DataError("stage.incomplete", "{reason}", reason=problem)
