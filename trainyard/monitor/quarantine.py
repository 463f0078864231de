"""Unreadable samples: recorded and counted; too many of them stop the run."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trainyard.errors import DataError, InputError
from trainyard.files import JsonLines, json_object
from trainyard.world import World, gather


class Bad(NamedTuple):
    """A sample that could not be read or decoded."""

    split: str
    id: int
    file: str
    offset: int  # bytes
    reason: str


class Quarantine:
    """Records each bad sample once in quarantine.jsonl, for all ranks and epochs."""

    def __init__(
        self, path: Path, *, world: World, max_bad: float, num_samples: dict[str, int]
    ) -> None:
        self._path, self._world = path, world
        self._max_bad, self._num_samples = max_bad, num_samples
        self._noted: list[Bad] = []  # of this rank, since the last exchange
        self._seen: dict[str, set[int]] = {split: set() for split in num_samples}
        self._reasons = dict[str, str]()  # the last one of each split
        self._lines = JsonLines(path)
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                known = json_object(line)
                self._seen[known["split"]].add(known["id"])
                self._reasons[known["split"]] = str(known.get("reason", "no reason noted"))
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    "run.malformed-quarantine-line",
                    "{path}, line {line}: does not name a bad sample of this run: remove the line",
                    path=path,
                    line=number,
                ) from None

    def note(self, split: str, bad: Iterable[tuple[int, str, int, str]]) -> None:
        """Record this rank's bad samples (id, file, offset, reason) until `exchange`."""
        self._noted.extend(Bad(split, *sample) for sample in bad)

    def exchange(self) -> None:
        """Share bad samples. DataError on all ranks if a split has more than `max_bad`."""
        all_bad = (bad for noted in gather(self._world, self._noted) for bad in noted)
        for bad in sorted(set(all_bad)):
            if bad.id not in self._seen[bad.split]:
                self._seen[bad.split].add(bad.id)
                self._reasons[bad.split] = bad.reason
                if self._world.is_first:
                    self._lines.append(bad._asdict())
        self._noted = []
        for split, size in self._num_samples.items():
            if self.count(split) > most_bad(self._max_bad, size):
                error = DataError(
                    "data.too-many-bad-samples",
                    "{num_bad} of {num_samples:,} {split} samples cannot be read, more than "
                    "data.max_bad = {max_bad} allows ({reason}, for one); {path} names them",
                    num_bad=self.count(split),
                    num_samples=size,
                    split=split,
                    max_bad=self._max_bad,
                    reason=self._reasons[split],
                    path=self._path,
                )
                error.is_shared = True
                raise error

    def count(self, split: str) -> int:
        return len(self._seen[split])


def most_bad(share: float, count: int) -> int:
    """Number of samples of `count` that may be unreadable: `data.max_bad` of them, rounded up."""
    return math.ceil(round(share * count, 6))
