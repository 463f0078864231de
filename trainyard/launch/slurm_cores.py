"""A GPU's share of a node's cores, as Slurm lists its nodes."""

import re
import subprocess

_LIMIT_S = 20
_LIST = ("sinfo", "--Node", "--noheader", "--format=%P|%c|%G")  # a node on each line


def cores_per_gpu(partition: str | None, gpus: int) -> int | None:
    """Cores of a node over its GPUs: the least of all nodes that may run the job.

    `partition`: names with commas between them; None for the default partition. `gpus`: GPUs that
    the job takes of each node. None if sinfo fails or lists no such node.
    """
    try:
        done = subprocess.run(_LIST, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return least_share(done.stdout, partition, gpus) if done.returncode == 0 else None


def least_share(listing: str, partition: str | None, gpus: int) -> int | None:
    """The result of `cores_per_gpu` from sinfo's lines, such as `day*|96|gpu:a100:8(S:0-1)`."""
    shares = []
    for line in listing.splitlines():
        name, cores, resources = line.strip().split("|", 2)
        is_ours = (
            name.endswith("*") if partition is None else name.strip("*") in partition.split(",")
        )
        there = sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources)))
        if is_ours and there >= gpus:
            shares.append(int(cores) // there)
    return max(min(shares), 1) if shares else None
