"""What crosses the network where nodes are replicas, and what their ranks then hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.spawn import spawn
from trainyard.averaging import gossip
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.gossip import Gossip
from trainyard.averaging.nodes import Slices
from trainyard.averaging.periodic import Periodic
from trainyard.world import World

Array = np.ndarray[Any, Any]
LOCAL_SIZE = 3  # of two nodes
BUCKETS = [4 + 28, 7, 35]  # values, of gossip, and none a multiple of the ranks
WAYS: dict[str, dict[str, Any]] = {
    "gossip": {"name": "gossip", "overlap": False},
    "gossip, overlap": {"name": "gossip"},
    "periodic": {"name": "periodic", "every": 1},
    "bf16": {"name": "periodic", "every": 1, "compress": "bf16"},
}


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4))


def weights_of(node: int) -> Tensor:
    return torch.randn(sum(BUCKETS), generator=torch.Generator().manual_seed(node))


@contextmanager
def noting(sent: list[int]) -> Iterator[None]:
    """Of each message that leaves a node, how many values it has."""
    kept = dist.all_reduce, dist.all_to_all_single

    def noted(function: Callable[..., Any], number: int) -> Callable[..., Any]:
        def call(*arguments: Any, group: dist.ProcessGroup, **options: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            if len({rank // LOCAL_SIZE for rank in ranks}) > 1:
                sent.append(arguments[number].numel())
            return function(*arguments, group=group, **options)

        return call

    dist.all_reduce, dist.all_to_all_single = noted(kept[0], 0), noted(kept[1], 1)
    yield
    dist.all_reduce, dist.all_to_all_single = kept


def exchange(world: World) -> dict[str, tuple[list[int], Array]]:
    """Of each way: what a rank sent in one exchange, and its weights after it."""
    torch.set_num_threads(1)
    gossip._BUCKET_BYTES = 4 * 32
    node, local = divmod(world.rank, LOCAL_SIZE)
    world = replace(world, node=node, num_nodes=2, local_rank=local, local_size=LOCAL_SIZE)
    found = {}
    for way, options in WAYS.items():
        config = AverageConfig(hierarchical=True, **options)
        averager = (Gossip if config.name == "gossip" else Periodic)(config, world)
        model = model_of()
        averager.wrap(model)
        vector_to_parameters(weights_of(node), model.parameters())
        sent: list[int] = []
        with noting(sent):
            for _ in averager.ready_parameters(0, False):
                if "overlap" in way:  # it would send the next one
                    break
        found[way] = sent, parameters_to_vector(model.parameters()).detach().numpy()
    return found


def test_a_rank_sends_its_slice_and_a_node_holds_the_mean() -> None:
    ranks = spawn(exchange, 2 * LOCAL_SIZE)
    slices = [ceil(values / LOCAL_SIZE) for values in BUCKETS]
    of_all = ceil(sum(BUCKETS) / LOCAL_SIZE)
    wanted = {
        "gossip": slices,
        "gossip, overlap": slices,
        "periodic": [of_all],
        "bf16": [2 * ceil(of_all / 2)],  # half to each of the two nodes
    }
    mean = ((weights_of(0) + weights_of(1)) / 2).numpy()
    for found in ranks:
        for way, (sent, weights) in found.items():
            assert sent == wanted[way]
            assert np.array_equal(weights, ranks[0][way][1])
            np.testing.assert_allclose(weights, mean, atol=3e-2 if way == "bf16" else 1e-6)


def test_without_a_node_all_is_one_slice() -> None:
    values = torch.arange(5.0)
    slices = Slices()
    assert slices.pad(values) is values
    assert slices.local(values).data_ptr() == values.data_ptr()
    slices.gather(values)
    assert values.tolist() == [0, 1, 2, 3, 4]
