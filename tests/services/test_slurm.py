"""`launch slurm` on a real Slurm: as `launch local`, and through a night of all kinds of ends."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import Capture, newest, run, shown
from tests.docs.pages import DOCS, blocks
from tests.errors import check, refused
from tests.runs import curve, events
from tests.services.slurm_cluster import SlurmCluster, needs_slurm, wait_long_for
from tests.tiers import tiered

pytestmark = [
    pytest.mark.slow,
    needs_slurm,
    pytest.mark.timeout(600),
]  # a night is long on a machine that is busy

OBSERVER = Path(__file__).parent / "observer"
NIGHT_STEPS = 150  # of 32 samples: an epoch ends in step 45
OPTIONS = (
    *("--run.log_every", "1 step", "--run.save_every", "0 steps", "--run.eval_every", "0 steps"),
    *("--data.threads", "1"),
)


@pytest.fixture
def at_slurm(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SlurmCluster:
    """To be asked by what runs in this process too."""
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return slurm


def submitted(capsys: Capture, *words: object) -> str:
    """The job's id."""
    return job_in(shown(capsys, "launch", "slurm", "debug", *words))


def job_in(said: str) -> str:
    found = re.match(r"job (\d+) trains in ", said)
    assert found is not None
    return found[1]


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("slurm-*.out")))


def environment(cluster: SlurmCluster, log: Path) -> dict[str, str]:
    """In which ranks note in `log` what they train on."""
    log.mkdir(parents=True)
    ours = {"PYTHONPATH": str(OBSERVER), "TRAINYARD_TEST_LOG": str(log)}
    return os.environ | cluster.env | ours


def num_steps(log: Path) -> int:
    return len(noted(log, 0)) if (log / "ids-0.jsonl").exists() else 0


def wait_for_two_steps(log: Path) -> None:
    before = num_steps(log)
    wait_long_for(lambda: num_steps(log) > before + 1, "two more steps")


def wait_for_requeue(cluster: SlurmCluster, job: str, number: int) -> None:
    """The job's requeue of this number."""
    wait_long_for(lambda: int(cluster.field(job, "Restarts")) >= number, f"requeue {number}")


def noted(log: Path, rank: int) -> list[tuple[int, list[int]]]:
    """Step and samples, in the order in which a rank has made them."""
    return [json.loads(line) for line in (log / f"ids-{rank}.jsonl").read_text().splitlines()]


# --- a night ---


@dataclass
class Night:
    """A run that is ended in all ways that Slurm knows."""

    cluster: SlurmCluster
    digits: Path
    folder: Path

    def command(self, name: str, *words: str) -> list[str]:
        length = ("--run.length", f"{NIGHT_STEPS} steps")
        folder = str(self.folder / name / "run")
        common = ("--data", str(self.digits), "--run", folder, *length, *OPTIONS)
        return [sys.executable, "-m", "trainyard", "launch", *words, *common]

    def live(self) -> str:
        """The job's id, once it has ended."""
        log = self.folder / "night" / "log"
        words = ("--partition", "low", "--ranks", "1", "--nodes", "2", "--restarts", "1")
        command = self.command("night", "slurm", "debug", *words, "--time", "1")
        env = environment(self.cluster, log)
        (log / "slow").touch()
        said = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        job = job_in(said)
        self.train(job, log)
        hours, minutes, _ = map(int, self.cluster.field(job, "RunTime").split(":"))
        self.limit(job, 60 * hours + minutes + 2)  # the ranks are told when it is next looked at
        wait_for_requeue(self.cluster, job, 1)
        self.limit(job, 60)
        urgent = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
        for cause in (["scancel", "--signal=USR1", job], ["sbatch", *urgent, "--wrap=true"]):
            before = self.train(job, log)
            self.cluster.ask(*cause)
            wait_for_requeue(self.cluster, job, before + 1)
        self.train(job, log)
        (log / "kill-1").touch()
        wait_long_for(lambda: not (log / "kill-1").exists(), "rank 1 to be killed")
        (log / "slow").unlink()
        self.cluster.wait_for_end(job)
        return job

    def limit(self, job: str, minutes: int) -> None:
        self.cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def train(self, job: str, log: Path) -> int:
        """How often the job was requeued before it trained, once it does."""
        wait_for_two_steps(log)
        return int(self.cluster.field(job, "Restarts"))


# --- short jobs ---


@pytest.mark.parametrize("ranks", tiered([2, 4], night=[4]))
def test_same_losses_as_local(
    ranks: int, at_slurm: SlurmCluster, digits: Path, capsys: Capture, tmp_path: Path
) -> None:
    words = ["--data", digits, "--run.length", "8 steps", *OPTIONS]
    job = submitted(capsys, "--run", "runs/slurm", "--nodes", 2, "--ranks", ranks // 2, *words)
    local = [sys.executable, "-m", "trainyard", "launch", "local", "debug", "--run", "runs/local"]
    subprocess.run([*local, "--ranks", *map(str, (ranks, *words))], check=True, capture_output=True)
    assert at_slurm.wait_for_end(job) == "COMPLETED", output(tmp_path / "runs" / "slurm")
    ours, theirs = (curve(tmp_path / "runs" / name, "train", "loss") for name in ("slurm", "local"))
    assert ours == theirs
    assert list(ours) == list(range(1, 9))


@pytest.mark.night
def test_seeds(at_slurm: SlurmCluster, digits: Path, capsys: Capture, tmp_path: Path) -> None:
    words = ("--data", digits, "--ranks", 1, "--run.length", "2 steps", *OPTIONS)
    job = submitted(capsys, "--run", "some runs/a", "--seeds", "3,5", *words)
    assert at_slurm.wait_for_end(f"{job}_3") == at_slurm.wait_for_end(f"{job}_5") == "COMPLETED"
    folders = [tmp_path / "some runs" / f"a-seed{seed}" for seed in (3, 5)]
    losses = [curve(folder, "train", "loss")[2] for folder in folders]
    assert losses[0] != losses[1]
    assert ["seed = 3\n" in (f / "recipe.toml").read_text() for f in folders] == [True, False]
    assert all("stop" not in output(folder) and output(folder) for folder in folders)


def joined_array(cluster: SlurmCluster, *words: object) -> str:
    """The words of the join after an array as in docs/data.md: a part per task, and then a job."""
    page = next(block.text for block in blocks(DOCS / "data.md") if "--array" in block.text)
    command, script = page.split("\n", 1)
    assert command.startswith('command="trainyard data ')
    command = shlex.join(map(str, (sys.executable, "-m", "trainyard", *words)))
    script = f'command="{command}"\n{script.replace("16", "3")}'
    said = subprocess.run(["bash", "-ec", script], check=True, capture_output=True, text=True)
    job = said.stdout.split()[-1]
    assert cluster.wait_for_end(job) == "COMPLETED"
    return Path(f"slurm-{job}.out").read_text()


@pytest.mark.night
def test_a_pack_as_an_array(at_slurm: SlurmCluster, digits: Path, tmp_path: Path) -> None:
    words = ("--format", "webdataset", "--shard-samples", 100)
    joined_array(at_slurm, "data", "pack", digits, "parts", *words)
    assert run("data", "pack", digits, "whole", *words) == 0
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == names
    for name in names:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.night
def test_a_job_that_slurm_refuses(
    at_slurm: SlurmCluster, capsys: Capture, digits: Path, tmp_path: Path
) -> None:
    words = ("--data", digits, "--ranks", 1, "--partition", "nowhere", "--run", "run")
    error = refused("launch", "slurm", "debug", *words, exit_code=1)
    check(error, "launch.job-refused")
    assert "invalid partition specified: nowhere" in str(error.fields["reason"])
    assert "\n" not in str(error)
    assert capsys.readouterr().out == ""


@pytest.mark.night
def test_a_mistake_is_not_made_again(
    at_slurm: SlurmCluster, digits: Path, capsys: Capture, tmp_path: Path
) -> None:
    words = ("--data", digits, "--run", "run", "--ranks", 1, "--run.resume", tmp_path / "nowhere")
    job = submitted(capsys, *words)
    assert at_slurm.wait_for_end(job) == "FAILED"
    assert at_slurm.field(job, "ExitCode") == "2:0"
    said = output(tmp_path / "run")
    assert said.count("no such checkpoint") == 1 and "starting again" not in said


@pytest.mark.night
def test_a_lost_node_is_no_failure(
    at_slurm: SlurmCluster,
    digits: Path,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until Slurm knew of it, srun failed at once, again and again, and that used up restarts."""
    log = tmp_path / "log"
    for name, value in environment(at_slurm, log).items():
        monkeypatch.setenv(name, value)
    (log / "slow").touch()
    words = ("--data", digits, "--run", "run", "--run.length", "20 steps", *OPTIONS)
    job = submitted(capsys, *words, "--ranks", 1, "--nodes", 2, "--restarts", 0)
    wait_for_two_steps(log)
    with at_slurm.lost("yard4"):
        wait_for_requeue(at_slurm, job, 1)
        (log / "slow").unlink()
    assert at_slurm.wait_for_end(job) == "COMPLETED", output(tmp_path / "run")
    assert not (tmp_path / "run" / f"slurm-{job}.failures").exists()


@pytest.mark.night
def test_a_job_that_cannot_start_is_named(
    at_slurm: SlurmCluster, digits: Path, capsys: Capture
) -> None:
    words = ("--data", digits, "--run", "run", "--ranks", 1, "--nodes", 99)
    assert run("launch", "slurm", "debug", *words) == 0
    said = capsys.readouterr()
    job = job_in(said.out)
    at_slurm.ask("scancel", job)
    assert f"job {job} does not start as it is (Partition" in said.err


@pytest.mark.night
def test_night(slurm: SlurmCluster, digits: Path, tmp_path: Path) -> None:
    """The time limit, a signal, preemption and a dead rank: one stream of samples, same losses."""
    one = Night(slurm, digits, tmp_path)
    job = one.live()
    folder, log = one.folder / "night" / "run", one.folder / "night" / "log"
    assert one.cluster.field(job, "JobState") == "COMPLETED", output(folder)
    assert int(one.cluster.field(job, "Restarts")) >= 3
    (failure,) = (folder / f"slurm-{job}.failures").read_text().splitlines()
    assert failure.endswith("exit code 137")
    said = output(folder)
    assert said.count("stopped by a signal before the end: requeued") >= 2
    assert said.count("preempted: requeued") == 1
    assert "rank 1 (" in said and "starting again (1 of 1)" in said
    resumed = events(folder, "resumed")
    assert len(resumed) >= 4
    assert any(line["step"] % 45 for line in resumed)  # within an epoch
    assert newest(folder).name == f"step-{NIGHT_STEPS:08d}"

    undisturbed = one.folder / "undisturbed"
    command = one.command("undisturbed", "local", "debug", "--ranks", "2")
    env = environment(one.cluster, undisturbed / "log")
    subprocess.run(command, env=env, check=True, capture_output=True)
    for rank in range(2):
        seen, expected = noted(log, rank), dict(noted(undisturbed / "log", rank))
        # Steps since a checkpoint are made again after a death, with the same samples.
        assert all(ids == expected[step] for step, ids in seen)
        assert {step for step, _ in seen} == set(range(1, NIGHT_STEPS + 1))
    ours, theirs = (curve(place, "train", "loss") for place in (folder, undisturbed / "run"))
    assert ours == theirs
    assert one.cluster.processes() == []
