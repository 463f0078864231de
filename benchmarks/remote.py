"""Images a second from a web server that answers late, beside three peers and the local disk.

python -m benchmarks.remote FOLDER [--rounds N] [--hardware NAME]      20 minutes, as root

FOLDER gets 960 photographs like ImageNet's, 7,680 samples of them as WebDataset shards, as those of
litdata and as those of streaming (850 MB each), and the environments of these peers (loaders/). A
server (remotes/server.py) delays each request by 0 to 100 ms. It lies on an emulated host
(tests/services/network.py) with a link of 1 or 10 Gbit/s. Each loader runs in a process of its own
with two threads or workers, gives batches of 64 random crops of 224 x 224, and is measured in
turns. The server and the loader share the machine's cores.

FOLDER/measured.jsonl keeps what is measured: the same command goes on there, after an end by
--limit too.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from benchmarks.loaders.environments import MAIN, install, python_of
from benchmarks.loaders.photographs import make_photographs
from benchmarks.loaders.tables import Table, with_spread
from benchmarks.loaders.variants import write_by_peer
from benchmarks.saving import listed, save
from tests.services.network import Host, Link, Network, network
from trainyard.cli.printing import print_table
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.formats.webdataset import write
from trainyard.data.index.build import build_index

PHOTOGRAPHS, SHARDS = 960, 8
DELAYS_MS = (0, 5, 20, 50, 100)
LINKS_MBIT = (10_000, 1_000)
ALL = list(product(LINKS_MBIT, DELAYS_MS))
SOME = [(10_000, 5), (10_000, 20), (10_000, 100), (1_000, 20)]  # for what takes long to measure
LOCALITY = 512  # samples: 56 MB
NAMES = f"part-{{000000..{SHARDS - 1:06d}}}.tar"
MANY = 104  # shards of the large indexing: links to the others, 99,840 samples
_CLONE_NEWNET = 0x40000000
_LIMIT_S = 120  # of one measurement
_NOTES = (
    "Rates are medians over rounds, with the least and the most. The server runs on the same cores "
    "as the loader. CPU is of the loader's processes, in ms for each image. Memory is the most of "
    "the loader's processes, of no file, the ring of batches included. webdataset decodes whole "
    "JPEGs by torchvision; its second row does not decode. litdata and streaming fetch whole "
    "shards of their own kinds (64 to 72 MB) by S3 to a disk, decode by simplejpeg, and are in "
    "their first epoch; what is read in the seconds measured was mostly fetched before. "
    "Staged: once all copies are there; the column of its first batch says after how long.\n\n"
    "Indexing reads headers and labels alone. Each header tells where the next is: a shard of 960 "
    "samples read by one request after the other would take 960 x 20 ms = 19 s, whatever the link. "
    "192 parts at a time have a floor of 99,840 / 192 x 20 ms = 10 s; what is above it is CPU, "
    "of the server and ours, on two cores."
)

Results = dict[tuple[str, int, int], list[dict[str, float]]]
"""By the loader's title, the link in Mbit/s and the delay in ms."""


class Contender(NamedTuple):
    title: str
    name: str
    locality: int = 0
    is_local: bool = False
    stages: bool = False
    environment: str = MAIN

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Links and delays."""
        if self.is_local:
            return [(LINKS_MBIT[0], 0)]
        if self.name == "webdataset_bytes":  # 20 ms for each shard are nothing
            return [(LINKS_MBIT[0], 20)]
        return SOME if self.stages or self.name != "trainyard" else ALL


CONTENDERS = (
    Contender("Trainyard, exact order", "trainyard"),
    Contender(f"Trainyard, locality {LOCALITY}", "trainyard", LOCALITY),
    Contender("Trainyard, exact order, staged", "trainyard", stages=True),
    Contender("Trainyard, exact order, local disk", "trainyard", is_local=True),
    Contender("webdataset", "webdataset"),
    Contender("webdataset, bytes alone", "webdataset_bytes"),
    Contender("litdata", "litdata", environment="litdata"),
    Contender("streaming", "streaming", environment="streaming"),
)
PEERS = {"litdata": "write_even", "streaming": "write"}


def make_data(folder: Path) -> Path:
    """What is served: shards for each loader, in a folder each."""
    served = folder / "served"
    if len(list((served / "shards").glob("*.tar"))) < MANY:
        make_shards(folder, served / "shards")
    for peer, function in PEERS.items():
        if reason := install(folder, peer):
            raise SystemExit(f"{peer}: {reason}")
        if not (served / peer).exists():
            copies = copied(folder)
            write_by_peer(folder, peer, copies, folder / "unfinished", function)
            (folder / "unfinished").rename(served / peer)
    return served


def copied(folder: Path) -> Path:
    """As many samples as the shards have, as links to the photographs."""
    copies = folder / "copies"
    for path in (folder / "photographs").glob("*/*.jpg"):
        (copies / path.parent.name).mkdir(parents=True, exist_ok=True)
        for number in range(SHARDS):
            link = copies / path.parent.name / f"{number}-{path.name}"
            link.unlink(missing_ok=True)
            os.link(path, link)
    return copies


def make_shards(folder: Path, shards: Path) -> None:
    """Every shard has all photographs, in an order of its own."""
    about = make_photographs(folder / "photographs", PHOTOGRAPHS)
    shards.mkdir(parents=True, exist_ok=True)
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


@contextmanager
def server(folder: Path, host: Host) -> Iterator[str]:
    words = [sys.executable, "-m", "benchmarks.remotes.server", str(folder), host.address, "8765"]
    with host.start(*words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            # The same in every part of a run: a saved index belongs to a URL.
            yield f"http://{host.address}:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def enter(host: Host) -> None:
    """From now on, this process and those that it starts are on the network of `host`."""
    with open(f"/proc/{host.pid}/ns/net") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of host {host.number}")


def tell(url: str, path: str) -> dict[str, float]:
    with urlopen(f"{url}/-/{path}") as answer:
        found: dict[str, float] = json.load(answer)
        return found


class Journal:
    """What is measured, a line each in a file, so that a run can be ended and resumed."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path, self._end = path, time.monotonic() + limit_s
        lines = path.read_text().splitlines() if path.exists() else []
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def measure(self, about: dict[str, Any], measure: Callable[[], dict[str, float]]) -> None:
        """Measures unless that is done. SystemExit when time is up."""
        if any(about.items() <= line.items() for line in self.lines):
            return
        if time.monotonic() > self._end:
            raise SystemExit("time is up: the same command goes on from here")
        self.lines.append(about | {"load": round(os.getloadavg()[0], 1), "found": measure()})
        with open(self._path, "a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")
        print(self.lines[-1], file=sys.stderr, flush=True)


def measure(folder: Path, url: str, contender: Contender, seconds: float) -> dict[str, float]:
    where = str(folder / "served") if contender.is_local else url
    what = contender.name if contender.name in PEERS else f"shards/{NAMES}"
    words = [str(python_of(folder, contender.environment)), "-m", "benchmarks.remotes.contender"]
    with tempfile.TemporaryDirectory(dir=folder) as copies:
        words += [contender.name, f"{where}/{what}", copies, "--seconds", str(seconds)]
        words += ["--locality", str(contender.locality)]
        words += ["--stage"] if contender.stages else []
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"images_per')]
    if not lines:
        raise SystemExit(f"{contender.title}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def index_seconds(url: str, shards: int) -> dict[str, float]:
    """Seconds, requests and bytes of indexing so many shards."""
    begun = time.perf_counter()
    build_index(f"{url}/shards/part-{{000000..{shards - 1:06d}}}.tar")
    seconds, asked = time.perf_counter() - begun, tell(url, "counts")
    return {"seconds": seconds, "requests": asked["requests"], "most": asked["most"],
            "mb": asked["bytes"] / 1e6, "server_cpu_s": asked["cpu_s"]}  # fmt: skip


def measure_all(journal: Journal, emulated: Network, url: str, options: Any) -> None:
    def set_up(mbit: int, delay: int) -> None:
        emulated.set(Link(mbit))
        tell(url, f"delay/{delay}")

    indexed = [(SHARDS, LINKS_MBIT[0], delay) for delay in DELAYS_MS]
    indexed += [(MANY, mbit, 20) for mbit in LINKS_MBIT]
    for shards, mbit, delay in indexed:
        set_up(mbit, delay)
        about: dict[str, Any] = {"shards": shards, "mbit": mbit, "delay_ms": delay}
        journal.measure(about, partial(index_seconds, url, shards))
    for number in range(options.rounds):
        turns = [(each, *turn) for each in CONTENDERS for turn in each.turns]
        random.Random(number).shuffle(turns)
        for contender, mbit, delay in turns:
            set_up(mbit, delay)
            about = {"round": number, "title": contender.title, "mbit": mbit, "delay_ms": delay}
            call = partial(measure, options.folder, url, contender, options.seconds)
            journal.measure(about, call)


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
    """At the fast link, all delays together."""
    columns = [
        "loader",
        "requests an image",
        "kB an image",
        "most in flight",
        "CPU ms",
        "server's",
        "MB",
    ]
    rows = []
    for title in titles(found, LINKS_MBIT[0]):
        results = [one for (other, mbit, _), some in found.items()
                   if (other, mbit) == (title, LINKS_MBIT[0]) for one in some]  # fmt: skip
        middle = {key: statistics.median(one[key] for one in results) for key in results[0]}
        most = max(one["memory_mb"] for one in results)
        rows.append(
            [title, f"{middle['requests']:.3f}", f"{middle['kb']:,.0f}",
             f"{max(one['in_flight'] for one in results):.0f}", f"{middle['cpu_ms']:.2f}",
             f"{middle['server_cpu_ms']:.2f}", f"{middle['memory_mb']:,.0f} (most {most:,.0f})"]
        )  # fmt: skip
    return Table("At 10 Gbit/s: requests, bytes, CPU and memory of the loader", columns, rows)


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


def epoch_table(found: Results) -> Table:
    """What a rate after the first batch hides: how much was fetched before it."""
    columns = ["loader", *(f"{mbit // 1000} Gbit/s, {delay} ms" for mbit, delay in SOME)]
    images, rows = SHARDS * PHOTOGRAPHS, []
    for each in CONTENDERS:
        if each.is_local or each.stages or each.turns == [(LINKS_MBIT[0], 20)]:
            continue
        seconds = []
        for mbit, delay in SOME:
            results = found.get((each.title, mbit, delay), [])
            took = [one["first_s"] + images / one["images_per_second"] for one in results]
            seconds.append(f"{statistics.median(took):.1f}" if took else "")
        rows.append([each.title, *seconds])
    title = (
        f"Seconds for the first {images:,} images: to the first batch, and all at the rate above"
    )
    return Table(title, columns, rows)


def index_table(lines: list[dict[str, Any]]) -> Table:
    found = [line | line["found"] for line in lines]
    rows = [
        [f"{one['shards']:.0f}", f"{one['shards'] * PHOTOGRAPHS:,.0f}",
         f"{one['mbit'] / 1000:.0f} Gbit/s", f"{one['delay_ms']:.0f} ms", f"{one['seconds']:.1f}",
         f"{one['requests']:,.0f}", f"{one['most']:.0f}", f"{one['mb']:,.0f}",
         f"{one['server_cpu_s']:.1f}"]
        for one in found
    ]  # fmt: skip
    columns = ["shards", "samples", "link", "delay", "seconds", "requests", "most in flight",
               "MB read", "server's CPU, s"]  # fmt: skip
    return Table("Indexing, once each", columns, rows)


def rates(results: list[dict[str, float]], key: str) -> str:
    return with_spread([one[key] for one in results])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--limit", type=float, default=1e9, help="begin no more after such a time")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-remote.json and .md")
    return parser.parse_args()


def main() -> None:
    options = parse()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRAINYARD_CACHE"] = str(folder / "cache")
    served = make_data(folder)
    journal = Journal(folder / "measured.jsonl", options.limit)
    with network(2) as emulated, server(served, emulated.hosts[0]) as url:
        enter(emulated.hosts[1])
        measure_all(journal, emulated, url, options)
    index = [line for line in journal.lines if "shards" in line]
    found: Results = {}
    for line in journal.lines:
        if line.get("round", options.rounds) < options.rounds:
            key = line["title"], line["mbit"], line["delay_ms"]
            found.setdefault(key, []).append(line["found"])
    about = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "load": f"{min(line['load'] for line in journal.lines)} to "
        f"{max(line['load'] for line in journal.lines)}",
    }
    tables = [rate_table(found, mbit) for mbit in LINKS_MBIT]
    tables += [first_table(found), epoch_table(found), cost_table(found), index_table(index)]
    for table in tables:
        print(f"\n{table.title}")
        print_table(table.columns, table.rows)
    if options.hardware:
        parts = [f"# Remote data, {options.hardware}", listed(about), _NOTES]
        parts += [f"## {table.markdown()}" for table in tables]
        figures = about | {"measured": journal.lines}
        save(f"{options.hardware}-remote", figures, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
