"""Images a second from a web server that answers late, beside webdataset and the local disk.

python -m benchmarks.remote FOLDER [--rounds N] [--hardware NAME]      20 minutes, as root

FOLDER gets 960 photographs like ImageNet's and 8 WebDataset shards of them (850 MB). A server
(remotes/server.py) delays each request by 0 to 100 ms. It lies on an emulated host (network.py)
with a link of 1 or 10 Gbit/s. Each loader runs in a process of its own with two threads or
workers, gives batches of 64 random crops of 224 x 224, and is measured in turns. The server and
the loader share the machine's cores.
"""

import argparse
import ctypes
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
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from benchmarks.loaders.photographs import make_photographs
from benchmarks.loaders.tables import Table, with_spread
from benchmarks.network import Host, Link, Network, network
from benchmarks.saving import listed, save
from trainyard.commands.printing import print_table
from trainyard.data.formats.sample import EncodedSample
from trainyard.data.formats.webdataset import write
from trainyard.data.index.build import build_index

PHOTOGRAPHS, SHARDS = 960, 8
DELAYS_MS = (0, 5, 20, 50, 100)
LINKS_MBIT = (10_000, 1_000)
LOCALITY = 512  # samples: 56 MB
NAMES = f"part-{{000000..{SHARDS - 1:06d}}}.tar"
MANY = 104  # shards of the large indexing: links to the others, 99,840 samples
_CLONE_NEWNET = 0x40000000
_LIMIT_S = 120  # of one measurement
_NOTES = (
    "Rates are medians over rounds, with the least and the most. The server runs on the same cores "
    "as the loader. CPU is of the loader's processes, in ms for each image. Memory is the most of "
    "the loader's processes, of no file, the ring of batches included. webdataset decodes whole "
    "JPEGs by torchvision; its second row does not decode. Staged: once all copies are there; the "
    "column of its first batch says after how long. Indexing reads headers and labels alone."
)

Results = dict[tuple[str, int, int], list[dict[str, float]]]
"""By the loader's title, the link in Mbit/s and the delay in ms."""


class Contender(NamedTuple):
    title: str
    name: str
    locality: int = 0
    is_local: bool = False
    stages: bool = False


CONTENDERS = (
    Contender("Trainyard, exact order", "trainyard"),
    Contender(f"Trainyard, locality {LOCALITY}", "trainyard", LOCALITY),
    Contender("Trainyard, exact order, staged", "trainyard", stages=True),
    Contender("webdataset", "webdataset"),
)
LOCAL = Contender("Trainyard, exact order, local disk", "trainyard", is_local=True)
BYTES = Contender("webdataset, bytes alone", "webdataset-bytes")  # 20 ms for each shard are nothing


def make_shards(folder: Path) -> Path:
    """Every shard has all photographs, in an order of its own."""
    shards = folder / "shards"
    if len(list(shards.glob("*.tar"))) == MANY:
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
    for number in range(SHARDS, MANY):
        (shards / f"part-{number:06d}.tar").symlink_to(f"part-{number % SHARDS:06d}.tar")
    return shards


@contextmanager
def server(folder: Path, host: Host) -> Iterator[str]:
    words = [sys.executable, "-m", "benchmarks.remotes.server", str(folder), host.address]
    with host.start(*words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://{host.address}:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def enter(host: Host) -> None:
    """From now on, this process and those that it starts are on the network of `host`."""
    with open(f"/proc/{host.pid}/ns/net") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of host {host.number}")


def tell(url: str, path: str) -> dict[str, int]:
    with urlopen(f"{url}/-/{path}") as answer:
        found: dict[str, int] = json.load(answer)
        return found


def measure(contender: Contender, location: str, seconds: float) -> dict[str, float]:
    words = [sys.executable, "-m", "benchmarks.remotes.contender", contender.name, location]
    words += ["--locality", str(contender.locality), "--seconds", str(seconds)]
    words += ["--stage"] if contender.stages else []
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        raise SystemExit(f"{contender.title}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def measure_all(url: str, shards: Path, emulated: Network, rounds: int, seconds: float) -> Results:
    found: Results = {}
    for number in range(rounds):
        turns = list(product(CONTENDERS, LINKS_MBIT, DELAYS_MS))
        turns += [(LOCAL, LINKS_MBIT[0], 0), (BYTES, LINKS_MBIT[0], 20)]
        random.Random(number).shuffle(turns)
        for contender, mbit, delay in turns:
            emulated.set(Link(mbit))
            tell(url, f"delay/{delay}")
            where = str(shards) if contender.is_local else url
            result = measure(contender, f"{where}/{NAMES}", seconds)
            found.setdefault((contender.title, mbit, delay), []).append(result)
            rate = f"{result['images_per_second']:,.0f}"
            about = f"round {number + 1}, {mbit} Mbit/s, {delay} ms"
            print(f"{about}: {contender.title}: {rate}", file=sys.stderr, flush=True)
    return found


def index_seconds(url: str, emulated: Network) -> list[dict[str, float]]:
    """Seconds, requests and bytes of indexing the shards, by link and delay."""
    turns = [(SHARDS, LINKS_MBIT[0], delay) for delay in DELAYS_MS]
    turns += [(MANY, mbit, 20) for mbit in LINKS_MBIT]
    found = []
    for shards, mbit, delay in turns:
        emulated.set(Link(mbit))
        tell(url, f"delay/{delay}")
        begun = time.perf_counter()
        build_index(f"{url}/part-{{000000..{shards - 1:06d}}}.tar")
        seconds, asked = time.perf_counter() - begun, tell(url, "counts")
        found.append({"shards": shards, "mbit": mbit, "delay_ms": delay, "seconds": seconds,
                      "requests": asked["requests"], "most": asked["most"],
                      "mb": asked["bytes"] / 1e6})  # fmt: skip
        print(f"indexing: {found[-1]}", file=sys.stderr, flush=True)
    return found


# --- what is printed ---


def rate_table(found: Results, mbit: int) -> Table:
    columns = ["loader", *(f"{delay} ms" for delay in DELAYS_MS)]
    rows = []
    for title in titles(found, mbit):
        some = [found.get((title, mbit, delay), []) for delay in DELAYS_MS]
        rows.append([title, *(rates(results, "images_per_second") for results in some)])
    link = f"{mbit // 1000} Gbit/s"
    return Table(f"Images a second at {link}, by the delay of each request", columns, rows)


def titles(found: Results, mbit: int) -> list[str]:
    return sorted({title for title, link, _ in found if link == mbit})


def cost_table(found: Results) -> Table:
    """At all links and delays together."""
    columns = ["loader", "requests an image", "kB an image", "most in flight", "CPU ms", "MB"]
    rows = []
    for title in titles(found, LINKS_MBIT[0]):
        results = [one for (other, *_), some in found.items() if other == title for one in some]
        middle = {key: statistics.median(one[key] for one in results) for key in results[0]}
        most = max(one["memory_mb"] for one in results)
        rows.append(
            [title, f"{middle['requests']:.3f}", f"{middle['kb']:,.0f}",
             f"{max(one['in_flight'] for one in results):.0f}",
             f"{middle['cpu_ms']:.2f}", f"{middle['memory_mb']:,.0f} (most {most:,.0f})"]
        )  # fmt: skip
    return Table("Requests, bytes, CPU and memory of the loader", columns, rows)


def first_table(found: Results) -> Table:
    columns = ["loader", "link", *(f"{delay} ms" for delay in DELAYS_MS)]
    rows = []
    for mbit in LINKS_MBIT:
        for title in titles(found, mbit):
            some = [found.get((title, mbit, delay), []) for delay in DELAYS_MS]
            seconds = [
                f"{statistics.median(one['first_s'] for one in results):.1f}" if results else ""
                for results in some
            ]
            rows.append([title, f"{mbit // 1000} Gbit/s", *seconds])
    return Table("Seconds to the first batch (staged: to the last copy)", columns, rows)


def index_table(found: list[dict[str, float]]) -> Table:
    rows = [
        [f"{one['shards']:.0f}", f"{one['shards'] * PHOTOGRAPHS:,.0f}",
         f"{one['mbit'] / 1000:.0f} Gbit/s", f"{one['delay_ms']:.0f} ms", f"{one['seconds']:.1f}",
         f"{one['requests']:,.0f}", f"{one['most']:.0f}", f"{one['mb']:,.0f}"]
        for one in found
    ]  # fmt: skip
    columns = "shards, samples, link, delay, seconds, requests, most in flight, MB read".split(", ")
    return Table("Indexing, once each", columns, rows)


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
    with network(2) as emulated, server(shards, emulated.hosts[0]) as url:
        enter(emulated.hosts[1])
        index = index_seconds(url, emulated)
        found = measure_all(url, shards, emulated, options.rounds, options.seconds)
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    tables = [rate_table(found, mbit) for mbit in LINKS_MBIT]
    tables += [first_table(found), cost_table(found), index_table(index)]
    for table in tables:
        print(f"\n{table.title}")
        print_table(table.columns, table.rows)
    if options.hardware:
        figures = about | {"index": index}
        figures["results"] = {
            f"{title}, {mbit} Mbit/s, {ms} ms": some for (title, mbit, ms), some in found.items()
        }
        parts = [f"# Remote data, {options.hardware}", listed(about), _NOTES]
        parts += [f"## {table.markdown()}" for table in tables]
        save(f"{options.hardware}-remote", figures, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
