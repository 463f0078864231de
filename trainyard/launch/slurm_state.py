"""Slurm's state of its nodes, and of a job that has just been submitted."""

import re
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

_LIMIT_S = 20
_LIST = ("sinfo", "--Node", "--noheader", "--format=%P|%c|%G")  # a node on each line
_LOOK_S = 3  # for Slurm to look at a new job
_AGAIN_S = 0.3
_NOT_YET = ("None", "Priority")  # reasons that a job has until Slurm has looked at it
_LINE = re.compile(r"^(\w+)\|(.+)$", re.MULTILINE)  # not the name of a cluster (SLURM_CLUSTERS)
# https://slurm.schedmd.com/job_reasons.html: those that no other job's end removes.
_NEVER = re.compile(
    r"PartitionConfig|Partition(Node|Time)Limit|BadConstraints|Invalid\w+|\w+NotAllowed"
    r"|JobHeld\w+|(Assoc|QOS)\w*(Max|Min)\w+Per(Job|Node)\w*"
)


def cores_per_gpu(partition: str | None, gpus: int) -> int | None:
    """Cores of a node over its GPUs: the least of all nodes that may run the job.

    `partition`: names with commas between them; None for the default partition. `gpus`: GPUs that
    the job takes of each node. None if sinfo fails or lists no such node.
    """
    return least_share(_answer(_LIST), partition, gpus)


def least_share(listing: str, partition: str | None, gpus: int) -> int | None:
    """The result of `cores_per_gpu` from sinfo's lines, such as `day*|96|gpu:a100:8(S:0-1)`."""
    shares = []
    for line in listing.splitlines():
        name, cores, resources = line.strip().split("|", 2)
        is_ours = (
            name.endswith("*") if partition is None else name.strip("*") in partition.split(",")
        )
        gpus_there = sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources)))
        if is_ours and gpus_there >= gpus:
            shares.append(int(cores) // gpus_there)
    return max(min(shares), 1) if shares else None


class Waiting(NamedTuple):
    state: str
    reason: str

    @property
    def is_forever(self) -> bool:
        """True if the job does not start as it is, however long it waits."""
        return self.state == "PENDING" and _NEVER.fullmatch(self.reason) is not None


def state_of(job: str) -> Waiting | None:
    """The state of a new job, or of the first part of an array. None if squeue does not list it."""
    command = ("squeue", "--noheader", "--format=%T|%r", f"--jobs={job}")
    deadline = time.monotonic() + _LOOK_S
    while True:
        line = _LINE.search(_answer(command))
        if line is None:
            return None
        waiting = Waiting(line[1], line[2].strip())
        is_new = waiting.state == "PENDING" and waiting.reason in _NOT_YET
        if not is_new or time.monotonic() > deadline:
            return waiting
        time.sleep(_AGAIN_S)


def _answer(command: Sequence[str]) -> str:
    """The output of a command of Slurm's; "" if it fails or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout
