"""Which runs benchmarks/convergence.py still wants, and its rounds."""

import argparse
from pathlib import Path

import pytest

from benchmarks.convergence import CONTENDERS, TUNING, next_jobs
from benchmarks.fashion_mnist import Run, missing_rates
from trainyard.averaging.topology import rounds


def test_rates_are_tried_until_the_best_has_worse_neighbours() -> None:
    """A search that ends at the largest rate would favour averagers that need a larger one."""
    tried: list[float] = []
    while rates := missing_rates({rate: abs(rate - 1.5) for rate in tried}, 0.2):
        tried += rates
    assert tried == [0.2, 0.1, 0.4, 0.8, 1.6, 3.2]
    assert missing_rates({0.1: float("inf"), 0.05: 1.0, 0.2: float("inf")}, 0.1) == [0.025]


def test_finished_runs_are_not_repeated_and_tests_wait_for_the_rate(tmp_path: Path) -> None:
    names = ["all-reduce", "sharded"]
    options = argparse.Namespace(folder=tmp_path, replicas=4, only=names, seeds=2)
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


@pytest.mark.parametrize("size", [4, 8])
def test_sparse_rounds_meet_every_peer_in_the_first_half(size: int) -> None:
    """A step count of even length would meet one peer only, at two peers."""
    topology = CONTENDERS["gossip, one-peer, sparse early"].average["topology"]
    found = rounds(topology, size, 2)
    early = {group for groups in found[: len(found) // 2] for group in groups if 0 in group}
    assert early == {(0,), *((0, 1 << k) for k in range(size.bit_length() - 1))}
