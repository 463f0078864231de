"""OpenMPI's mpirun as a launcher: it starts and ends the ranks, on one host or several.

After a rank has ended with a code other than 0, mpirun ends the others: it waits, sends SIGTERM,
waits again, and sends SIGKILL. In the first wait the ranks notice and save. A SIGTERM to mpirun has
the same effect, but mpirun passes SIGUSR1 and SIGUSR2 on, and then sets the ranks no time limit.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from secrets import choice
from types import FrameType

from trainyard.distributed.interfaces import free_port
from trainyard.distributed.launcher_variables import PORTS
from trainyard.errors import STOPS, InputError
from trainyard.launch.exit_codes import is_stop
from trainyard.launch.hosts import read_hosts
from trainyard.launch.job import Job, passed_on, shown
from trainyard.launch.launcher import Launcher, add_ranks, ranks_here
from trainyard.launch.signals import IMPATIENT_S, REQUEUE_SIGNALS, handling, stopped_by
from trainyard.parent import signal_without_parent

_WAIT_S = 5
"""Length of each of the two waits. They are not cut short when all ranks have ended."""


class Mpi(Launcher):
    summary = "OpenMPI's mpirun, on this machine or several hosts"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        where = parser.add_argument_group("where to train")
        add_ranks(where, "each host")
        where.add_argument(
            "--hosts",
            metavar="A,B:4|FILE",
            help="a:4 for 4 ranks, or a file of these with one a line (this machine alone)",
        )
        where.add_argument(
            "--mpirun", metavar="PATH", default="mpirun", help="OpenMPI's (the first on PATH)"
        )
        text = "for mpirun: '--mca btl_tcp_if_include eth0'"
        where.add_argument("--extra", metavar="WORDS", default="", help=text)

    def is_here(self, options: argparse.Namespace) -> bool:
        return options.hosts is None

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        mpi = _options(options)
        settings = [f"{name}={value}" for name, value in variables(mpi).items()]
        return f"{shown(['env', *settings, *command_line(job, mpi)])}\n"

    def run(self, job: Job, options: argparse.Namespace) -> int:
        if self.is_here(options):
            ranks_here(options)
        return launch_mpi(job, _options(options))


@dataclass(frozen=True, kw_only=True)
class MpiOptions:
    hosts: Mapping[str, int]
    """Number of ranks of each host, in order."""
    mpirun: str = "mpirun"
    extra: Sequence[str] = ()
    """Further arguments of mpirun."""
    is_root: bool = False
    passed_on: Sequence[str] = ()
    """Names of variables that ranks on other hosts get too."""

    @property
    def is_here(self) -> bool:
        return list(self.hosts) == ["localhost"]


def _options(options: argparse.Namespace) -> MpiOptions:
    hosts = read_hosts(options.hosts or "localhost")
    for host in hosts:
        if host.target != host.name:
            raise InputError(
                "launch.user-for-mpirun",
                "--hosts: {value}: mpirun takes no user, only {name}",
                value=host.target,
                name=host.name,
            )
    given = {host.name: host.slots for host in hosts}
    ranks = options.ranks or options.gpus
    if ranks is None and None in given.values():
        if options.hosts:  # other hosts may have other GPUs than this machine
            raise InputError(
                "launch.no-ranks-per-host", "set the number of ranks per host: --gpus N, or a:8"
            )
        ranks = ranks_here(options)
    return MpiOptions(
        hosts={host: slots or ranks for host, slots in given.items()},
        mpirun=shutil.which(options.mpirun) or options.mpirun,
        extra=shlex.split(options.extra),
        is_root=os.geteuid() == 0,
        passed_on=sorted(passed_on(os.environ)) if list(given) != ["localhost"] else (),
    )


def variables(options: MpiOptions) -> dict[str, str]:
    """Defaults for mpirun's environment; the user's own variables take precedence."""
    settings = {"OMPI_MCA_odls_base_sigkill_timeout": str(_WAIT_S)}
    if options.is_here:
        settings["OMPI_MCA_oob_tcp_if_include"] = "lo"  # it listens on network interfaces otherwise
    return settings


def command_line(job: Job, options: MpiOptions) -> list[str]:
    """The command that starts all ranks, which meet at a port of the first host."""
    port = free_port() if options.is_here else choice(PORTS)  # what is free here may be taken there
    first = next(iter(options.hosts)) if len(options.hosts) > 1 else "127.0.0.1"
    words = [options.mpirun, *(["--allow-run-as-root"] if options.is_root else [])]
    words += ["--host", ",".join(f"{host}:{count}" for host, count in options.hosts.items())]
    words += ["-np", str(sum(options.hosts.values()))]
    words += ["--bind-to", "none"]  # otherwise each rank, with all its threads, gets a single core
    told = [f"MASTER_ADDR={first}", f"MASTER_PORT={port}", *options.passed_on]
    words += [word for variable in told for word in ("-x", variable)]
    return [*words, *options.extra, *job.command]


def launch_mpi(job: Job, options: MpiOptions) -> int:
    """Run a job. Returns mpirun's exit code, which is that of the first rank that failed.

    Signals that end a run make the ranks save first; the code is 130 or 75 if they have.
    """
    command = command_line(job, options)
    try:
        process = subprocess.Popen(
            command,
            env=variables(options) | os.environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # mpirun treats a Ctrl-C as SIGTERM
            # If this launcher is killed, the kernel signals mpirun: its ranks then save and end.
            preexec_fn=lambda: signal_without_parent(signal.SIGUSR1),
        )
    except FileNotFoundError:
        raise InputError(
            "launch.needs-mpirun",
            "there is no {command}: install OpenMPI (openmpi-bin), load its module, or give the "
            "path with --mpirun",
            command=command[0],
        ) from None
    except OSError as error:
        raise InputError(
            "launch.mpirun-failed", "{command}: {reason}", command=command[0], reason=error.strerror
        ) from None
    with process, _passing_signals(process) as got:
        code = process.wait()
    has_stopped = code > 0 and is_stop(code if code < 128 else 128 - code)
    return stopped_by(got[0]).exit_code if got and has_stopped else code


@contextmanager
def _passing_signals(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Inside, signals that end a run make the ranks save, and are appended to the list.

    A second one, after a moment, makes mpirun end the ranks whether or not they have saved.
    """
    got: list[int] = []
    began = 0.0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal began
        began = began or time.monotonic()
        is_urgent = number not in REQUEUE_SIGNALS and time.monotonic() - began > IMPATIENT_S
        got.append(number)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if is_urgent else signal.SIGUSR1)

    with handling(STOPS, pass_on):
        yield got
