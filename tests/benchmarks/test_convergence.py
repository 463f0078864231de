"""Which runs benchmarks/convergence.py still wants."""

import argparse
from pathlib import Path

import pytest

from benchmarks.convergence import TUNING, next_jobs
from benchmarks.fashion_mnist import Run

pytestmark = pytest.mark.slow


def test_finished_runs_are_not_repeated_and_tests_wait_for_the_rate(tmp_path: Path) -> None:
    names = ["all-reduce", "sharded"]
    options = argparse.Namespace(folder=tmp_path, replicas=4, epochs=2, only=names, seeds=2)
    found: list[Run] = []
    while tuning := [job for job in next_jobs(found, options) if job.run["held_out"]]:
        assert {job.run["contender"] for job in tuning} == {"all-reduce"}
        assert {job.run["seed"] for job in tuning} <= {*TUNING}
        assert "data.val_share" in tuning[0].keys
        run = tuning[0].run
        found.append(run | {"top1": 0.9, "loss": abs(float(run["lr"]) - 0.4)})
    finals = [job.run for job in next_jobs(found, options)]
    assert [(run["contender"], run["seed"]) for run in finals] == [
        ("all-reduce", 0),
        ("sharded", 0),
        ("all-reduce", 1),
        ("sharded", 1),
    ]
    assert {run["lr"] for run in finals} == {0.4}
    done = next_jobs(found, options)[1]
    left = [job.run for job in next_jobs([*found, done.run | {"top1": 0.9}], options)]
    assert left == [run for run in finals if run != done.run]
