"""Images a second from a web server that answers late, beside webdataset and the local disk.

python -m benchmarks.remote FOLDER [--rounds N] [--hardware NAME]      10 minutes

FOLDER gets 960 photographs like ImageNet's and 8 WebDataset shards of them (850 MB). A server on
this machine (remotes/server.py) delays each request by 0 to 100 ms. Each loader runs in a process
of its own with two threads or workers, gives batches of 64 random crops of 224 x 224, and is
measured in turns. The server and the loader share the machine's cores.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from benchmarks.loaders.photographs import make_photographs
from benchmarks.loaders.tables import Table, with_spread
from benchmarks.saving import listed, save
from trainyard.commands.printing import print_table
from trainyard.data.formats.sample import EncodedSample
from trainyard.data.formats.webdataset import write
from trainyard.data.index.build import build_index

PHOTOGRAPHS, SHARDS = 960, 8
DELAYS_MS = (0, 5, 20, 50, 100)
LOCALITY = 512  # samples: 56 MB
NAMES = f"part-{{000000..{SHARDS - 1:06d}}}.tar"
_LIMIT_S = 120  # of one measurement
_NOTES = (
    "Rates are medians over rounds, with the least and the most. The server runs on the same cores "
    "as the loader. CPU is of the loader's processes, in ms for each image. Memory is the most of "
    "the loader's processes, of no file, the ring of batches included. webdataset decodes whole "
    "JPEGs by torchvision; its second row does not decode. Indexing reads headers and labels alone."
)

Results = dict[tuple[str, int], list[dict[str, float]]]


class Contender(NamedTuple):
    title: str
    name: str
    locality: int = 0
    is_local: bool = False


CONTENDERS = (
    Contender("Trainyard, exact order", "trainyard"),
    Contender(f"Trainyard, locality {LOCALITY}", "trainyard", LOCALITY),
    Contender("webdataset", "webdataset"),
)
LOCAL = Contender("Trainyard, exact order, local disk", "trainyard", is_local=True)
BYTES = Contender("webdataset, bytes alone", "webdataset-bytes")  # 20 ms for each shard are nothing


def make_shards(folder: Path) -> Path:
    """Every shard has all photographs, in an order of its own."""
    shards = folder / "shards"
    if len(list(shards.glob("*.tar"))) == SHARDS:
        return shards
    about = make_photographs(folder / "photographs", PHOTOGRAPHS)
    shards.mkdir(exist_ok=True)
    for number in range(SHARDS):
        random.Random(number).shuffle(about)
        samples = (
            EncodedSample((folder / "photographs" / photo.name).read_bytes(), ".jpg",
                    int(photo.name[1:3]), f"{number}{place:05d}")
            for place, photo in enumerate(about)
        )  # fmt: skip
        write(shards / f"part-{number:06d}.tar", samples, None)
    return shards


@contextmanager
def server(folder: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "benchmarks.remotes.server", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def tell(url: str, path: str) -> dict[str, int]:
    with urlopen(f"{url}/-/{path}") as answer:
        found: dict[str, int] = json.load(answer)
        return found


def measure(contender: Contender, location: str, seconds: float) -> dict[str, float]:
    words = [sys.executable, "-m", "benchmarks.remotes.contender", contender.name, location]
    words += ["--locality", str(contender.locality), "--seconds", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        raise SystemExit(f"{contender.title}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def measure_all(url: str, shards: Path, rounds: int, seconds: float) -> Results:
    found: Results = {}
    for number in range(rounds):
        turns = [(contender, delay) for contender in CONTENDERS for delay in DELAYS_MS]
        turns += [(LOCAL, 0), (BYTES, 20)]
        random.Random(number).shuffle(turns)
        for contender, delay in turns:
            tell(url, f"delay/{delay}")
            where = str(shards) if contender.is_local else url
            result = measure(contender, f"{where}/{NAMES}", seconds)
            found.setdefault((contender.title, delay), []).append(result)
            rate = f"{result['images_per_second']:,.0f}"
            print(f"round {number + 1}, {delay} ms: {contender.title}: {rate}", file=sys.stderr)
    return found


def index_seconds(url: str) -> dict[int, dict[str, float]]:
    """Seconds, requests and bytes of indexing the shards, at each delay."""
    found = {}
    for delay in DELAYS_MS:
        tell(url, f"delay/{delay}")
        begun = time.perf_counter()
        build_index(f"{url}/{NAMES}")
        seconds, asked = time.perf_counter() - begun, tell(url, "counts")
        found[delay] = {"seconds": seconds, "requests": asked["requests"],
                        "mb": asked["bytes"] / 1e6}  # fmt: skip
    return found


# --- what is printed ---


def rate_table(found: Results) -> Table:
    columns = ["loader", *(f"{delay} ms" for delay in DELAYS_MS)]
    rows = []
    for title in dict.fromkeys(title for title, _ in sorted(found)):
        cells = [rates(found.get((title, delay), []), "images_per_second") for delay in DELAYS_MS]
        rows.append([title, *cells])
    return Table("Images a second, by the delay of each request", columns, rows)


def cost_table(found: Results) -> Table:
    """At all delays together."""
    columns = ["loader", "requests an image", "kB an image", "most in flight", "CPU ms", "MB"]
    rows = []
    for title in dict.fromkeys(title for title, _ in sorted(found)):
        results = [one for (other, _), some in found.items() if other == title for one in some]
        middle = {key: statistics.median(one[key] for one in results) for key in results[0]}
        most = max(one["memory_mb"] for one in results)
        rows.append(
            [title, f"{middle['requests']:.3f}", f"{middle['kb']:,.0f}",
             f"{max(one['in_flight'] for one in results):.0f}",
             f"{middle['cpu_ms']:.2f}", f"{middle['memory_mb']:,.0f} (most {most:,.0f})"]
        )  # fmt: skip
    return Table("Requests, bytes, CPU and memory of the loader", columns, rows)


def index_table(found: dict[int, dict[str, float]]) -> Table:
    rows = [
        [f"{delay} ms", f"{one['seconds']:.1f}", f"{one['requests']:,.0f}", f"{one['mb']:,.0f}"]
        for delay, one in found.items()
    ]
    return Table(
        f"Indexing {SHARDS} shards of {PHOTOGRAPHS} samples, once each",
        ["delay", "seconds", "requests", "MB read"],
        rows,
    )


def rates(results: list[dict[str, float]], key: str) -> str:
    return with_spread([one[key] for one in results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-remote.json and .md")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRAINYARD_CACHE"] = str(options.folder / "cache")
    shards = make_shards(options.folder)
    load = os.getloadavg()[0]
    with server(shards) as url:
        index = index_seconds(url)
        found = measure_all(url, shards, options.rounds, options.seconds)
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    tables = [rate_table(found), cost_table(found), index_table(index)]
    for table in tables:
        print(f"\n{table.title}")
        print_table(table.columns, table.rows)
    if options.hardware:
        figures = about | {"index": index}
        figures["results"] = {f"{title}, {ms} ms": some for (title, ms), some in found.items()}
        parts = [f"# Remote data, {options.hardware}", listed(about), _NOTES]
        parts += [f"## {table.markdown()}" for table in tables]
        save(f"{options.hardware}-remote", figures, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
