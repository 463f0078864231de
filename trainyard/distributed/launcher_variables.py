"""Reads rank, world size and meeting point from the environment variables of any launcher.

A starter is a table row: the variables in which it gives each process its place. The innermost
starter that sets rank and size is used: torchrun inside srun, mpirun inside sbatch. RANK and
WORLD_SIZE can also be set by hand; they must then not contradict another starter. A shell of a
scheduler, of a batch script or interactive, is no task of a step: a world of one.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from zlib import crc32

from trainyard.distributed.hostlist import hosts_in, runs_in
from trainyard.distributed.starters import (
    BY_HAND,
    STARTERS,
    TASKS_PER_NODE,
    Starter,
    StarterValues,
    half_set,
    told_by,
    whole,
)
from trainyard.errors import InputError
from trainyard.world import World


@dataclass(frozen=True)
class MeetingPoint:
    """The address or file where the ranks of a world meet at the start."""

    host: str
    port: int
    is_hosted: bool = False
    """True if a launcher's agent serves the store there, False if the first rank does."""
    job: str = ""
    """The scheduler's name of this start, which separates two at one port; "" if unknown."""
    file: Path | None = None
    """A file instead of an address, if requested."""

    def __str__(self) -> str:
        if self.file is not None:
            return str(self.file)
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_PORTS = range(15_000, 30_000)  # below the kernel's ephemeral ports
_DEFAULT_PORT = 29_500  # torchrun's


def discover(env: Mapping[str, str] = os.environ) -> World:
    """The world that the environment describes; a world of one if it describes none.

    InputError, which names the variables, if some are missing or contradict each other.
    """
    return _found(env)[1]


def _found(env: Mapping[str, str]) -> tuple[Starter, World]:
    told = [told for name in STARTERS if (told := told_by(name, env)).places]
    complete = [one for one in told if one.is_complete]
    if not told:
        return Starter({}), World()
    if not complete:
        raise half_set(told[0], "rank", "size")
    inner = _innermost(told, complete, env)
    places: dict[str, int] = {}
    for one in (*reversed(complete), inner):  # equal ranks and sizes complement each other
        if one.has_same(inner, "rank") and one.has_same(inner, "size"):
            places |= one.places
    if not 0 <= places["rank"] < places["size"]:
        rank, size = (inner.starter.places[what] for what in ("rank", "size"))
        raise InputError(f"{rank} {places['rank']} lies outside a {size} of {places['size']}")
    return inner.starter, _world(StarterValues(inner.starter, inner.name, places), env)


def _innermost(
    told: list[StarterValues], complete: list[StarterValues], env: Mapping[str, str]
) -> StarterValues:
    by_hand = told[0] if told[0].starter is BY_HAND and not _is_by_launcher(told[0], env) else None
    schedulers = [one for one in complete if one.starter.places["rank"] != "RANK"]
    if by_hand is None or not schedulers:
        return complete[0]
    scheduler = schedulers[0]
    if by_hand.is_complete and scheduler.places["size"] == 1:  # a shell started the processes
        return by_hand
    for what in ("rank", "size"):
        if what in by_hand.places and not by_hand.has_same(scheduler, what):
            ours, theirs = by_hand.starter.places[what], scheduler.starter.places[what]
            raise InputError(
                f"{ours} = {by_hand.places[what]} contradicts {scheduler.name}'s {theirs} = "
                f"{scheduler.places[what]}: unset RANK and WORLD_SIZE, or set them in each task"
            )
    return scheduler


def _is_by_launcher(told: StarterValues, env: Mapping[str, str]) -> bool:
    is_whole = told.places.keys() >= {"rank", "size", "local_rank", "local_size"}
    return "TORCHELASTIC_RUN_ID" in env or is_whole


def _world(told: StarterValues, env: Mapping[str, str]) -> World:
    """The world, with missing fields filled in: where certain, else with each rank on its own node.

    Each rank then gets the first GPU that it sees. `check_devices` reports a GPU shared by ranks.
    """
    places = dict(told.places)
    rank, size, num_nodes = places["rank"], places["size"], places.get("num_nodes")
    if size == 1:
        return World()
    is_local = places.keys() & {"local_rank", "local_size"}
    is_near = not is_local and num_nodes is None and is_loopback(env.get("MASTER_ADDR", ""))
    if num_nodes == 1 or places.get("local_size") == size or is_near:
        places = {"local_rank": rank, "local_size": size, "node": 0, "num_nodes": 1} | places
    elif len(is_local) == 1:
        if num_nodes is None or size % num_nodes or "local_rank" not in places:
            raise half_set(told, "local_rank", "local_size")
        places["local_size"] = size // num_nodes
    local_size = places.setdefault("local_size", 1)
    num_nodes = places.setdefault("num_nodes", -(-size // local_size))
    places.setdefault("node", min(rank // local_size, num_nodes - 1))
    named: dict[str, Any] = {**places}
    return World(**named)


def is_loopback(host: str) -> bool:
    """True if an address or name is this machine's loopback."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# --- meeting point ---


def meeting_point(world: World, env: Mapping[str, str] = os.environ) -> MeetingPoint:
    """The meeting point of a world of several ranks. InputError if no variable gives it."""
    starter, _ = _found(env)
    job = ".".join(env.get(name, "") for name in starter.job).strip(".")
    if "TRAINYARD_RENDEZVOUS" in env:
        return MeetingPoint("", 0, job=job, file=_file(env["TRAINYARD_RENDEZVOUS"]))
    host = env.get("MASTER_ADDR", "").strip("[]") or _first_host(world, env, starter)
    if host is None:
        raise InputError(
            "MASTER_ADDR is not set, and the host of rank 0 is not known otherwise: set it for "
            "all ranks (`mpirun -x MASTER_ADDR=HOST ...`), or start them by `trainyard launch`"
        )
    derived = _PORTS[crc32(job.encode()) % len(_PORTS)] if job else _DEFAULT_PORT
    port = whole("MASTER_PORT", env.get("MASTER_PORT") or str(derived))
    if not 0 < port < 1 << 16:
        raise InputError(f"MASTER_PORT is {port}, which is not a port")
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and starter is BY_HAND
    return MeetingPoint(host, port, is_hosted=hosted, job=job)


def _first_host(world: World, env: Mapping[str, str], starter: Starter) -> str | None:
    if world.num_nodes == 1:
        return "127.0.0.1"
    return next(_hosts(env, starter), None)


def _hosts(env: Mapping[str, str], starter: Starter) -> Iterator[str]:
    """The host of each node, in order; empty if unknown."""
    listed = env.get("TRAINYARD_HOSTS")
    return iter(listed.split(",")) if listed else hosts_in(env.get(starter.hosts, ""))


def _file(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise InputError(f"TRAINYARD_RENDEZVOUS = {url!r}: write file:///PATH of a file to create")
    return Path(unquote(parts.path))


def hosts_of_ranks(world: World, env: Mapping[str, str] = os.environ) -> dict[int, str]:
    """The host of each rank, to name absent ranks; empty if no scheduler gives the hosts."""
    starter, _ = _found(env)
    hosts = list(_hosts(env, starter))
    if starter is STARTERS["Slurm"] and TASKS_PER_NODE in env:
        counts = [number for number, times in runs_in(env[TASKS_PER_NODE]) for _ in range(times)]
    else:
        counts = [world.local_size] * len(hosts)
    if not hosts or len(counts) != len(hosts) or sum(counts) != world.size:
        return {}
    first = sum(counts[: world.node])
    here = range(first, first + counts[world.node])
    if world.rank not in here or env.get("SLURM_GTIDS") not in (None, ",".join(map(str, here))):
        return {}  # ranks are not numbered node by node
    nodes = (host for host, count in zip(hosts, counts, strict=True) for _ in range(count))
    return dict(enumerate(nodes))
