"""A training step of one rank: what its random numbers and the weights of samples decide."""

import torch
from torch import Tensor, nn

from tests.steps import Case, global_batch, make_step
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.world import World


def statistics(norm: nn.BatchNorm2d) -> list[list[float]]:
    return [norm.get_buffer(name).tolist() for name in ("running_mean", "running_var")]


def test_a_batch_of_bad_samples_leaves_the_statistics() -> None:
    """A rank without samples left sees black images."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    step = make_step(nn.Sequential(norm, nn.Flatten(), nn.Linear(3072, 10)))
    bad, good = Case(batch=4, bad=(0, 1, 2, 3)), Case(batch=4)
    step(global_batch(good, 0), 0, 1.0)
    before = statistics(norm)
    step(global_batch(bad, 1), 1, 1.0)
    assert statistics(norm) == before
    step(global_batch(good, 2), 2, 1.0)
    assert statistics(norm) != before


def dropped(rank: int, number: int) -> Tensor:
    """The units that a rank drops in a step."""
    kept: list[Tensor] = []
    dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(lambda module, inputs, output: kept.append(output != 0))
    model = nn.Sequential(nn.Flatten(), dropout, nn.Linear(3072, 10))
    alone, one_of_two = AllReduce(AverageConfig(), World()), World(rank=rank, size=2)
    make_step(model, alone, one_of_two)(global_batch(Case(batch=2), 0), number, 0.0)
    return kept[0]


def test_each_rank_drops_other_units_in_each_step_and_the_same_again() -> None:
    seen = [dropped(rank, number) for rank in (0, 1) for number in (0, 1)]
    for place, one in enumerate(seen):
        assert all(0.45 < float((one == other).float().mean()) < 0.55 for other in seen[:place])
    assert torch.equal(dropped(1, 1), seen[-1])
