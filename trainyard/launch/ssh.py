"""A run on several hosts through ssh."""

import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainyard.errors import InputError
from trainyard.launch.attempts import Policy, supervise
from trainyard.launch.events import Events, passing_signals
from trainyard.launch.hosts import GivenHost
from trainyard.launch.job import Job
from trainyard.launch.output import Printer
from trainyard.launch.readiness import as_text
from trainyard.launch.ssh_cluster import SshOptions, connected
from trainyard.launch.ssh_remote import Login

_NOT_COPIED = ("--filter=:- .gitignore", "--exclude=.git")

_NO_RSYNC = (127, 12)  # exit codes if the remote rsync does not answer


def launch_ssh(job: Job, options: SshOptions, policy: Policy, say: Callable[[str], None]) -> int:
    """Run a job on several hosts. Returns the exit code of the run.

    InputError, with a line per host, if hosts are not ready; then nothing was started.
    """
    events = Events()
    with passing_signals(events), connected(job.command, options, events) as cluster:
        cluster.check()
        printer = Printer(list(cluster.hosts), as_they_are=options.is_json)
        return supervise(cluster, events, policy, show=printer.line, say=say)


def sync(hosts: Sequence[GivenHost], login: Login) -> None:
    """Copy the working directory to all hosts, except .git and files that .gitignore names.

    Nothing is deleted there. InputError, with a line for each host where it failed.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        copied = pool.map(lambda host: _copy(host, login), hosts)
        problems = {host.name: why for host, why in zip(hosts, copied, strict=True) if why}
    if problems:
        raise InputError(as_text(problems, len(hosts)))


def _copy(host: GivenHost, login: Login) -> str | None:
    """Copy to one host. Returns the reason of a failure, else None."""
    user, at, name = host.target.rpartition("@")
    target = f"{user}{at}[{name}]" if ":" in name else host.target
    there = f"mkdir -p {shlex.quote(login.folder)} && rsync"
    command = ["rsync", "-az", "--rsync-path", there, *_NOT_COPIED, "-e", shlex.join(login.command)]
    try:
        done = subprocess.run(
            [*command, "--", "./", f"{target}:{login.folder}/"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise InputError(f"--sync needs rsync here: {error.strerror}") from None
    said = done.stderr.strip().partition("\n")[0]
    question = ": is it installed there?" if done.returncode in _NO_RSYNC else ""
    return f"rsync failed ({said}){question}" if done.returncode else None
