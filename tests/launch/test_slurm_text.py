"""The text of a Slurm job: as those in tests/golden, and what bash makes of it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.command_line import Capture, shown
from tests.errors import check, refused
from trainyard.command_line import main
from trainyard.launch.job import Job
from trainyard.launch.slurm import Allocation, script
from trainyard.launch.slurm_state import least_share

GOLDEN = Path(__file__).parent.parent / "golden"
PYTHON = "/shared/venv/bin/python"
TEXTS = {
    "slurm-gpus": script(
        Job(
            ("train", "resnet50", "--run", "runs/resnet50", "--data", "data/imagenet"),
            Path("runs/resnet50"),
            PYTHON,
        ),
        Allocation(
            nodes="4",
            gpus=8,
            cpus=12,
            sbatch_options=(
                ("time", "72:00:00"),
                ("partition", "gpu"),
                ("account", "vision"),
                ("constraint", "h200&ib"),
                ("reservation", "spring"),
                ("qos", "long"),
                ("comment", "the owner's first"),
                ("mem", "900G"),
            ),
            mail="me@example.org",
            extra=("#SBATCH --exclusive", "--exclude=node[07,11]"),
        ),
        folder=Path("/home/me/my project"),
        restarts=3,
        setup=("module load cuda/13.0", "source /home/me/setup.sh"),
    ),
    "slurm-seeds": script(
        Job(
            ("train", "digits", "--run", "runs/50% of it", "--run.length=5 epochs"),
            Path("runs/50% of it"),
            PYTHON,
        ),
        Allocation(nodes="1-2", ranks=4, grace=30),
        folder=Path("/home/me"),
        restarts=0,
        seeds=(0, 7),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    file = GOLDEN / f"{name}.sbatch"
    if "GOLDEN" in os.environ:  # to be made anew, and then read
        file.write_text(TEXTS[name])
    assert TEXTS[name] == file.read_text()
    subprocess.run(["bash", "-n", file], check=True)


# What srun ends with, one after another, and what the job then does. After a failure, srun is
# asked to reach all nodes.
COURSES = {
    "done": ([0], 0, []),
    "a mistake": ([2], 2, []),
    "diverged": ([3], 3, []),
    "stopped by its user": ([130], 130, []),
    "the time limit": ([75], 75, ["requeue 5"]),
    "a signal at the start": ([138], 75, ["requeue 5"]),
    "preempted": ([143], 75, ["requeue 5"]),
    "a lost node": ([1, 0], 1, []),
    "a node that does not answer for a while": ([137, 1, 1, 0, 0], 0, []),
    "one failure": ([137, 0, 0], 0, []),
    "two failures": ([137, 0, 1, 0, 75], 75, ["requeue 5"]),
    "three failures": ([137, 0, 1, 0, 1, 0], 1, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("course", COURSES)
def test_course(course: str, tmp_path: Path) -> None:
    """Slurm's commands are stood in for; the real ones are in tests/services/test_slurm.py."""
    codes, ends_with, asked = COURSES[course]
    programs, log = tmp_path / "programs", tmp_path / "asked"
    programs.mkdir()
    state = "PENDING" if course == "a lost node" else "RUNNING"
    preempted = "2026-11-22T08:00:00" if course == "preempted" else "None"
    shows = f"JobState={state} PreemptTime={preempted}"
    says = {
        "srun": 'code=$(head -n 1 codes); sed -i 1d codes; exit "$code"',
        "scontrol": f'[ "$1" = show ] && echo "{shows}" || echo "$@" >>"{log}"',
        "sleep": "exit 0",
    }
    for name, line in says.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    job = Job(("train", "debug", "--run", "run"), Path("run"), PYTHON)
    (tmp_path / "run").mkdir()
    text = script(job, Allocation(ranks=2), folder=tmp_path, restarts=2)
    path = f"{programs}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": path}
    done = subprocess.run(
        ["bash"], input=text, text=True, cwd=tmp_path, env=os.environ | slurm, capture_output=True
    )
    assert (done.returncode, done.stderr) == (ends_with, "")
    assert (log.read_text().splitlines() if log.exists() else []) == asked
    assert (tmp_path / "codes").read_text() == ""
    failures = tmp_path / "run" / "slurm-5.failures"
    lines = failures.read_text().splitlines() if failures.exists() else []
    counted = {"one": 1, "two": 2, "three": 3, "a node": 1}
    assert len(lines) == next((n for name, n in counted.items() if course.startswith(name)), 0)


def test_dry_run(capsys: Capture, digits: Path, tmp_path: Path) -> None:
    words = ["launch", "slurm", "debug", "--data", digits, "--run", tmp_path / "run", "--dry-run"]
    text = shown(capsys, *words, "--gpus", 4, "--time", "1.5", "--optim.lr", "0.1")
    assert "#SBATCH --time=1:30:00\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert " --optim.lr=0.1\n" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "code", "fields"),
    [
        ([], "launch.no-gpus-or-ranks", {}),
        (["--gpus", "2", "--ranks", "2"], "launch.gpus-and-ranks", {}),
        (["--gpus", "1", "--time", "4:00"], "option.invalid", {"option": "--time"}),
        (["--gpus", "1", "--time", "0:02:59"], "launch.time-too-short", {"least": "180"}),
        (["--gpus", "1", "--nodes", "two"], "option.invalid", {"option": "--nodes"}),
        (["--gpus", "1", "--seeds", "1-3"], "option.invalid", {"option": "--seeds"}),
        (["--gpus", "1", "--seeds", "1,2", "--run.seed", "3"], "launch.seeds-and-seed", {}),
        (["--gpus", "1", "--run.lenght", "3 steps"], "recipe.unknown-key", {}),
    ],
)
def test_mistakes(words: list[str], code: str, fields: dict[str, str]) -> None:
    check(refused("launch", "slurm", "debug", "--dry-run", *words), code, **fields)


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    check(refused("launch", "slurm", "debug", "--gpus", "1"), "launch.no-slurm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "is_forever"),
    [
        ("PENDING|PartitionConfig", True),
        ("PENDING|QOSMaxNodePerJobLimit", True),
        ("PENDING|AssocMaxWallDurationPerJobLimit", True),
        ("PENDING|Resources", False),
        ("PENDING|QOSMaxJobsPerUserLimit", False),  # until another job ends
        ("RUNNING|None", False),
        ("CLUSTER: c1\nPENDING|QOSMaxNodePerJobLimit", True),  # a TypeError with SLURM_CLUSTERS
    ],
)
def test_a_job_that_cannot_start_is_named(
    said: str,
    is_forever: bool,
    digits: Path,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--nodes 99` where there are 2 was accepted, and waited for ever."""
    for name, text in {"sbatch": "7;cluster", "squeue": said}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = ["launch", "slurm", "debug", "--data", digits, "--ranks", 1, "--run", tmp_path / "run"]
    assert main([*map(str, words)]) == 0
    state, reason = said.splitlines()[-1].split("|")
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"Slurm:  {state}" + f" ({reason})" * (reason != "None")
    assert ("job 7" in err and reason in err) == bool(err) == is_forever


NODES = """\
cpu*|64|(null)
day|96|gpu:a100:8(S:0-1),tmpdisk:900
day|64|gpu:a100:8(S:0-1)
big|224|gpu:h200:4,gpu:h100:4
big|128|gpu:2
tiny|2|gpu:4
"""


@pytest.mark.parametrize(
    ("partition", "gpus", "cores"),
    [
        ("day", 8, 8),  # of the smaller nodes: a job for the larger ones would wait for them
        ("big", 1, 28),
        ("big", 8, 28),
        ("day,big", 4, 8),
        ("tiny", 1, 1),
        (None, 1, None),  # the default partition has none
        ("day", 16, None),
    ],
)
def test_a_gpu_has_its_share_of_the_cores(
    partition: str | None, gpus: int, cores: int | None
) -> None:
    assert least_share(NODES, partition, gpus) == cores


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        ((), "8"),
        (("--cpus", "3"), "3"),
        (("--extra", "#SBATCH -c 5"), ""),
        (("--gpus", "16"), ""),
    ],
)
def test_cores_are_asked_for_unless_said(
    words: tuple[str, ...],
    cores: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Slurm's own default is one core for a rank, whose loader then starves the GPU."""
    program = tmp_path / "sinfo"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{NODES}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = ("launch", "slurm", "digits", "--partition", "day", "--gpus", "8", "--dry-run")
    assert main([*command, "--run", str(tmp_path / "run"), *words]) == 0
    said = capsys.readouterr()
    wanted = f"#SBATCH --cpus-per-task={cores}\n"
    assert (wanted in said.out) if cores else ("cpus-per-task" not in said.out)
    assert bool(said.err) == (words == ())
