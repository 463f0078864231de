"""What a location holds, by way of its index: each image read from where the index says it is."""

from pathlib import Path

from trainyard.data.index.build import build_index
from trainyard.data.reading.reader import Reader

Stored = list[tuple[str, bytes]]
"""Class name and encoded image of each sample, in stored order."""


def stored(location: str | Path) -> Stored:
    index = build_index(str(location))
    reader = Reader(index)
    return [(index.classes[index.label[n]], reader.read(n)) for n in range(len(index))]
