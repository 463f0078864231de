"""`trainyard data prepare`: from what can be downloaded to what can be trained on."""

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", choices=("digits",), help="which one")
    parser.add_argument("destination", metavar="DESTINATION", help="folder to make")
    parser.set_defaults(run_command=data_prepare)


def data_prepare(options: argparse.Namespace) -> int:
    from trainyard.data.digits import prepare_digits

    counts = prepare_digits(Path(options.destination))
    print(
        f"{options.destination}: {counts['train']:,} images to train, {counts['val']:,} to validate"
    )
    return 0
