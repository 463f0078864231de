"""Bytes that are sent, beside what an averager really hands to the network."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spawn import spawn
from trainyard.averaging.config import AverageConfig
from trainyard.estimate.traffic import sent_bytes
from trainyard.world import World


def sent(ranks: int = 8, nodes: int = 1, **keys: Any) -> float:
    return sent_bytes(AverageConfig.model_validate(keys), 1.0, ranks=ranks, nodes=nodes)


def test_by_hand() -> None:
    assert sent() == 2 * 7 / 8
    assert sent(ranks=1) == 0
    assert sent(compress="bf16") == 7 / 8
    assert sent(name="sharded") == 3 * 7 / 8
    assert sent(name="gossip") == 1  # all of it, to a peer
    assert sent(name="gossip", compress="bf16") == 0.5
    assert sent(name="gossip", topology="ring") == pytest.approx(2 * 2 / 3, rel=0.3)
    assert sent(name="periodic", every=4) == 2 * 7 / 8 / 4
    assert sent(name="periodic", every=4, compress="int8") == 2 * 7 / 8 / 16
    # A node of 4: gradients inside, a quarter to another node, the quarters gathered.
    assert sent(nodes=2, name="gossip", hierarchical=True) == 2 * 3 / 4 + 1 / 4 + 3 / 4


def handed_over(world: World, keys: dict[str, Any]) -> float:
    """What a step sends, as a share of the bytes of the weights, by the ring's own count."""
    from trainyard.config import load_recipe
    from trainyard.run.build import build_averager

    torch.set_num_threads(1)
    averager = build_averager(load_recipe("debug", keys), world, torch.device("cpu"))
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300, bias=False)
    wrapped = averager.wrap(model)
    handed: list[float] = []
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        size = dist.get_world_size(options.get("group"))
        handed.append(2 * (size - 1) / size * tensor.nbytes)
        return real(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        for step in range(6):
            if step == 2:  # what overlaps has an exchange more to begin with
                handed.clear()
            wrapped(torch.ones(2, 300)).sum().backward()
            list(averager.ready_parameters(step, False))
    finally:
        dist.all_reduce = real
    return sum(handed) / 4 / (4 * 300 * 300)


@pytest.mark.parametrize(
    "keys",
    [
        {"average.name": "gossip"},
        {"average.name": "gossip", "average.topology": "complete"},
        {"average.name": "periodic", "average.every": "2"},
    ],
    ids=str,
)
def test_what_averagers_hand_over(keys: dict[str, Any]) -> None:
    from trainyard.config import load_recipe

    wanted = sent_bytes(load_recipe("debug", keys).average, 1.0, ranks=4, nodes=1)
    for found in spawn(handed_over, 4, keys):
        assert found == pytest.approx(wanted, rel=0.01)
