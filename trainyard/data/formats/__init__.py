"""One small reader per container: each finds the samples of a location and their bytes."""

import os
from types import ModuleType

from trainyard.data.formats import folder, webdataset
from trainyard.data.formats.scan import Scan
from trainyard.errors import DataError

# Asked in this order; a format recognises a location by what lies there, not by its name.
FORMATS: dict[str, ModuleType] = {"webdataset": webdataset, "folder": folder}


def recognise(location: str) -> str:
    """The name of the format of a location."""
    for name, reader in FORMATS.items():
        if reader.recognises(location):
            return name
    if os.path.isdir(location):
        raise DataError(
            f"{location}: no images found; expected one folder per class (CLASS/*.jpg) "
            "or WebDataset shards (*.tar)"
        )
    if os.path.exists(location):
        raise DataError(f"{location}: not a known format; expected a folder or .tar shards")
    raise DataError(f"{location}: no such file or folder")


def scan(location: str) -> Scan:
    """The samples of a location, whatever its format."""
    result: Scan = FORMATS[recognise(location)].scan(location)
    return result
