"""`trainyard launch slurm`."""

import argparse
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainyard.children import users_environment
from trainyard.cli.launch.common import (
    add_job_options,
    add_restarts,
    check_writable,
    job_of,
)
from trainyard.cli.options import positive, whole
from trainyard.errors import InputError, TrainyardError
from trainyard.files import write_text, writing
from trainyard.launch.slurm import Allocation, runs_of, script
from trainyard.launch.slurm_cores import cores_per_gpu
from trainyard.launch.slurm_queue import state_of

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


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch slurm` to its parser."""
    add_job_options(parser, ranks="processes in all, where there are no GPUs")
    parser.add_argument("--nodes", type=_nodes, default="1", metavar="N", help="nodes: 2, or 1-4")
    parser.add_argument("--gpus", type=whole, metavar="N", help="GPUs of each node, a rank on each")
    parser.add_argument(
        "--cpus",
        type=positive,
        metavar="N",
        help="CPU cores for each rank; by default a GPU's share of its node by sinfo",
    )
    for name, meaning in _SBATCH_OPTIONS.items():
        kind = _time if name == "time" else str
        parser.add_argument(f"--{name}", type=kind, metavar=name.upper(), help=meaning)
    parser.add_argument("--mail", metavar="ADDRESS", help="where to write of the end")
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="LINE",
        help="another line for sbatch: '#SBATCH --exclusive'; as often as wanted",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell before the ranks start, 'module load cuda' say, or a file of them",
    )
    parser.add_argument(
        "--grace",
        type=positive,
        default=_GRACE_S,
        metavar="S",
        help=f"seconds before the time limit at which the ranks save ({_GRACE_S})",
    )
    parser.add_argument("--seeds", type=_seeds, default=(), metavar="0,1,2", help="a job for each")
    add_restarts(parser, default=_RESTARTS)
    parser.set_defaults(run_command=launch)


def launch(options: argparse.Namespace) -> int:
    """Run `trainyard launch slurm`; returns the exit code."""
    job, allocation = job_of(options, is_here=False), _allocation(options)
    check_writable(job, "the batch script")
    if options.seeds and "run.seed" in options.overrides:
        raise InputError("launch.seeds-and-seed")
    setup, folder = [_source_if_file(line) for line in options.setup], Path.cwd()
    text = script(
        job,
        allocation,
        folder=folder,
        restarts=options.restarts,
        setup=setup,
        seeds=options.seeds,
    )
    if options.dry_run:
        print(text, end="")
        return 0
    _check_sbatch()
    runs = runs_of(job.run, options.seeds)
    for run in runs:
        with writing(run):
            run.mkdir(parents=True, exist_ok=True)  # for the job's output: Slurm makes no directory
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
        raise TrainyardError("launch.job-refused", reason=reason)
    _print_submitted(done.stdout.strip().partition(";")[0], runs)
    return 0


def _print_submitted(job_id: str, runs: Sequence[Path]) -> None:
    print(f"job {job_id} trains in {', '.join(map(str, runs))}")
    print(f"watch:  squeue -j {job_id};  tail -F {shlex.quote(str(runs[0]))}/slurm-*.out")
    print(f"stop:   scancel --signal=TERM {job_id}   (it saves first)")
    print(f"cancel: scancel {job_id}", flush=True)
    found = state_of(job_id)
    if found is None:
        return
    print(f"Slurm:  {found.state}" + f" ({found.reason})" * (found.reason != "None"))
    if found.is_forever:
        sys.stderr.write(
            f"trainyard: job {job_id} does not start as it is ({found.reason}): cancel it and ask "
            f"for what the partition and your account allow (sinfo; scontrol show job {job_id})\n"
        )


def _check_sbatch() -> None:
    if shutil.which("sbatch") is None:
        raise InputError("launch.no-slurm")


def _allocation(options: argparse.Namespace) -> Allocation:
    if bool(options.gpus) == bool(options.ranks):
        raise InputError("launch.no-gpus-or-ranks")
    if options.time is not None and _seconds(options.time) < options.grace + _BEGIN_S:
        raise InputError(
            "launch.time-too-short",
            value=options.time,
            grace=options.grace,
            least=options.grace + _BEGIN_S,
        )
    given = {name: getattr(options, name) for name in _SBATCH_OPTIONS}
    cpus = options.cpus or _share_of_cores(options)
    names = {field.name for field in dataclasses.fields(Allocation)} - {"wishes", "extra", "cpus"}
    return Allocation(
        **{name: value for name in names if (value := getattr(options, name)) is not None},
        cpus=cpus,
        wishes=tuple((name, value) for name, value in given.items() if value is not None),
        extra=tuple(options.extra),
    )


def _share_of_cores(options: argparse.Namespace) -> int | None:
    """Cores for each rank of a job with GPUs; None where --extra or the cluster decides."""
    if not options.gpus or re.search(_CORES_IN_EXTRA, " ".join(options.extra)):
        return None
    found = cores_per_gpu(options.partition, options.gpus)
    if found is None and options.dry_run:
        return None  # the text may be for another cluster
    note = (
        f"each rank gets {found} cores, its GPU's share of a node; --cpus asks for others"
        if found
        else "sinfo names no cores and GPUs of a node, so each rank gets the cluster's default of "
        "cores, which may be one: --cpus asks for more"
    )
    sys.stderr.write(f"trainyard: {note}\n")
    return found


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
