"""Seconds from the loss of a rank, a host or a cable to the next step, by each launcher.

python -m benchmarks.losses FOLDER [--cases ...] [--trials 3] [--hardware NAME]

Two ranks of `debug` on the digits, which save every second. Hosts are those of tests/services: real
sshds, each in a network of its own (root, iproute2, openssh-server). What is measured contains the
start of Python and torch on this machine; an empty start is measured beside it. FOLDER is for the
data and the runs.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.saving import RESULTS, save
from tests.services.losses import has_gone_on, losses_of
from tests.services.ssh_hosts import SshHosts, ssh_hosts
from tests.test_cli_signals import LONG, has_saved, wait_for
from trainyard.datasets.prepare.digits import prepare_digits

START_S, AGAIN_S, CUT_S, KILL_AFTER = 200, 200, 20, 5
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")


class Trial:
    """A run under way."""

    def __init__(self, run: Path, command: list[str]) -> None:
        self.run, self.folder = run, run.parent
        with (self.folder / "said").open("w") as said:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=said, stderr=said, stdin=subprocess.DEVNULL
            )

    def rank(self, number: int) -> int:
        """The process of a rank, also on a host."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                is_rank = b"trainyard\0train" in (folder / "cmdline").read_bytes()
                is_ours = Path(os.readlink(folder / "cwd")) == self.folder
                if is_rank and is_ours and f"RANK={number}".encode() in variables:
                    return int(folder.name)
        raise AssertionError(f"there is no rank {number}")

    def last_step(self) -> int:
        return max(losses_of(self.run), default=0)

    def seconds(self, lose: Callable[["Trial"], None]) -> tuple[float, str]:
        """From the loss to the next step, and how the run went on; or to its end."""
        wait_for(lambda: has_saved(self.run) and self.last_step() > KILL_AFTER, "steps", START_S)
        lose(self)
        before, lost = self.last_step(), time.perf_counter()

        def has_ended_or_gone_on() -> bool:
            went_on = has_gone_on(self.run) or self.last_step() > before + 1
            return went_on or self.process.poll() is not None

        wait_for(has_ended_or_gone_on, "the next step", AGAIN_S)
        took = time.perf_counter() - lost
        if self.process.poll() is not None:
            return took, f"ended with {self.process.returncode}: {self.last_line()}"
        return took, "started again" if has_gone_on(self.run) else "went on"

    def last_line(self) -> str:
        lines = [each for each in (self.folder / "said").read_text().splitlines() if each]
        return next((each for each in reversed(lines) if "trainyard:" in each), lines[-1])

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


def kill_rank(trial: Trial) -> None:
    os.kill(trial.rank(1), signal.SIGKILL)


def kill_host(hosts: SshHosts, *, comes_back: bool) -> None:
    hosts.kill("b")
    if comes_back:
        hosts.start("b")


def cut(hosts: SshHosts, seconds: float) -> None:
    """The cable of a host, for so long; the clock starts when it is mended."""
    hosts.cut("b")
    time.sleep(seconds)
    hosts.mend("b")


def on_hosts(hosts: SshHosts, words: list[str], *more: str) -> list[str]:
    given = ("--ssh-config", str(hosts.config), "--python", "python-there", "--hosts", "a,b")
    launch = [sys.executable, "-m", "trainyard", "launch", "ssh", *words, *given, "--ranks", "1"]
    return hosts.on_desk(*launch, "--restarts", "1", *more)


Case = Callable[[SshHosts, list[str]], tuple[list[str], Callable[[Trial], None]]]


def local(_: SshHosts, words: list[str]) -> tuple[list[str], Callable[[Trial], None]]:
    launch = [sys.executable, "-m", "trainyard", "launch", "local", *words, "--ranks", "2"]
    return [*launch, "--restarts", "1"], kill_rank


def torchrun(_: SshHosts, words: list[str]) -> tuple[list[str], Callable[[Trial], None]]:
    return [sys.executable, *TORCHRUN, "-m", "--", "trainyard", "train", *words], kill_rank


CASES: dict[str, Case] = {
    "local: a rank is killed": local,
    "torchrun: a rank is killed": torchrun,
    "ssh: a rank is killed": lambda hosts, words: (on_hosts(hosts, words), kill_rank),
    "ssh: a host is killed and is back at once": lambda hosts, words: (
        on_hosts(hosts, words),
        lambda _: kill_host(hosts, comes_back=True),
    ),
    "ssh: a host is killed, --min-hosts 1": lambda hosts, words: (
        on_hosts(hosts, words, "--min-hosts", "1"),
        lambda _: kill_host(hosts, comes_back=False),
    ),
    f"ssh: no packets for {CUT_S} s": lambda hosts, words: (
        on_hosts(hosts, words),
        lambda _: cut(hosts, CUT_S),
    ),
}


def empty_start() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, trainyard.run.trainer"], check=True)
    return time.perf_counter() - begun


def measured(name: str, folder: Path, digits: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        hosts = stack.enter_context(ssh_hosts(place))
        run = place / "work" / "run"
        run.parent.mkdir()
        words = ["debug", "--data", str(digits), "--run", str(run), *LONG]
        load, start_s = os.getloadavg()[0], empty_start()
        command, lose = CASES[name](hosts, words)
        trial = Trial(run, command)
        stack.callback(trial.end)
        took, how = trial.seconds(lose)
    return {"case": name, "seconds": took, "how": how, "load": load, "start_s": start_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-losses.json and .md")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    if not (folder / "digits").exists():
        folder.mkdir(parents=True, exist_ok=True)
        prepare_digits(folder / "digits")
    text = "| lost | s to the next step | the run | s of an empty start | load before |\n"
    text += "|---|---|---|---|---|\n"
    rows = []
    print(text, end="")
    for name in options.cases * options.trials:
        row = measured(name, folder, folder / "digits")
        rows.append(row)
        line = f"| {name} | {row['seconds']:.1f} | {row['how']} | {row['start_s']:.1f} "
        text += f"{line}| {row['load']:.1f} |\n"
        print(text.splitlines()[-1], flush=True)
    if options.hardware:
        heading = f"# From a loss to the next step, {options.hardware}\n\n"
        save(f"{options.hardware}-losses", {"rows": rows}, heading + text, folder=options.out)


if __name__ == "__main__":
    main()
