"""Decisions that all ranks share."""

import torch

from tests.spawn import spawn
from trainyard.errors import DataError, PeerError
from trainyard.world import World, gather, in_turns, together, total


def _talk(world: World) -> tuple[list[int], float, float, list[str]]:
    mine = torch.tensor(float(world.rank + 1))
    turns: list[str] = []
    in_turns(world, lambda: turns.append(f"rank {world.rank}"))
    return gather(world, world.rank), float(total(world, mine)), float(mine), turns


def test_collectives() -> None:
    for rank, (ranks, summed, mine, turns) in enumerate(spawn(_talk, 3)):
        assert ranks == [0, 1, 2]
        assert summed == 6
        assert mine == rank + 1  # the argument is left as it was
        assert turns == [f"rank {rank}"]


def test_collectives_alone() -> None:
    assert gather(World(), "x") == ["x"]
    assert in_turns(World(), lambda: 3) == 3


def _fail_on_one(world: World) -> tuple[str, int, bool]:
    try:
        with together(world):
            if world.rank == 1:
                raise DataError("the disk of rank 1 is gone")
    except (DataError, PeerError) as error:
        return str(error), error.exit_code, error.is_shared
    return "", 0, False


def test_a_failure_of_one_rank_is_a_failure_of_all() -> None:
    first, second = spawn(_fail_on_one, 2)
    assert second == ("the disk of rank 1 is gone", 2, True)
    assert first == ("rank 1: the disk of rank 1 is gone", 2, True)
