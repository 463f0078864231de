"""Summary of a newly written data set."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.printable import in_bytes, printable

if TYPE_CHECKING:
    from trainyard.data.storage.manifest import Manifest

_ODD_SHOWN = 3  # examples per kind; dataset.json lists all


def print_packed(manifest: "Manifest", options: argparse.Namespace) -> None:
    """Print a line for each split, and one for each kind of unusual image; or all as JSON."""
    destination = Path(options.destination)
    sizes = {split: _bytes(manifest, split) for split in manifest.splits}
    if options.json:
        splits = {
            name: {
                "location": str(destination / split.files),
                "samples": split.samples,
                "bytes": sizes[name],
            }
            for name, split in manifest.splits.items()
        }
        about = {"destination": str(destination), "format": manifest.format, "splits": splits}
        print(json.dumps(about | {"classes": manifest.classes, "about": manifest.about}))
        return
    rows = [
        (split.files, f"{split.samples:,} samples", in_bytes(sizes[name]))
        for name, split in manifest.splits.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for files, samples, total in rows:
        print(printable(f"{files:<{widths[0]}}  {samples:>{widths[1]}}  {total}"))
    for kind, found in manifest.about["odd"].items():
        shown = ", ".join(found["files"][:_ODD_SHOWN])
        more = ", …" if found["count"] > _ODD_SHOWN else ""
        print(printable(f"{found['count']:,} {kind}: {shown}{more}"))


def _bytes(manifest: "Manifest", split: str) -> int:
    """Bytes of a split's shards; bytes of the images if each is a file."""
    if manifest.format == "folder":
        return int(manifest.about["image_bytes"][split])
    return manifest.splits[split].bytes
