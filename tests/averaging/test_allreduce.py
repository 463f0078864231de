"""What the replicas of all-reduce agree on when they are asked to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from tests.spawn import spawn
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import AverageConfig
from trainyard.model.ema import Ema
from trainyard.world import World


def floats_of(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in module.buffers() if buffer.is_floating_point()]


def counts_of(module: nn.Module) -> list[int]:
    return [int(buffer) for buffer in module.buffers() if not buffer.is_floating_point()]


def agree_on_buffers(world: World, follows: bool) -> tuple[list[Any], list[Any], int]:
    """My statistics of batch norm before and inside consensus(), and how many messages it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    ema = Ema(model, 0.5, warmup=False, cpu=True)
    averager = AllReduce(AverageConfig(), world)
    if follows:
        averager.follow(ema.module)
    wrapped = averager.wrap(model)
    for step in range(3):
        generator = torch.Generator().manual_seed(step * world.size + world.rank)
        wrapped(torch.randn(4, 3, 8, 8, generator=generator) + world.rank)
        ema.update(step)
    before = [floats_of(model), floats_of(ema.module)]
    counts = [counts_of(model), counts_of(ema.module)]
    messages: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        messages.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counted
    with averager.consensus():
        inside = [floats_of(model), floats_of(ema.module)]
    dist.all_reduce = all_reduce
    assert [counts_of(model), counts_of(ema.module)] == counts
    as_lists = [[[b.tolist() for b in buffers] for buffers in part] for part in (before, inside)]
    return as_lists[0], as_lists[1], len(messages)


@pytest.mark.parametrize("follows", [True, False])
def test_consensus_is_the_mean_of_the_buffers_in_one_message(follows: bool) -> None:
    """Of the model and of the moving average that follows it, which has statistics of its own."""
    (before_0, inside_0, messages_0), (before_1, inside_1, messages_1) = spawn(
        agree_on_buffers, 2, follows
    )
    assert messages_0 == messages_1 == 1
    model, average = 0, 1
    for module in (model, average) if follows else (model,):
        assert inside_0[module] == inside_1[module]
        for one, other, mean in zip(
            before_0[module], before_1[module], inside_0[module], strict=True
        ):
            assert one != other  # each rank's are of its own samples
            expected = (torch.tensor(one) + torch.tensor(other)) / 2
            torch.testing.assert_close(torch.tensor(mean), expected)
    assert before_0[model] != before_0[average]
    if not follows:
        assert inside_0[average] == before_0[average]
