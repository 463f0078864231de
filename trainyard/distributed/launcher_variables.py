"""Reads rank, world size and meeting point from the environment variables of any launcher.

A starter is a row of a table: the variables in which it gives each process its rank. The first row
that has rank and size is used: torchrun inside srun, mpirun inside sbatch. Rows with the same rank
and size complement it. In a batch script or an interactive shell of a scheduler, outside of srun,
the world is one rank.

The rows are not with the launchers of launch/: ranks read them without any, half of them are of
starters that Trainyard does not start, and their order counts.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from zlib import crc32

from trainyard.errors import InputError
from trainyard.world import World


@dataclass(frozen=True)
class Starter:
    name: str
    variables: Mapping[str, str]
    """The variable for each field of a World."""
    job: tuple[str, ...] = ()
    """The variables that name the start, equal for its ranks and different for other starts."""
    hosts: str = ""
    """The variable with Slurm's list of hosts; the first one is rank 0's."""


_TASKS_OF_NODE = "SLURM_GTIDS"  # 4,5,6,7
_OF_TORCHRUN = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
}

# Innermost first. https://docs.pytorch.org/docs/stable/elastic/run.html, ray.train, mpirun(1),
# Hydra and Intel MPI, submitit.local, srun(1)
STARTERS = (
    Starter(
        "torchrun",  # its variables are also set by hand
        _OF_TORCHRUN | {"node": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"},
        job=("TORCHELASTIC_RUN_ID",),
    ),
    Starter("Ray Train", _OF_TORCHRUN | {"node": "NODE_RANK"}),
    Starter(
        "OpenMPI",
        {
            "rank": "OMPI_COMM_WORLD_RANK",
            "size": "OMPI_COMM_WORLD_SIZE",
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
        job=("PMIX_NAMESPACE",),
        hosts="SLURM_JOB_NODELIST",
    ),
    Starter(
        "PMI",
        {
            "rank": "PMI_RANK",
            "size": "PMI_SIZE",
            "local_rank": "MPI_LOCALRANKID",
            "local_size": "MPI_LOCALNRANKS",
        },
        job=("PMI_JOBID",),
        hosts="SLURM_JOB_NODELIST",
    ),
    Starter(
        "submitit",
        {
            "rank": "SUBMITIT_LOCAL_GLOBALID",
            "size": "SUBMITIT_LOCAL_NTASKS",
            "local_rank": "SUBMITIT_LOCAL_LOCALID",
            "local_size": "SUBMITIT_LOCAL_NTASKS",  # all are on this machine
        },
        job=("SUBMITIT_LOCAL_JOB_ID",),
    ),
    Starter(
        "Slurm",
        {
            "rank": "SLURM_PROCID",
            "size": "SLURM_STEP_NUM_TASKS",
            "local_rank": "SLURM_LOCALID",
            "local_size": _TASKS_OF_NODE,
            "node": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
        },
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        hosts="SLURM_STEP_NODELIST",
    ),
)
_SET_BY_SHELLS = "SLURM_PROCID"
PORTS = range(15_000, 30_000)  # below the kernel's ephemeral ports
_DEFAULT_PORT = 29_500  # torchrun's


@dataclass(frozen=True)
class MeetingPoint:
    """The address where the ranks of a world meet at the start."""

    host: str
    port: int
    is_hosted: bool = False
    """True if a launcher's agent serves the store there, False if the first rank does."""
    job: str = ""
    """The scheduler's name of this start, which separates two at one port; "" if unknown."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def discover(env: Mapping[str, str] = os.environ) -> World:
    """The world that the environment describes; a world of one if it describes none.

    InputError, which names the variables, if some are missing.
    """
    return _of_starter(env)[1]


def discover_or_alone() -> World:
    """Like `discover`; a world of one if the environment contradicts itself."""
    try:
        return discover()
    except InputError:
        return World()


def _of_starter(env: Mapping[str, str]) -> tuple[Starter, World]:
    given = [(starter, values) for starter in STARTERS if (values := _values(starter, env))]
    if not given:
        return STARTERS[0], World()
    complete = [each for each in given if each[1].keys() >= {"rank", "size"}]
    if not complete:
        raise _half_set(*given[0], "rank", "size")
    starter, values = complete[0]
    rank, size = values["rank"], values["size"]
    if rank >= size:
        names = starter.variables
        raise InputError(
            "rank.beyond-size",
            "{variable} {rank} lies outside a {size_variable} of {size}",
            variable=names["rank"],
            rank=rank,
            size_variable=names["size"],
            size=size,
        )
    for _, others in complete:
        if (others["rank"], others["size"]) == (rank, size):
            values = others | values
    return starter, _world(starter, values, env)


def _values(starter: Starter, env: Mapping[str, str]) -> dict[str, int]:
    """The values of a starter's variables; none without its rank or size."""
    names = starter.variables
    signs = {names["rank"], names["size"]} - {_SET_BY_SHELLS}
    if signs.isdisjoint(env):
        return {}
    return {
        what: len(env[name].split(",")) if name == _TASKS_OF_NODE else parse_int(name, env[name])
        for what, name in names.items()
        if name in env
    }


def _half_set(starter: Starter, values: Mapping[str, int], *wanted: str) -> InputError:
    """The error for the first of the `wanted` values that a starter has not set."""
    names = starter.variables
    missing = next(what for what in wanted if what not in values)
    present = ", ".join(names[what] for what in values if what in names)
    return InputError(
        "rank.variable-missing",
        "{variable} is not set although {given} is ({launcher} sets both)",
        variable=names[missing],
        given=present,
        launcher=starter.name,
    )


def parse_int(name: str, text: str) -> int:
    """The number in a variable. InputError if its text is not a whole number."""
    if not text.strip().isdigit():
        raise InputError(
            "variable.not-a-number",
            "{name} is {value!r}, which is not a whole number",
            name=name,
            value=text,
        )
    return int(text)


def _world(starter: Starter, values: dict[str, int], env: Mapping[str, str]) -> World:
    """The world, with missing fields filled in: where certain, else with each rank on its own node.

    Each rank then gets the first GPU that it sees. `check_devices` reports a GPU shared by ranks.
    """
    rank, size, num_nodes = values["rank"], values["size"], values.get("num_nodes")
    if size == 1:
        return World()
    is_local = values.keys() & {"local_rank", "local_size"}
    is_near = not is_local and num_nodes is None and is_loopback(env.get("MASTER_ADDR", ""))
    if num_nodes == 1 or values.get("local_size") == size or is_near:
        values = {"local_rank": rank, "local_size": size, "node": 0, "num_nodes": 1} | values
    elif len(is_local) == 1:
        if num_nodes is None or size % num_nodes or "local_rank" not in values:
            raise _half_set(starter, values, "local_rank", "local_size")
        values["local_size"] = size // num_nodes
    local_size = values.setdefault("local_size", 1)
    num_nodes = values.setdefault("num_nodes", -(-size // local_size))
    values.setdefault("node", min(rank // local_size, num_nodes - 1))
    named: dict[str, Any] = {**values}
    return World(**named)


def is_loopback(host: str) -> bool:
    """True if an address or name is this machine's loopback."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def meeting_point(world: World, env: Mapping[str, str] = os.environ) -> MeetingPoint:
    """The meeting point of a world of several ranks. InputError if no variable gives it."""
    starter, _ = _of_starter(env)
    job = ".".join(env.get(name, "") for name in starter.job).strip(".")
    host = env.get("MASTER_ADDR", "").strip("[]")
    host = host or ("127.0.0.1" if world.num_nodes == 1 else first_host(env.get(starter.hosts, "")))
    if not host:
        raise InputError(
            "rank.no-master-addr",
            "MASTER_ADDR is not set, and the host of rank 0 is not known otherwise: set it for "
            "all ranks (`mpirun -x MASTER_ADDR=HOST ...`), or start them by `trainyard launch`",
        )
    derived = PORTS[crc32(job.encode()) % len(PORTS)] if job else _DEFAULT_PORT
    port = parse_int("MASTER_PORT", env.get("MASTER_PORT") or str(derived))
    if not 0 < port < 1 << 16:
        raise InputError(
            "rank.malformed-port", "MASTER_PORT is {value}, which is not a port", value=port
        )
    is_hosted = starter is STARTERS[0] and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return MeetingPoint(host, port, is_hosted=is_hosted, job=job)


def first_host(hosts: str) -> str:
    """The first host of Slurm's list, such as n[1-2,05],lab3; "" if it is empty.

    `scontrol show hostnames` lists all of them, but containers seldom have it.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""
