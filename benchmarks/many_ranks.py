"""What many ranks ask of the first one: messages, bytes, connections, files and seconds.

python -m benchmarks.many_ranks [--ranks 8 64 128] [--checked 1000] [--hardware NAME]

Each rank is a process that starts as those of a run do, makes the groups of a run, and then does
what ten steps, a save and ten seconds of training ask of them, without a model. All are copies of
this process and share its memory; each eight pretend to be a host. Beyond a few hundred, ranks are
threads of one process, and make the startup check alone. Messages are packets with data from the
ranks to the store in the process of the first rank, as the kernel counts them (`ss`, of iproute2).
"""

import argparse
import multiprocessing
import os
import re
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.saving import RESULTS, save
from benchmarks.start import PER_NODE
from trainyard.distributed import init_distributed
from trainyard.distributed.interfaces import free_port
from trainyard.distributed.launcher_variables import MeetingPoint
from trainyard.distributed.process_info import ProcessInfo
from trainyard.distributed.startup_check import check_start
from trainyard.distributed.store import open_stores
from trainyard.world import World, gather, new_group

STEPS, TRAINED_S, LIMIT_S = 10, 10, 300
FACTS = {f"key {number}": "value" for number in range(60)}  # as of a recipe
Row = dict[str, Any]
_mine = threading.local()


def pretend_hosts() -> None:
    """From now on a rank's process says that its host is another one than that of most others."""
    current = ProcessInfo.current

    def elsewhere(_: type[ProcessInfo]) -> ProcessInfo:
        return current()._replace(host=f"node{getattr(_mine, 'rank', 0) // PER_NODE:05}")

    setattr(ProcessInfo, "current", classmethod(elsewhere))  # noqa: B010


def told(port: int) -> Row:
    """What the first rank's store has received and sent, by the connections that are open."""
    words = ["ss", "-Htin", "state", "established", f"sport = :{port}"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def total(name: str) -> int:
        return sum(map(int, re.findall(rf"\b{name}:(\d+)", text)))

    return {
        "messages": total("data_segs_in"),
        "bytes_in": total("bytes_received"),
        "bytes_out": total("bytes_sent"),
        "connections": text.count("bytes_sent"),
    }


def allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Phases:
    """On the first rank: what each phase took."""

    def __init__(self, world: World, port: int) -> None:
        self._world, self._port, self._begun = world, port, time.perf_counter()
        self._last: Row = {}
        self.rows: list[Row] = []

    def end(self, phase: str) -> None:
        """All ranks have passed it; that they are asked for this is counted with the next one."""
        took = time.perf_counter() - self._begun
        if self._world.is_first:
            now, files = told(self._port), len(os.listdir("/proc/self/fd"))
            row = {key: count - self._last.get(key, 0) for key, count in now.items()}
            row |= {"connections": now["connections"], "files": files, "seconds": took}
            self.rows.append({"ranks": self._world.size, "phase": phase} | row)
            self._last = now
        self._begun = time.perf_counter()


def rank(number: int, size: int, port: int, results: Any) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    values = (number, number, size, size, port)
    os.environ |= dict(zip(names, map(str, values), strict=True)) | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    _mine.rank = number
    pretend_hosts()
    world = World(number, size, number, size)
    phases = Phases(world, port)
    with init_distributed(world, FACTS) as watchdog:
        watchdog.begin(600)
        dist.barrier()
        phases.end("start")
        stop = new_group(backend="gloo")
        writers = replace(world, group=new_group(backend="gloo"))
        for group in (stop, writers.group):
            dist.all_reduce(torch.zeros(4), group=group)
        phases.end("groups of stops and saves")
        for step in range(STEPS):
            watchdog.heartbeat.mark("step", step + 1)
            dist.all_reduce(torch.zeros(2**16))
            dist.all_reduce(torch.zeros(4), dist.ReduceOp.MAX, group=stop)
        phases.end(f"{STEPS} steps")
        gather(writers, {f"file-{number}": "0" * 64})
        phases.end("a save")
        time.sleep(TRAINED_S)
        phases.end(f"{TRAINED_S} s")
        dist.barrier()
    phases.end("end")
    results.put(phases.rows)


def world_of(size: int) -> list[Row]:
    """So many processes; they are copies, so that the imports of one are those of all."""
    context = multiprocessing.get_context("fork")
    results, port = context.Queue(), free_port()
    ranks = [context.Process(target=rank, args=(n, size, port, results)) for n in range(size)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=LIMIT_S) for _ in ranks]
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    rows: list[Row]
    (rows,) = [rows for rows in found if rows]
    return rows[:-1]  # the store is gone with the last one


# --- the startup check alone ---


def others(port: int, size: int) -> None:
    allow_files()
    pretend_hosts()
    point = MeetingPoint("127.0.0.1", port)
    worlds = [World(number, size) for number in range(1, size)]
    with ThreadPoolExecutor(size) as pool:
        stores = [*pool.map(lambda world: open_stores(point, world, LIMIT_S), worlds)]
        stores[0][0].set("ready", "")
        list(pool.map(lambda pair, world: check(pair[0], world, point), stores, worlds))
        stores[0][0].set("done", "")
        stores[0][0].wait(["counted"])


def check(store: dist.Store, world: World, point: MeetingPoint) -> None:
    _mine.rank = world.rank
    check_start(store, world, FACTS, point=point, limit_s=LIMIT_S)


def checked(size: int) -> Row:
    allow_files()
    pretend_hosts()
    point = MeetingPoint("127.0.0.1", free_port())
    process = multiprocessing.get_context("spawn").Process(target=others, args=(point.port, size))
    process.start()
    store, _ = open_stores(point, World(0, size), LIMIT_S)
    store.get("ready")
    before, begun = told(point.port), time.perf_counter()
    check(store, World(0, size), point)
    store.get("done")
    took, after = time.perf_counter() - begun, told(point.port)
    row = {key: count - before[key] for key, count in after.items()}
    row |= {"connections": after["connections"], "files": len(os.listdir("/proc/self/fd"))}
    store.set("counted", "")
    process.join()
    return {"ranks": size, "phase": "startup check"} | row | {"seconds": took}


def table(rows: list[Row]) -> str:
    heads = ("ranks", "phase", "messages", "kB in", "kB out", "connections", "files", "s")
    lines = [heads, ("---",) * len(heads)]
    for row in rows:
        sent = (f"{row[name] / 1e3:,.0f}" for name in ("bytes_in", "bytes_out"))
        counts = (f"{row[name]:,}" for name in ("connections", "files"))
        first = f"{row['ranks']:,}", row["phase"], f"{row['messages']:,}"
        lines.append((*first, *sent, *counts, f"{row['seconds']:.1f}"))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 128])
    parser.add_argument("--checked", type=int, nargs="*", default=[64, 1000])
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-many-ranks.json and .md")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [row for size in options.ranks for row in world_of(size)]
    rows += [checked(size) for size in options.checked]
    text = f"{table(rows)}\nLoad of the machine before: {load:.1f}.\n"
    print(text)
    if options.hardware:
        heading = f"# What many ranks ask of the first one, {options.hardware}\n\n"
        name = f"{options.hardware}-many-ranks"
        save(name, {"load": load, "rows": rows}, heading + text, folder=options.out)


if __name__ == "__main__":
    main()
