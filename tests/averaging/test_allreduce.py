"""All-reduce: gradients in groups and buckets, divisors, and batch norm by the samples of all."""

import copy
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import distributed as dist
from torch import nn

from tests.errors import raises
from tests.spawn import spawn
from trainyard.averaging.allreduce import AllReduce, wrap_in_ddp
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.sync_bn import convert_to_sync, without_sync
from trainyard.config import load_recipe
from trainyard.model.freeze import freeze
from trainyard.run.build import build_run_course, check_batches
from trainyard.world import World

# --- DDP ---


def wrapped_for_two(world: World) -> tuple[bool, list[float], list[bool]]:
    """If the model is unchanged; the ratio of two mean gradients; if the buckets are final."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = wrap_in_ddp(model)
    is_as_it_was = wrapped.module is model and all(p.grad is None for p in model.parameters())
    for name, tensor in model.state_dict().items():
        is_as_it_was &= torch.equal(tensor, before[name])
    cut = [not wrapped.reducer._rebuild_buckets()]  # there is nothing left to do
    with wrapped.no_sync():
        wrapped(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    wrapped(torch.full((1, 3), float(world.rank))).sum().backward()
    cut.append(not wrapped.reducer._rebuild_buckets())
    ratio = model[0].weight.grad / model[1].weight.T  # the mean of the ranks
    return is_as_it_was, ratio.flatten().tolist(), cut


def test_gradients_are_averaged_in_buckets_that_are_cut_at_once() -> None:
    for is_as_it_was, ratio, cut in spawn(wrapped_for_two, 2):
        assert is_as_it_was
        assert ratio == pytest.approx([0.5] * 6)
        assert cut == [True, True]


# --- what a loss is divided by ---


def divisors(world: World) -> list[list[float]]:
    """Each asked for twice, in another order than they were begun; of no good sample at all."""
    mine = [torch.tensor(float(world.rank)), torch.tensor(2.0), torch.tensor(0.0)]
    averager = AllReduce(AverageConfig(), world)
    begun = [averager.divisor(weight) for weight in mine]
    found = [[float(divisor()), float(divisor())] for divisor in reversed(begun)]
    assert [float(weight) for weight in mine] == [world.rank, 2, 0]
    return found


def test_the_mean_weight_may_be_asked_for_late_and_again() -> None:
    for found in spawn(divisors, 3):
        assert found == [[pytest.approx(1 / 3)] * 2, [2, 2], [1, 1]]


# --- batch norm by the samples of all ---


def with_batch_norms() -> nn.Module:
    """Two of torch's, of which one is frozen, and one of timm's."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.3),
        nn.Sequential(nn.Conv2d(4, 4, 3), BatchNormAct2d(4)),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
    )
    freeze(model, ["4.*"])
    return model


def test_layers_are_put_in_the_place_of_others() -> None:
    model: Any = with_batch_norms().to("meta")
    average = copy.deepcopy(model)  # as a moving average is, before the model is wrapped
    own = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    names = list(model.state_dict())
    convert_to_sync(model)
    kinds = [type(model[1]), type(model[2][1]), type(model[4])]
    assert kinds == [nn.SyncBatchNorm, SyncBatchNormAct, nn.BatchNorm2d]
    assert list(model.state_dict()) == names
    assert {id(tensor) for tensor in [*model.parameters(), *model.buffers()]} == own
    assert (model[1].eps, model[1].momentum, model[1].training) == (1e-3, 0.3, True)
    model.train()
    assert not model[4].training
    assert is_synchronised(model)
    assert not is_synchronised(average)


def is_synchronised(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def test_the_processor_has_no_such_layers() -> None:
    averager = AllReduce(AverageConfig(batch_norm="sync"), World(0, 2, 0, 2))
    with raises("recipe.sync-batch-norm-needs-gpu"):
        averager.wrap(with_batch_norms())
    alone = AllReduce(AverageConfig(batch_norm="sync"), World())
    assert not is_synchronised(alone.wrap(with_batch_norms()))


def test_apart_a_layer_asks_nobody() -> None:
    model: Any = with_batch_norms().to("meta")
    convert_to_sync(model)
    layer = model[1]
    with without_sync([model]):
        assert dist.get_world_size(layer.process_group) == -1  # no group of two or more
    assert layer.process_group is None


@pytest.mark.parametrize(("size", "fits"), [(30, True), (34, False), (36, True)])
def test_all_ranks_make_as_many_forward_passes(size: int, fits: bool) -> None:
    """Of 8 and 7 samples two of 4 each, of 9 and 8 three and two."""
    config = load_recipe(
        "debug",
        {"batch.size": f"{size}", "batch.micro": "4", "average.batch_norm": "sync"},
    )
    course, world = build_run_course(config, 1000), World(0, 4, 0, 4)
    in_step = AllReduce(config.average, world).waits_in_forward
    if fits:
        check_batches(config, course, world, in_step)
    else:
        with raises("recipe.micro-batches-uneven", micro=4, value=34, num_ranks=4):
            check_batches(config, course, world, in_step)
