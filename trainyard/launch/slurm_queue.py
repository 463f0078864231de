"""What Slurm makes of a job that has just been submitted."""

import re
import subprocess
import time
from typing import NamedTuple

_LIMIT_S = 20
_LOOK_S = 3  # for Slurm to look at a new job
_AGAIN_S = 0.3
_NOT_YET = ("None", "Priority")  # reasons that a job has until Slurm has looked at it
_LINE = re.compile(r"^(\w+)\|(.+)$", re.MULTILINE)  # not the name of a cluster (SLURM_CLUSTERS)
# https://slurm.schedmd.com/job_reasons.html: those that no other job's end removes.
_NEVER = re.compile(
    r"PartitionConfig|Partition(Node|Time)Limit|BadConstraints|Invalid\w+|\w+NotAllowed"
    r"|JobHeld\w+|(Assoc|QOS)\w*(Max|Min)\w+Per(Job|Node)\w*"
)


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
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        line = _LINE.search(done.stdout)
        if done.returncode or line is None:
            return None
        found = Waiting(line[1], line[2].strip())
        is_new = found.state == "PENDING" and found.reason in _NOT_YET
        if not is_new or time.monotonic() > deadline:
            return found
        time.sleep(_AGAIN_S)
