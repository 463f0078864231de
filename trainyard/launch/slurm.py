"""Several nodes through Slurm: the text of a batch job for sbatch."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.arguments import positive, whole_number
from trainyard.children import SAFE_PATH, users_environment
from trainyard.errors import InputError, Requeued, Stopped, TrainyardError
from trainyard.files import write_text, writing
from trainyard.launch.exit_codes import GRACE_S, OVER
from trainyard.launch.job import Job
from trainyard.launch.launcher import Launcher, add_ranks, add_restarts, record_of
from trainyard.launch.signals import REQUEUE_SIGNALS
from trainyard.launch.slurm_state import cores_per_gpu, state_of

SIGNAL = REQUEUE_SIGNALS[0].name.removeprefix("SIG")
# The signals themselves too: a rank that gets one before it trains dies by it.
_STOPPED = (Stopped.exit_code, 128 + signal.SIGTERM)
_REQUEUED = (Requeued.exit_code, *(128 + number for number in REQUEUE_SIGNALS))
_LOST_S = 900  # for Slurm to find a lost node; its default is 300
_AGAIN_S = 5
_BREAK = " \\\n        "
_SEED = "$SLURM_ARRAY_TASK_ID"  # an array's indices are the seeds
_SBATCH_OPTIONS = {
    "time": "time limit, after which the job is requeued and goes on: 72:00:00, or hours: 72h",
    "partition": "partition",
    "account": "account to charge",
    "constraint": "features that the nodes must have",
    "reservation": "reservation to take the nodes from",
    "qos": "quality of service",
    "comment": "comment on the job",
    "mem": "memory of each node: 200G",
}
_CORES_IN_EXTRA = r"--cpus-per-|(^|\s)-c"
_GRACE_S = 120
_BEGIN_S = 60  # minimum time for a run to start
_RESTARTS = 3


class Slurm(Launcher):
    summary = "a batch job of Slurm's, on one node or many"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        where = parser.add_argument_group("where to train")
        add_ranks(where, "each node", gpus=whole_number)
        add = where.add_argument
        add("--nodes", type=_nodes, default="1", metavar="N", help="nodes: 2, or 1-4")
        text = "CPU cores for each rank; by default a GPU's share of its node by sinfo"
        add("--cpus", type=positive, metavar="N", help=text)
        text = "a line of shell before the ranks start, 'module load cuda' say, or a file of them"
        add("--setup", action="append", default=[], metavar="LINE", help=text)
        text = f"seconds before the time limit at which the ranks save ({_GRACE_S})"
        add("--grace", type=positive, default=_GRACE_S, metavar="S", help=text)
        text = "submit a job for each seed"
        add("--seeds", type=_seeds, default=(), metavar="0,1,2", help=text)
        add_restarts(where, default=_RESTARTS)
        add = parser.add_argument_group("what sbatch is told").add_argument
        for name, meaning in _SBATCH_OPTIONS.items():
            kind = _time if name == "time" else str
            add(f"--{name}", type=kind, metavar=name.upper(), help=meaning)
        add("--mail", metavar="ADDRESS", help="address that Slurm notifies when the job ends")
        text = "another line for sbatch: '#SBATCH --exclusive'; as often as wanted"
        add("--extra", action="append", default=[], metavar="LINE", help=text)

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        allocation = _allocation(options)
        job.check_writable("the batch script")
        if options.seeds and "run.seed" in options.overrides:
            raise InputError(
                "launch.seeds-and-seed", "--seeds and --run.seed exclude each other: drop one"
            )
        return script(
            job,
            allocation,
            folder=Path.cwd(),
            restarts=options.restarts,
            setup=[_source_if_file(line) for line in options.setup],
            seeds=options.seeds,
        )

    def run(self, job: Job, options: argparse.Namespace) -> int:
        text = self.plan(job, options)
        if shutil.which("sbatch") is None:
            raise InputError(
                "launch.no-slurm",
                "there is no sbatch here: go where Slurm is, or print the script with --dry-run",
            )
        runs = runs_of(job.run, options.seeds)
        for run in runs:
            with writing(run):
                run.mkdir(parents=True, exist_ok=True)  # for the job's output: Slurm makes none
            write_text(run / "slurm.sbatch", text)
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            text=True,
            capture_output=True,
            env=users_environment(),  # which the job inherits, its --setup lines too
        )
        if done.returncode:
            reason = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
            raise TrainyardError(
                "launch.job-refused", "sbatch refused the job: {reason}", reason=reason
            )
        _print_submitted(done.stdout.strip().partition(";")[0], runs)
        return 0


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Resources to request from Slurm."""

    nodes: str = "1"
    """A number, or a range: "1-4"."""
    gpus: int = 0
    """GPUs per node, with one rank each."""
    ranks: int = 0
    """Ranks of each node, without GPUs."""
    cpus: int | None = None
    """CPUs per rank."""
    sbatch_options: tuple[tuple[str, str], ...] = ()
    """Options passed to sbatch unchanged: ("time", "72:00:00")."""
    mail: str | None = None
    extra: tuple[str, ...] = ()
    """Further lines, with or without the #SBATCH: "#SBATCH --exclusive"."""
    grace: int = 120
    """Seconds before the time limit at which the ranks get the signal to save."""


def _allocation(options: argparse.Namespace) -> Allocation:
    if bool(options.gpus) == bool(options.ranks):
        raise InputError(
            "launch.no-gpus-or-ranks",
            "say how many GPUs of each node to take with --gpus, or without any how many ranks to "
            "start on it with --ranks",
        )
    if options.time is not None and _seconds(options.time) < options.grace + _BEGIN_S:
        raise InputError(
            "launch.time-too-short",
            "--time {value} is over before a run has begun: the ranks save --grace {grace} s "
            "before, so ask for {least} s or more",
            value=options.time,
            grace=options.grace,
            least=options.grace + _BEGIN_S,
        )
    given = {name: getattr(options, name) for name in _SBATCH_OPTIONS}
    return record_of(
        Allocation,
        options,
        cpus=options.cpus or _share_of_cores(options),
        sbatch_options=tuple((name, value) for name, value in given.items() if value is not None),
        extra=tuple(options.extra),
    )


def _share_of_cores(options: argparse.Namespace) -> int | None:
    """Cores for each rank of a job with GPUs; None where --extra or the cluster decides."""
    if not options.gpus or re.search(_CORES_IN_EXTRA, " ".join(options.extra)):
        return None
    cores = cores_per_gpu(options.partition, options.gpus)
    if cores is None and options.dry_run:
        return None  # the text may be for another cluster
    note = (
        f"each rank gets {cores} cores, its GPU's share of a node; --cpus asks for others"
        if cores
        else "sinfo names no cores and GPUs of a node, so each rank gets the cluster's default of "
        "cores, which may be one: --cpus asks for more"
    )
    sys.stderr.write(f"trainyard: {note}\n")
    return cores


def _source_if_file(line: str) -> str:
    """`source` for a file of lines, read when the job starts; other lines stay."""
    return f"source {shlex.quote(str(Path(line).resolve()))}" if os.path.isfile(line) else line


def _nodes(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes such as 4 or 1-4")
    return text


def _seeds(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} are not seeds: write 0,1,2")
    return tuple(map(int, text.split(",")))


def _seconds(time: str) -> int:
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")] + [0, 0]
    return int(days or 0) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]


def _time(text: str) -> str:
    """A time limit; a bare number means hours. (Slurm takes it, and 4:00, for minutes.)"""
    if re.fullmatch(r"\d+(\.\d+)?h?", text):
        minutes = round(float(text.rstrip("h")) * 60)
        return f"{minutes // 60}:{minutes % 60:02d}:00"
    if re.fullmatch(r"\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}", text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a time: write hours, 72h, 72:00:00 or 3-00:00:00"
    )


def _print_submitted(job_id: str, runs: Sequence[Path]) -> None:
    print(f"job {job_id} trains in {', '.join(map(str, runs))}")
    print(f"watch:  squeue -j {job_id};  tail -F {shlex.quote(str(runs[0]))}/slurm-*.out")
    print(f"stop:   scancel --signal=TERM {job_id}   (it saves first)")
    print(f"cancel: scancel {job_id}", flush=True)
    queued = state_of(job_id)
    if queued is None:
        return
    print(f"Slurm:  {queued.state}" + f" ({queued.reason})" * (queued.reason != "None"))
    if queued.is_forever:
        sys.stderr.write(
            f"trainyard: job {job_id} does not start as it is ({queued.reason}): cancel it and ask "
            f"for what the partition and your account allow (sinfo; scontrol show job {job_id})\n"
        )


def _options(allocation: Allocation) -> dict[str, str]:
    """sbatch options and values for resources, time and mail."""
    ranks = f"{allocation.gpus or allocation.ranks}"
    options = {"nodes": allocation.nodes, "ntasks-per-node": ranks}
    if allocation.gpus:
        options["gpus-per-node"] = ranks
    if allocation.cpus:
        options["cpus-per-task"] = f"{allocation.cpus}"
    options |= dict(allocation.sbatch_options)
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
        final=" | ".join(map(str, OVER)),
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
