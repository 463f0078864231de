"""`trainyard data`: a module for each of its actions, gathered here."""

import argparse

from trainyard.commands import data_index, data_prepare, data_show


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, module, about in (
        ("prepare", data_prepare, "make a data set ready for training"),
        ("index", data_index, "scan a data set anew and save its index"),
        ("show", data_show, "samples, bytes and classes of a data set"),
    ):
        module.add(actions.add_parser(name, help=about))
