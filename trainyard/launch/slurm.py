"""Several nodes through Slurm: the text of a batch job for sbatch."""

import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.children import SAFE_PATH
from trainyard.errors import DivergedError, InputError, Requeued, Stopped
from trainyard.launch.exit_codes import GRACE_S
from trainyard.launch.job import Job
from trainyard.launch.signals import REQUEUE_SIGNALS

SIGNAL = REQUEUE_SIGNALS[0].name.removeprefix("SIG")
_FINAL = (0, InputError.exit_code, DivergedError.exit_code)
# The signals themselves too: a rank that gets one before it trains dies by it.
_STOPPED = (Stopped.exit_code, 128 + signal.SIGTERM)
_REQUEUED = (Requeued.exit_code, *(128 + number for number in REQUEUE_SIGNALS))
_LOST_S = 900  # for Slurm to find a lost node; its default is 300
_AGAIN_S = 5
_BREAK = " \\\n        "
_SEED = "$SLURM_ARRAY_TASK_ID"  # an array's indices are the seeds


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Resources to request from Slurm."""

    nodes: str = "1"
    """A number, or a range: "1-4"."""
    gpus: int = 0
    """GPUs per node, with one rank each."""
    ranks: int = 0
    """Ranks in all, without GPUs."""
    cpus: int | None = None
    """CPUs per rank."""
    wishes: tuple[tuple[str, str], ...] = ()
    """Options passed to sbatch unchanged: ("time", "72:00:00")."""
    mail: str | None = None
    extra: tuple[str, ...] = ()
    """Further lines, with or without the #SBATCH: "#SBATCH --exclusive"."""
    grace: int = 120
    """Seconds before the time limit at which the ranks get the signal to save."""


def _options(allocation: Allocation) -> dict[str, str]:
    """sbatch options and values for resources, time and mail."""
    options = {"nodes": allocation.nodes}
    if allocation.gpus:
        options |= {"ntasks-per-node": f"{allocation.gpus}", "gpus-per-node": f"{allocation.gpus}"}
    else:
        options["ntasks"] = f"{allocation.ranks}"
    if allocation.cpus:
        options["cpus-per-task"] = f"{allocation.cpus}"
    options |= dict(allocation.wishes)
    if allocation.mail:
        options |= {"mail-user": allocation.mail, "mail-type": "END,FAIL"}
    return options


def runs_of(run: Path, seeds: Sequence[int]) -> list[Path]:
    """The run directories: one, or one per seed."""
    return [Path(f"{run}-seed{seed}") for seed in seeds] or [run]


def script(
    job: Job,
    allocation: Allocation,
    *,
    folder: Path,
    restarts: int,
    setup: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> str:
    """The text for sbatch.

    `folder`: working directory; `setup`: shell lines before the ranks start, to load modules for
    instance; `seeds`: makes an array with one job per seed. The text itself documents how the job
    reacts to each exit code of the ranks.
    """
    options = {"job-name": job.name, "chdir": str(folder), **_options(allocation)}
    if seeds:
        options["array"] = ",".join(map(str, seeds))
    output = str(job.run).replace("%", "%%") + ("-seed%a" if seeds else "")
    options |= {
        "output": f"{output}/slurm-%j.out",
        "open-mode": "append",
        "signal": f"{SIGNAL}@{allocation.grace}",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items()]
    lines += ["#SBATCH --requeue"]
    lines += [f"#SBATCH {line.removeprefix('#SBATCH').strip()}" for line in allocation.extra]
    run = shlex.quote(str(job.run)) + (f"-seed{_SEED}" if seeds else "")
    return _TEXT.format(
        options="\n".join(lines),
        run=run,
        setup="".join(f"{line}\n" for line in setup),
        srun=_srun(job, allocation.cpus, has_seeds=bool(seeds)),
        final=" | ".join(map(str, _FINAL)),
        stopped=" | ".join(map(str, _STOPPED)),
        requeued=" | ".join(map(str, _REQUEUED)),
        restarts=restarts,
        lost=_LOST_S,
        again=_AGAIN_S,
    )


def _srun(job: Job, cpus: int | None, *, has_seeds: bool) -> str:
    """The command that starts the ranks, with each option on its own line."""
    options = ["--kill-on-bad-exit=0", f"--wait={GRACE_S}"]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    arguments = [_quoted(word) for word in job.arguments]
    arguments[arguments.index("--run") + 1] = '"$run"'
    arguments += [f'--run.seed="{_SEED}"'] if has_seeds else []
    words = [f"{_BREAK}{word}" if word.startswith("--") else f" {word}" for word in arguments]
    python = shlex.join((job.python, *SAFE_PATH, "-m", "trainyard"))
    return f"srun {' '.join(options)}{_BREAK}{python}{''.join(words)}"


def _quoted(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if word.startswith("--") and equals else shlex.quote(word)


_TEXT = """\
#!/bin/bash
{options}

# Rendered by `trainyard launch slurm`; to be changed at will. For sbatch to write its output, the
# run directory must be there before.
run={run}
failures=$run/slurm-$SLURM_JOB_ID.failures  # a line for each, through all requeues
export PYTHONUNBUFFERED=1
{setup}
say() {{ echo "$(date '+%F %T') job $SLURM_JOB_ID: $*"; }}
about() {{ scontrol show job "$SLURM_JOB_ID"; }}
is_running() {{ about | grep -q JobState=RUNNING; }}

requeue() {{
    say "$*: requeued, to go on from the checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 75
}}

trap : TERM  # a preempted job's ranks save first
say "start $((${{SLURM_RESTART_COUNT:-0}} + 1)) on $SLURM_JOB_NODELIST"
while true; do
    # When a rank is lost, the first one may be writing a checkpoint: it is given the time.
    {srun}
    code=$?
    case $code in
        {final}) exit $code ;;  # done; a mistake; diverged
        {requeued}) requeue "stopped by a signal before the end" ;;
        {stopped})
            about | grep -q 'PreemptTime=[0-9]' && requeue "preempted"
            exit $code ;;  # stopped by you
    esac
    # A lost node is no failure: srun reaches it no more, until Slurm finds it lost, after its
    # SlurmdTimeout, and requeues the job.
    deadline=$((SECONDS + {lost}))
    until srun true; do
        is_running && [ $SECONDS -lt $deadline ] || break
        say "srun does not reach all nodes: waiting for them, or for Slurm to requeue the job"
        sleep {again}
    done
    is_running || exit $code
    say "the ranks have ended with exit code $code" | tee -a "$failures"
    [ "$(wc -l <"$failures")" -le {restarts} ] || exit $code
    say "starting again ($(wc -l <"$failures") of {restarts})"
done
"""
