"""Starters of processes, and the variables that give each process its place: a row each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainyard.distributed.hostlist import number_at
from trainyard.errors import InputError


@dataclass(frozen=True)
class Starter:
    places: Mapping[str, str]
    """The variable for each field of a World."""
    job: tuple[str, ...] = ()
    """The variables that name the start, equal for its ranks and different for other starts."""
    hosts: str = ""
    """The variable with the list of hosts; the first one is rank 0's."""


_OF_TORCHRUN = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
}

# Innermost first. https://docs.pytorch.org/docs/stable/elastic/run.html, ray.train, mpirun(1),
# Hydra and Intel MPI, submitit.local, srun(1)
STARTERS = {
    "torchrun": Starter(
        _OF_TORCHRUN | {"node": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"},
        job=("TORCHELASTIC_RUN_ID",),
    ),
    "Ray Train": Starter(_OF_TORCHRUN | {"node": "NODE_RANK"}),
    "OpenMPI": Starter(
        {
            "rank": "OMPI_COMM_WORLD_RANK",
            "size": "OMPI_COMM_WORLD_SIZE",
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
        job=("PMIX_NAMESPACE",),
        hosts="SLURM_JOB_NODELIST",
    ),
    "PMI": Starter(
        {
            "rank": "PMI_RANK",
            "size": "PMI_SIZE",
            "local_rank": "MPI_LOCALRANKID",
            "local_size": "MPI_LOCALNRANKS",
        },
        job=("PMI_JOBID",),
        hosts="SLURM_JOB_NODELIST",
    ),
    "submitit": Starter(
        {
            "rank": "SUBMITIT_LOCAL_GLOBALID",
            "size": "SUBMITIT_LOCAL_NTASKS",
            "local_rank": "SUBMITIT_LOCAL_LOCALID",
            "node": "SUBMITIT_LOCAL_NODEID",
            "num_nodes": "SUBMITIT_LOCAL_JOB_NUM_NODES",
        },
        job=("SUBMITIT_LOCAL_JOB_ID",),
    ),
    "Slurm": Starter(
        {
            "rank": "SLURM_PROCID",
            "size": "SLURM_STEP_NUM_TASKS",
            "local_rank": "SLURM_LOCALID",
            "node": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
        },
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        hosts="SLURM_STEP_NODELIST",
    ),
}
BY_HAND = STARTERS["torchrun"]  # its variables are also set by hand
_SET_BY_SHELLS = "SLURM_PROCID"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"


@dataclass(frozen=True)
class StarterValues:
    """The values of a starter's variables."""

    starter: Starter
    name: str = ""
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.places.keys() >= {"rank", "size"}

    def has_same(self, other: "StarterValues", what: str) -> bool:
        return self.places[what] == other.places[what]


def told_by(name: str, env: Mapping[str, str]) -> StarterValues:
    """The rank and sizes that a starter has set. InputError if one is not a number."""
    starter = STARTERS[name]
    names = starter.places
    signs = (names["rank"], names["size"])
    if not any(sign in env and sign != _SET_BY_SHELLS for sign in signs):
        return StarterValues(starter, name)
    places = {what: whole(names[what], env[names[what]]) for what in names if names[what] in env}
    if name == "Slurm" and TASKS_PER_NODE in env and "node" in places:
        places["local_size"] = number_at(places["node"], env[TASKS_PER_NODE])
    return StarterValues(starter, name, places)


def half_set(told: StarterValues, *wanted: str) -> InputError:
    """The error for the first of the `wanted` values that a starter has not set."""
    missing = next(what for what in wanted if what not in told.places)
    names = told.starter.places
    present = ", ".join(names[what] for what in told.places)
    where = f"which {told.name} would set" if told.name != "torchrun" else "torchrun sets both"
    return InputError(f"{names[missing]} is not set although {present} is ({where})")


def whole(name: str, text: str) -> int:
    """The number in a variable. InputError if its text is not a whole number."""
    if not text.strip().isdigit():
        raise InputError(f"{name} is {text!r}, which is not a whole number")
    return int(text)
