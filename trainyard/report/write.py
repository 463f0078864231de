"""Reports written to files."""

from collections.abc import Sequence
from pathlib import Path

from trainyard.errors import InputError
from trainyard.files import write_text
from trainyard.report.page import page
from trainyard.report.pictures import Gallery
from trainyard.report.runs import read_runs

NAME = "report.html"


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write a report to `out`; by default into a run's directory, or here for several runs.

    InputError for a folder that is no run directory, or a file that cannot be written.
    """
    path = out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    text = page(read_runs(list(folders)), Gallery())
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return path
