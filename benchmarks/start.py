"""How long it takes until ranks are under way, and what finding out who they are costs.

python -m benchmarks.start FOLDER [--ranks 2 8 32] [--hardware NAME] [--out benchmarks/results]

Discovery, without processes: the environments that Slurm would give all tasks of a job, eight a
node, are read one after the other, as if each rank's share were done here. Then the roll call: one
process is the first rank, another one all others, each over a connection of its own. Then real
ranks of the `debug` recipe on the digits, all on this machine, two steps. FOLDER is for the data
and the runs.
"""

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store

from benchmarks.saving import RESULTS, save
from trainyard.data.prepare.digits import prepare_digits
from trainyard.distributed.launcher_variables import (
    MeetingPoint,
    discover,
    hosts_of_ranks,
    meeting_point,
)
from trainyard.distributed.startup_check import check_start
from trainyard.distributed.store import open_stores
from trainyard.launch.meeting_point import free_port
from trainyard.world import World

SIZES = (256, 1024, 4096)
CHECKED = (64, 256)
CHECK_S = 300
PER_NODE = 8
STEPS = 2


def environment(rank: int, size: int) -> dict[str, str]:
    nodes = size // PER_NODE
    return {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[0001-{nodes:04}]",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{nodes})",
        "SLURM_NODEID": str(rank // PER_NODE),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % PER_NODE),
    }


def discovery_seconds(size: int) -> tuple[float, float]:
    """Of all ranks together; and of what the first one alone does, for its messages."""
    environments = [environment(rank, size) for rank in range(size)]
    started = time.perf_counter()
    worlds = [discover(env) for env in environments]
    points = {meeting_point(*pair) for pair in zip(worlds, environments, strict=True)}
    between = time.perf_counter()
    hosts = hosts_of_ranks(worlds[0], environments[0])
    ended = time.perf_counter()
    assert worlds[-1] == World(
        size - 1, size, PER_NODE - 1, PER_NODE, size // PER_NODE - 1, size // PER_NODE
    )
    assert len(points) == 1 and len(hosts) == size and len(set(hosts.values())) == size // PER_NODE
    return between - started, ended - between


def point_of(port: int) -> MeetingPoint:
    return MeetingPoint("127.0.0.1", port)


def other_ranks(port: int, size: int) -> None:
    """All but rank 0, by threads, which connect before the clock starts."""
    allow_files()
    worlds = [World(rank, size) for rank in range(1, size)]
    with ThreadPoolExecutor(size) as pool:
        stores = [*pool.map(lambda world: open_stores(point_of(port), world, CHECK_S)[0], worlds)]
        stores[0].set("ready", "")
        list(pool.map(lambda store, world: check(store, world, port), stores, worlds))


def check(store: Store, world: World, port: int) -> None:
    check_start(store, world, {}, point=point_of(port), limit_s=CHECK_S)


def check_seconds(size: int) -> float:
    """The startup check of so many ranks, on the cores of this machine alone."""
    allow_files()
    port, world = free_port(), World(0, size)
    process = multiprocessing.get_context("spawn").Process(target=other_ranks, args=(port, size))
    process.start()
    store, _ = open_stores(point_of(port), world, CHECK_S)
    store.get("ready")
    started = time.perf_counter()
    check(store, world, port)
    took = time.perf_counter() - started
    process.join()
    assert process.exitcode == 0
    return took


def allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start_seconds(folder: Path, ranks: int) -> tuple[float, float]:
    """Of a run on so many ranks until the first step is done, and until it has ended."""
    run = folder / f"{ranks}-ranks-{time.time_ns()}"
    metrics = run / "metrics.jsonl"
    command = [sys.executable, "-m", "trainyard", "launch", "local", "debug", "--ranks", ranks]
    command += ["--data", folder / "digits", "--run", run, "--batch.size", 64]
    command += ["--run.length", f"{STEPS} steps", "--run.log_every", "1 step", "--data.threads", 1]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started, first = time.perf_counter(), 0.0
    with subprocess.Popen(list(map(str, command)), env=env, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with suppress(OSError):
                if not first and '"train"' in metrics.read_text():
                    first = time.perf_counter() - started
            time.sleep(0.02)
    assert process.returncode == 0
    return first, time.perf_counter() - started


def discovery(found: list[dict[str, float]]) -> str:
    text = "| ranks | discovery, all | a rank's share | hosts, rank 0 |\n|---|---|---|---|\n"
    for size in SIZES:
        everyone, hosts = discovery_seconds(size)
        found.append({"ranks": size, "all_s": everyone, "hosts_s": hosts})
        text += (
            f"| {size:,} | {everyone * 1e3:.0f} ms | {everyone / size * 1e6:.0f} us "
            f"| {hosts * 1e3:.1f} ms |\n"
        )
    return text


def startup_checks(found: list[dict[str, float]]) -> str:
    text = "| ranks | startup check |\n|---|---|\n"
    for size in CHECKED:
        check_s = check_seconds(size)
        found.append({"ranks": size, "check_s": check_s})
        text += f"| {size:,} | {check_s:.2f} s |\n"
    return text


def start(found: list[dict[str, float]], folder: Path, numbers: list[int]) -> str:
    text = (
        "| debug ranks here | first step after | 2 steps, evaluated, ended | load before |\n"
        "|---|---|---|---|\n"
    )
    if not (folder / "digits").exists():
        folder.mkdir(parents=True, exist_ok=True)
        prepare_digits(folder / "digits")
    for ranks in numbers:
        load = os.getloadavg()[0]
        first, whole = start_seconds(folder, ranks)
        found.append({"ranks": ranks, "first_step_s": first, "whole_s": whole, "load": load})
        text += f"| {ranks} | {first:.1f} s | {whole:.1f} s | {load:.1f} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-start.json and .md")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"discovery": [], "check": [], "start": []}
    text = discovery(found["discovery"]) + "\n"
    text += startup_checks(found["check"]) + "\n"
    text += start(found["start"], options.folder, options.ranks)
    print(text)
    if options.hardware:
        heading = f"# From nothing to the first step, {options.hardware}\n\n"
        save(f"{options.hardware}-start", found, heading + text, folder=options.out)


if __name__ == "__main__":
    main()
