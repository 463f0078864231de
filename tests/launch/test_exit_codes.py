"""The first cause when ranks end in different ways."""

import sys
from pathlib import Path

import pytest

from trainyard.launch.elastic import Policy, on_loopback, run_ranks
from trainyard.launch.exit_codes import first_cause


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({0: 130, 1: -9}, (1, -9)),  # the launcher stopped rank 0
        ({0: 1, 1: 75}, (0, 1)),  # ranks save together or not at all
        ({0: -15, 1: 1, 2: 2}, (2, 2)),
        ({0: 130, 1: 130}, (0, 130)),
        ({0: -10, 1: -10}, (0, -10)),  # before the first step
        ({0: 0, 1: 130}, (1, 130)),
        ({0: 0, 1: 3}, (1, 3)),
        ({0: 1, 1: -15, 2: 1}, (0, 1)),
    ],
)
def test_first_cause(ends: dict[int, int], first: tuple[int, int]) -> None:
    assert first_cause(ends) == first


def test_a_rank_that_saves_longer_than_another_has_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal while it saves would end it."""
    monkeypatch.setattr("trainyard.launch.elastic.NOTICE_S", 0.1)
    rank = (
        "import os, sys, time",
        "time.sleep(2 * int(os.environ['RANK']))",
        f"open(f'{tmp_path}/' + os.environ['RANK'], 'w').close()",
        "sys.exit(75)",
    )
    command = (sys.executable, "-c", "; ".join(rank))
    assert run_ranks(command, 2, on_loopback(), Policy(grace_s=60), say=print) == 75
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
