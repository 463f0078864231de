"""Work on data sets in parts, and what it makes, to compare clusters with one machine."""

import shutil
from pathlib import Path

from tests.command_line import Capture, shown
from tests.mini_imagenet import write_mini_imagenet

Made = dict[str, bytes]


class WorkInParts:
    """An index with seek tables and a preparation, in this order."""

    def __init__(self, shards: Path, folder: Path, capsys: Capture) -> None:
        self._shards, self._prepared = shards, folder / "prepared"
        archives = write_mini_imagenet(folder / "archives").folder
        prepare = ["prepare", "imagenet-1k", str(archives), str(self._prepared), "--no-checksum"]
        self.commands = {
            "index": ["data", "index", str(shards), "--seek"],
            "prepare": ["data", *prepare, "--workers=1"],
        }
        self.expected = {
            name: self.made(name, shown(capsys, *words)) for name, words in self.commands.items()
        }
        for path in shards.glob(".trainyard-*"):
            path.unlink()
        shutil.rmtree(self._prepared)

    def made(self, name: str, said: str) -> Made:
        """The files that a command has made, or the report that it has printed."""
        paths = {
            "index": self._shards.glob(".trainyard-*"),
            "prepare": (path for path in self._prepared.rglob("*") if path.is_file()),
        }
        return {path.name: path.read_bytes() for path in paths[name]}
