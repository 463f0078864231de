"""`trainyard data`: collects its actions, one module each."""

import argparse

from trainyard.commands import (
    data_index,
    data_pack,
    data_prepare,
    data_serve,
    data_show,
    data_stage,
    data_verify,
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data` to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, module, about in (
        ("prepare", data_prepare, "make a data set ready for training"),
        ("pack", data_pack, "write a data set in another format"),
        ("index", data_index, "scan a data set anew and save its index"),
        ("show", data_show, "samples, bytes and classes of a data set"),
        ("stage", data_stage, "copy a data set to this node's own disk"),
        ("serve", data_serve, "let other machines read a data set over HTTP"),
        ("verify", data_verify, "check that a data set is whole and fit to train on"),
    ):
        module.add(actions.add_parser(name, help=about))
