"""Slurm through submitit: the pickled rank and its submission."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from trainyard.errors import InputError, Requeued, Stopped, TrainyardError
from trainyard.installation import install_hint
from trainyard.launch.exit_codes import GRACE_S
from trainyard.launch.job import Job
from trainyard.launch.signals import REQUEUE_SIGNALS, handling
from trainyard.launch.slurm import Allocation, options_of, runs_of

_SIGNAL = signal.SIGUSR2  # the signal that submitit handles
_PASSED_ON = (*REQUEUE_SIGNALS, signal.SIGTERM, signal.SIGINT)
_REQUEUED = (Requeued.exit_code, *(-number for number in REQUEUE_SIGNALS))
_STOPPED = (Stopped.exit_code, -signal.SIGTERM)
_NO_LIMIT = 1_000_000  # requeues


@dataclass(frozen=True)
class Training:
    """One rank. Submitit calls it, and again after each requeue."""

    command: tuple[str, ...]

    def __call__(self) -> int:
        """Returns the exit code of a run that is done or was stopped by its user."""
        with subprocess.Popen(self.command) as rank:

            def pass_on(number: int, frame: FrameType | None) -> None:
                rank.send_signal(number)

            # Submitit's own handler would requeue before the checkpoint is written.
            with handling(_PASSED_ON, pass_on):
                code = rank.wait()
        if code in _REQUEUED or (code in _STOPPED and _is_preempted()):
            _requeue()
        if code not in (0, Stopped.exit_code):
            raise TrainyardError("launch.rank-failed", exit_code=code)
        return code

    def checkpoint(self) -> Any:
        """The call after a requeue: this object again, which resumes from the run directory."""
        return _submitit().helpers.DelayedSubmission(self)


def _is_preempted() -> bool:
    """True if Slurm needs the nodes for another job; it sends the SIGTERM of a user's scancel."""
    command = ["scontrol", "show", "job", os.environ["SLURM_JOB_ID"]]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return re.search(r"PreemptTime=\d", said) is not None


def _requeue() -> None:
    """Requeue from rank 0. The others leave without a result, which would count as the job's."""
    if _submitit().JobEnvironment().global_rank == 0:
        signal.raise_signal(_SIGNAL)
    sys.exit()


def submit(
    job: Job, allocation: Allocation, *, setup: Sequence[str] = (), seeds: Sequence[int] = ()
) -> str:
    """The id of the job or of its array. TrainyardError if Slurm refuses it."""
    runs = runs_of(job.run, seeds)
    for run in runs:
        run.mkdir(parents=True, exist_ok=True)
    submitit = _submitit()
    cores = [f"--cpus-per-task={allocation.cpus}"] if allocation.cpus else []
    executor = submitit.SlurmExecutor(runs[0].resolve() / "submitit", max_num_timeout=_NO_LIMIT)
    executor.update_parameters(
        job_name=job.name,
        setup=list(setup),
        stderr_to_stdout=True,
        srun_args=["--kill-on-bad-exit=0", f"--wait={GRACE_S}", *cores],
        additional_parameters={
            "requeue": True,
            "signal": f"{_SIGNAL.name.removeprefix('SIG')}@{allocation.grace}",
            **options_of(allocation),
            **dict(_extra(line) for line in allocation.extra),
        },
    )
    os.environ["PYTHONUNBUFFERED"] = "1"
    try:
        with executor.batch():
            jobs = [executor.submit(Training(one.command)) for one in _jobs(job, runs, seeds)]
    except submitit.core.utils.FailedJobError as error:
        said = str(error).strip().splitlines()[-1]
        raise TrainyardError("launch.job-refused", reason=said) from None
    return str(jobs[0].job_id).partition("_")[0]


def _jobs(job: Job, runs: Sequence[Path], seeds: Sequence[int]) -> list[Job]:
    """One job, or one per seed."""
    place = job.arguments.index("--run") + 1
    jobs = []
    for number, run in enumerate(runs):
        arguments = [*job.arguments[:place], str(run), *job.arguments[place + 1 :]]
        arguments += [f"--run.seed={seeds[number]}"] if seeds else []
        jobs.append(replace(job, arguments=tuple(arguments), run=run))
    return jobs


def _extra(line: str) -> tuple[str, str | bool]:
    name, _, value = (
        line.removeprefix("#SBATCH").strip().lstrip("-").replace("=", " ", 1).partition(" ")
    )
    return name, value or True


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise InputError("launch.needs-submitit", hint=install_hint("submitit")) from None
    return submitit
