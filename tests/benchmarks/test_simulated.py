"""Replicas of one process against those of several: benchmarks/simulated.py."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import tiles
from benchmarks.fashion_mnist import Job, Team, prepare, recipe
from benchmarks.simulated import simulated

pytestmark = pytest.mark.night

RANKS = 4
AVERAGES: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "gossip"},
    {"name": "gossip", "overlap": False, "topology": "ring"},
    {"name": "gossip", "topology": "benchmarks.convergence:with_more_global_rounds"},
    {"name": "periodic", "every": 2},
]


def test_one_process_has_the_figures_of_several(tmp_path: Path) -> None:
    tiles.write(tmp_path / "tiles", (512, 200))
    prepare(tmp_path, tmp_path / "tiles")
    team = Team(RANKS)
    for number, average in enumerate(AVERAGES):
        keys = recipe(tmp_path, epochs=1, seed=number, held_out=False)
        keys |= {f"average.{key}": value for key, value in average.items()}
        keys |= {"batch.size": 64, "batch.precision": "fp32", "optim.lr": 0.1}
        job = Job({}, keys, RANKS)
        team.start(job, tmp_path / f"{number}")
        found, own = team.finish(), simulated(0, job, 0, tmp_path / "none")
        assert own["steps"] == found["steps"] == 8
        assert own["loss"] == pytest.approx(found["loss"], rel=1e-4)
        assert own["top1"] == pytest.approx(found["top1"], abs=0.006)  # one tile of 200
        if average["name"] != "allreduce":  # it has no distances
            assert own["distances"] == pytest.approx(found["distances"], rel=1e-3)
    team.end()
    assert not (tmp_path / "none").exists()
