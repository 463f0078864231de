"""One loader on one location, in a process of its own that prints a line of JSON; see remote.py.

python -m benchmarks.remotes.contender NAME LOCATION FOLDER [--locality N] [--stage] [--seconds S]

LOCATION is a brace list of shards, as a path or a URL of server.py, or the folder of a peer there.
FOLDER is for copies.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from urllib.request import urlopen

from benchmarks.loaders.measure import cpu_seconds, end_tree, processes

THREADS = 2
_WARM_S = 1.0
_SAMPLE_S = 0.1  # between two looks at the memory
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


# --- what is measured ---


def counts(location: str) -> dict[str, float]:
    """What the server has counted since the last call; nothing for a local path."""
    if not location.startswith("http"):
        return {"requests": 0, "bytes": 0, "most": 0, "cpu_s": 0}
    with urlopen("/".join([*location.split("/")[:3], "-/counts"])) as answer:
        found: dict[str, float] = json.load(answer)
        return found


class Memory:
    """The most memory of the processes below this one: of no file, in proportion to who shares."""

    def __init__(self) -> None:
        self.most_mb = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most_mb = max(self.most_mb, sum(map(_anonymous_mb, processes()[1:])))
            time.sleep(_SAMPLE_S)


def _anonymous_mb(pid: int) -> float:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        fields = dict(line.split()[:2] for line in lines[1:])
        return (int(fields["Pss_Anon:"]) + int(fields["Pss_Shmem:"])) / 1e3
    return 0.0


def measure(batches: Iterator[int], location: str, seconds: float) -> dict[str, float]:
    memory, begun = Memory(), time.perf_counter()
    count = next(batches)
    first_s = time.perf_counter() - begun
    while time.perf_counter() < begun + first_s + _WARM_S:
        next(batches)
    counts(location)
    begun, cpu, count = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() < begun + seconds:
        count += next(batches)
    seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
    asked = counts(location)
    return {
        "images_per_second": count / seconds,
        "cpu_ms": cpu / count * 1000,
        "server_cpu_ms": asked["cpu_s"] / count * 1000,
        "requests": asked["requests"] / count,
        "kb": asked["bytes"] / count / 1e3,
        "in_flight": asked["most"],
        "first_s": first_s,
        "memory_mb": memory.most_mb,
    }


def batches(options: argparse.Namespace) -> Iterator[int]:
    folder: str = options.folder
    if options.name == "trainyard":
        from benchmarks.remotes.ours import trainyard

        return trainyard(options.location, options.locality, folder if options.stage else None)
    peer = getattr(import_module("benchmarks.remotes.peers"), options.name)
    found: Iterator[int] = peer(options.location, folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="trainyard, or a function of peers.py")
    parser.add_argument("location")
    parser.add_argument("folder")
    parser.add_argument("--locality", type=int, default=0)
    parser.add_argument("--stage", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print(json.dumps(measure(batches(options), options.location, options.seconds)), flush=True)
    end_tree()


if __name__ == "__main__":
    main()
