"""Remarks at the start of a run about its data: slow paths of reading it, and what is left out."""

from collections.abc import Iterable

from rich.console import Console

from trainyard.data._native import is_built
from trainyard.data.decode.seek_tables import seek_remark
from trainyard.data.index.table import Index
from trainyard.data.stream.shards import Stream
from trainyard.installation import NEEDS_EXTENSION
from trainyard.printable import printable


def slow_paths(*data: Index | Stream) -> list[str]:
    """Reasons why reading these data is slower than it could be."""
    remarks = [seek_remark(one) for one in data if isinstance(one, Index)]
    if not is_built():
        remarks = [f"decoding at a quarter of the speed, without the extension: {NEEDS_EXTENSION}"]
    return list(dict.fromkeys(text for text in remarks if text))


def what_is_left_out(data: Iterable[Index | Stream]) -> list[str]:
    """A line about the files, rows and members of each data set that are no samples."""
    lines = (
        printable(f"{one.root}: left out: {one.left_out}")
        for one in data
        if isinstance(one, Index) and one.left_out
    )
    return list(dict.fromkeys(lines))  # the splits of one file have one account


def warn(console: Console, remarks: Iterable[str]) -> None:
    """Prints remarks, a line each."""
    for text in remarks:
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
