"""`trainyard doctor` on one machine, by the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from trainyard import cgroups

pytestmark = pytest.mark.slow

QUICK = ("doctor", "--quick")

Rows = dict[str, dict[str, str]]


def findings(text: str) -> tuple[Rows, dict[str, Any]]:
    """The rows by what they are about, and everything else."""
    found = json.loads(text)
    return {row["what"]: row for row in found.pop("rows")}, found


def examined(capsys: Capture, *arguments: object, code: int = 0) -> Rows:
    capsys.readouterr()
    assert run(*QUICK, "--json", *arguments) == code
    return findings(capsys.readouterr().out)[0]


def test_a_healthy_machine(digits: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainyard", *QUICK, "debug", "--data", str(digits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert all(figure in done.stdout for figure in ("1,433", "364", "samples/s"))
    assert list(tmp_path.iterdir()) == []


def test_as_json(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    rows, rest = findings(shown(capsys, *QUICK, "--json", "--data", digits, "--run", tmp_path))
    assert all(row.keys() == {"what", "found", "verdict", "advice"} for row in rows.values())
    assert {row["verdict"] for row in rows.values()} <= {"ok", "warn"}
    assert all(row["advice"] for row in rows.values() if row["verdict"] != "ok")
    assert len(rest.pop("left_out")) == 1
    assert rest.pop("verdict") in ("ok", "warn")
    assert rest == {"num_ranks": 1, "num_machines": 1}
    assert "1,433" in rows["data"]["found"]
    assert "samples/s" in rows["reading samples"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_few_open_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainyard", *QUICK, "--json"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    rows, rest = findings(done.stdout)
    assert rows["open files allowed"]["verdict"] == rest["verdict"] == "fail"
    assert rows["open files allowed"]["found"] == "200"
    assert "ulimit -n" in rows["open files allowed"]["advice"]


def test_no_space(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_usage = shutil.disk_usage

    def nearly_full(path: Path) -> Any:
        usage = disk_usage(path)
        return usage._replace(free=10_000_000) if path == tmp_path else usage

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    rows = examined(capsys, "--run", tmp_path, code=1)
    assert rows["space for the run"]["verdict"] == "fail"
    assert rows["space for the run"]["found"].startswith("10 MB in ")
    assert rows["space for temporary files"]["verdict"] != "fail"


def test_a_disk_that_is_full(tmp_path: Path, capsys: Capture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of its own: nothing can be mounted here")
    try:
        rows = examined(capsys, "--run", disk / "runs" / "a", code=1)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert rows["writing checkpoints"]["verdict"] == "fail"
    assert "No space left on device" in rows["writing checkpoints"]["found"]
    assert "--run" in rows["writing checkpoints"]["advice"]
    assert rows["space for the run"]["verdict"] == "fail"


def test_a_run_directory_that_cannot_be(capsys: Capture) -> None:
    rows = examined(capsys, "--run", "/proc/here/run", code=1)
    assert rows["writing checkpoints"]["verdict"] == "fail"


def test_data_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    words = ("--data.train", tmp_path / "none", "--data.val", tmp_path / "none")
    rows = examined(capsys, "debug", *words, code=1)
    assert rows["data"]["verdict"] == "fail"
    assert str(tmp_path / "none") in rows["data"]["found"]
    assert "reading samples" not in rows


@pytest.mark.parametrize(("optimizer", "size"), [("sgd", "205 MB"), ("accum_adam", "409 MB")])
def test_the_size_of_a_checkpoint_is_that_of_the_estimate(
    optimizer: str, size: str, digits: Path, capsys: Capture
) -> None:
    """102 MB of weights and one to three as large copies; it was two, whatever the optimizer."""
    keys = ("--optim.name", optimizer, "--model.name", "resnet50")
    rows = examined(capsys, "debug", "--data", digits, *keys)
    assert size in rows["writing checkpoints"]["found"]


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_a_job_count(
    version: int, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Slurm the root has no limits: doctor printed the memory of the whole node."""
    job = "slurm/uid_7/job_3"
    step = f"{job}/step_0/user/task_0"
    older = {
        f"cpu/{job}/cpu.cfs_quota_us": "20000",
        f"cpu/{job}/cpu.cfs_period_us": "50000",
        f"memory/{step}/memory.limit_in_bytes": str(2**63 - 4096),
        f"memory/{step}/memory.usage_in_bytes": "100",
        f"memory/{job}/memory.limit_in_bytes": "2000000000",
        f"memory/{job}/memory.usage_in_bytes": "1500000000",
        f"memory/{job}/memory.stat": "inactive_file 7\ntotal_inactive_file 500000000",
    }
    newer = {
        f"{job}/cpu.max": "40000 100000",
        f"{step}/cpu.max": "max 100000",
        f"{step}/memory.max": "max",
        f"{job}/memory.max": "2000000000",
        f"{job}/memory.current": "1500000000",
        f"{job}/memory.stat": "anon 1\ninactive_file 500000000",
    }
    trees = f"9:cpuset:/else\n5:cpu,cpuacct:/{step}\n4:memory:/{step}\n0::/"
    own = {"self": trees if version == 1 else f"0::/{step}"}
    for name, value in ((older if version == 1 else newer) | own).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(cgroups, "CGROUP", tmp_path)
    monkeypatch.setattr(cgroups, "PROC_CGROUP", tmp_path / "self")
    rows = examined(capsys)
    assert rows["cores of a rank"]["found"] == "0.4"
    assert rows["free memory of a rank"]["found"] == "1 GB"
    assert rows["cores of a rank"]["verdict"] == rows["free memory of a rank"]["verdict"] == "warn"


def test_recipe_keys_need_a_recipe() -> None:
    check(refused("doctor", "--optim.lr", 1), "option.key-without-recipe", key="optim.lr")
