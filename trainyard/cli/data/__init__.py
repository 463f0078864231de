"""`trainyard data`: collects its actions, one module each."""

import argparse

from trainyard.cli.data import (
    index,
    pack,
    prepare,
    serve,
    show,
    stage,
    verify,
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data` to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, module, purpose in (
        ("prepare", prepare, "make a data set ready for training"),
        ("pack", pack, "write a data set in another format"),
        ("index", index, "scan a data set anew and save its index"),
        ("show", show, "samples, bytes and classes of a data set"),
        ("stage", stage, "copy a data set to this node's own disk"),
        ("serve", serve, "let other machines read a data set over HTTP"),
        ("verify", verify, "check that a data set is whole and fit to train on"),
    ):
        module.add(actions.add_parser(name, help=purpose))
