"""`trainyard launch ssh` on real hosts, one of which may go, or have something wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.command_line import newest
from tests.services.losses import losses_of, reports
from tests.services.ssh_hosts import SshHosts, needs_ssh, ssh_hosts
from tests.test_cli_signals import LONG, check_stopped_run, has_begun, has_saved, wait_for
from tests.tiers import tiered
from trainyard.training.checkpoint import find_problem

pytestmark = [pytest.mark.slow, needs_ssh]
QUICK = ("--run.log_every", "1 step", "--data.threads", "1", "--run.eval_every", "0 steps")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


class Launched:
    """`launch ssh` under way. All that belongs to it, here and on hosts, works in its folder."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process, self.folder = process, folder
        self.errors = folder / "stderr"

    def said(self) -> str:
        return self.errors.read_text()

    def members(self) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if Path(os.readlink(process / "cwd")) == self.folder:
                    found.append(int(process.name))
        return found

    def end(self, timeout_s: float = 120) -> int:
        """Its exit code. Nothing is left, anywhere."""
        code = self.process.wait(timeout_s)
        wait_for(lambda: not self.members(), "the last process to end", timeout_s=20)
        return code


@contextmanager
def launched(hosts: SshHosts, folder: Path, *words: object) -> Iterator[Launched]:
    """A command under way; nothing of it is left when a test fails either."""
    folder.mkdir(exist_ok=True)
    given = ("--ssh-config", hosts.config, "--python", "python-there", *words)
    command = [sys.executable, "-m", "trainyard", "launch", "ssh", *map(str, given)]
    with (
        (folder / "stdout").open("w") as out,
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            hosts.on_desk(*command), cwd=folder, stdout=out, stderr=errors, text=True
        ) as process,
    ):
        running = Launched(process, folder)
        try:
            yield running
        finally:
            for member in (*running.members(), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)


@pytest.mark.parametrize("each", tiered([1, 2], night=[2]))
def test_losses_are_those_of_local(
    each: int, hosts: SshHosts, digits: Path, tmp_path: Path
) -> None:
    words = ["debug", "--data", digits, *QUICK, "--run.length", "3 steps"]
    with launched(
        hosts, tmp_path / "ssh", *words, "--hosts", "a,b", "--ranks", each, "--run", "run"
    ) as run:
        assert run.end() == 0, run.said()
    local = ["launch", "local", *words, "--ranks", 2 * each, "--run", tmp_path / "local"]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))  # one for each, as on hosts
    command = ["taskset", "-c", cores, sys.executable, "-m", "trainyard", *map(str, local)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert losses_of(tmp_path / "ssh" / "run") == losses_of(tmp_path / "local")
    shown = (tmp_path / "ssh" / "stdout").read_text().splitlines()
    assert all(line.startswith("a | ") for line in shown) and "top-1" in shown[-2]
    # On a busy machine the ranks come more than 10 s apart.
    assert all("waiting for rank" in line for line in run.said().splitlines()), run.said()


@pytest.mark.night
def test_a_host_that_is_killed_is_waited_for(hosts: SshHosts, digits: Path, tmp_path: Path) -> None:
    words = ["debug", "--data", digits, *QUICK, "--run.length", "60 steps", "--run", "run"]
    words += ["--hosts", "a,b", "--ranks", 1, "--restarts", 1, "--run.save_every", "2 steps"]
    with launched(hosts, tmp_path, *words) as run:
        wait_for(lambda: has_saved(tmp_path / "run"), "the first checkpoint", timeout_s=150)
        hosts.kill("b")
        wait_for(lambda: "host b is gone" in run.said(), "the name of the host", timeout_s=30)
        wait_for(lambda: "starting again (1 of 1)" in run.said(), "the other to save")
        hosts.start("b")
        assert run.end() == 0, run.said()
    check_whole(tmp_path / "run", 60)


@pytest.mark.night
def test_a_host_that_goes_down_is_no_failure(hosts: SshHosts, digits: Path, tmp_path: Path) -> None:
    """Its agent is told to end: all save, and go on when it is back. No restart is used up."""
    words = ["debug", "--data", digits, *QUICK, "--run.length", "200 steps", "--run", "run"]
    words += ["--hosts", "a,b", "--ranks", 1, "--run.save_every", "0 steps"]
    with launched(hosts, tmp_path, *words) as run:
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report", timeout_s=150)
        os.kill(agent_of(run, "-1"), signal.SIGTERM)
        wait_for(lambda: "host b is gone" in run.said(), "the name of the host", timeout_s=60)
        assert run.end() == 0, run.said()
    check_whole(tmp_path / "run", 200)
    assert any(line.get("event") == "resumed" for line in reports(tmp_path / "run"))
    assert "another host was told to end" in run.said()


def ranks_of(run: Launched) -> list[int]:
    """The ranks that run, on any host."""
    found = []
    for member in run.members():
        with suppress(OSError):  # it has just ended
            words = Path(f"/proc/{member}/cmdline").read_bytes().split(b"\0")
            found += [member] * (b"train" in words)
    return found


def agent_of(run: Launched, number: str) -> int:
    """The process of a host's agent, by the end of its --run-id."""
    for member in run.members():
        words = Path(f"/proc/{member}/cmdline").read_bytes().decode().split("\0")
        if "agent" in words and any(
            word.startswith("--run-id") and word.endswith(number) for word in words
        ):
            return member
    raise AssertionError(f"no agent {number}")


@pytest.mark.night
def test_a_run_goes_on_without_a_host_whose_cable_is_cut(
    hosts: SshHosts, digits: Path, tmp_path: Path
) -> None:
    words = ["debug", "--data", digits, *QUICK, "--run.length", "60 steps", "--run", "run"]
    words += ["--hosts", "a,b", "--ranks", 1, "--min-hosts", 1, "--restarts", 1]
    words += ["--run.save_every", "2 steps"]
    with launched(hosts, tmp_path, *words) as run:
        wait_for(lambda: has_saved(tmp_path / "run"), "the first checkpoint", timeout_s=150)
        hosts.cut("b")
        try:
            code = run.process.wait(200)
            wait_for(lambda: not ranks_of(run), "the rank that is cut off to end")
        finally:
            hosts.mend("b")
        wait_for(lambda: not run.members(), "the agent there to end")
    assert code == 0, run.said()
    check_whole(tmp_path / "run", 60)


@pytest.mark.night
def test_a_run_goes_on_while_its_launcher_is_suspended(
    hosts: SshHosts, digits: Path, tmp_path: Path
) -> None:
    """A silence of 10 s between the launcher and its hosts ended the run."""
    words = ["debug", "--data", digits, "--hosts", "a,b", "--ranks", 1, "--run", "run", *LONG]
    with launched(hosts, tmp_path, *words) as run:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report", timeout_s=150)
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(15)
        before = metrics.stat().st_size
        wait_for(lambda: metrics.stat().st_size > before, "the next report", timeout_s=30)
        run.process.send_signal(signal.SIGCONT)
        run.process.send_signal(signal.SIGHUP)
        assert run.end() == 130, run.said()
    check_stopped_run(tmp_path / "run")


MISTAKEN = """
import os, socket
def net(**options):
    if socket.gethostname() == "b":
        os._exit(2)
    import torch
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
"""


@pytest.mark.night
def test_a_mistake_on_one_host_ends_the_others(
    hosts: SshHosts, digits: Path, tmp_path: Path
) -> None:
    """They would wait for it for ever, or start again and again."""
    words = ["debug", "--data", digits, "--hosts", "a,b", "--ranks", 1, "--run", "run", *LONG]
    words += ["--model.name", "mistaken:net", "--restarts", 3]
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    with launched(hosts, tmp_path, *words) as run:
        assert run.end() == 2, run.said()
    assert "starting again (2 of 3)" not in run.said()


def check_whole(run: Path, num_steps: int) -> None:
    """All steps were made, in one run."""
    trained = [line for line in reports(run) if line["kind"] == "train"]
    assert trained[-1]["step"] == num_steps and trained[0]["step"] == 1
    assert trained[-1]["samples"] == num_steps * trained[0]["samples"]
    assert newest(run).name == f"step-{num_steps:08d}"
    assert find_problem(newest(run)) is None


@pytest.mark.night
def test_ranks_listen_on_the_interface_that_they_use(
    hosts: SshHosts, digits: Path, tmp_path: Path
) -> None:
    """Another network of a host does not reach the store, nor what gloo listens at."""
    words = ["debug", "--data", digits, "--hosts", "a,b", "--ranks", 2, "--run", "run", *LONG]
    with launched(hosts, tmp_path, *words) as run:
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report", timeout_s=150)
        found = {name: hosts.listening(name) for name in ("a", "b")}
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 130
    assert found == {name: {hosts.address(name)} for name in ("a", "b")}


ENDINGS = [(signal.SIGUSR1, 75), (signal.SIGKILL, -9)]


@pytest.mark.night
@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_nothing_is_left_of_a_launcher_that_is_told_to_end(
    number: signal.Signals, code: int, hosts: SshHosts, digits: Path, tmp_path: Path
) -> None:
    words = ["debug", "--data", digits, "--hosts", "a,b", "--ranks", 1, "--run", "run", *LONG]
    with launched(hosts, tmp_path, *words) as run:
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report", timeout_s=150)
        assert len(run.members()) >= 1 + 2 * 4  # ssh, agent, rank and loader of two hosts
        run.process.send_signal(number)
        assert run.end() == code
    check_stopped_run(tmp_path / "run")


@pytest.mark.night
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--folder", "/no/such"), 2, "| bash: line 1: cd: /no/such"),
        (("--python", "/no/python"), 127, "/no/python: No such file or directory"),
        (("--gpus", 9), 2, "| trainyard: this host has 0 GPUs, not 9"),
        (("--master-addr", "192.0.2.1"), 2, "a | trainyard: cannot listen at 192.0.2.1"),
        (("--master-addr", "127.0.0.1"), 2, "b | trainyard: this host does not reach the first"),
        (("--hosts", "a,me@nowhere"), 2, "host nowhere: ssh has failed: ssh: Could not resolve"),
        (("--hosts", "a,locked"), 2, "host locked: ssh has failed: "),
    ],
)
def test_mistakes(
    words: tuple[object, ...], code: int, said: str, hosts: SshHosts, digits: Path, tmp_path: Path
) -> None:
    hosts.alias("locked", of="a", key="wrong_key")
    options = ["debug", "--data", digits, "--run", "run", *words]
    options += [] if "--hosts" in words else ["--hosts", "a,b"]
    with launched(hosts, tmp_path, *options) as run:
        assert run.end() == code, run.said()
    assert said in run.said()
    assert "Traceback" not in run.said()
    assert not (tmp_path / "run").exists()


@pytest.mark.night
def test_the_directory_is_copied(hosts: SshHosts, digits: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "mine.toml").write_text('extends = "debug"\n[run]\nlength = "1 step"\n')
    (here / ".gitignore").write_text("std*\n")
    words = ["mine.toml", "--data", digits, *QUICK, "--hosts", "a:2", "--run", "run", "--json"]
    with launched(hosts, here, *words, "--sync", "--folder", there) as run:
        assert run.end() == 0, run.said()
    assert {path.name for path in there.iterdir()} == {"mine.toml", ".gitignore", "run"}
    assert json.loads((here / "stdout").read_text())["step"] == 1
