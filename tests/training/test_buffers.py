"""Batch-norm statistics after steps that were repeated or skipped."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.training.test_equivalence import Case, global_batch, make_step
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.training.buffers import Buffers
from trainyard.training.step import MicroBatch
from trainyard.world import World


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(6)
    first, second = nn.Conv2d(3, 4, 3, stride=4), nn.Conv2d(4, 6, 3, stride=4)
    return nn.Sequential(first, norms[0], second, norms[1], nn.Flatten(), nn.Linear(24, 10))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_buffers_come_back_as_they_were() -> None:
    model = normed()
    model(torch.randn(8, 3, 32, 32))
    buffers, before = Buffers(model), state(model)
    buffers.remember()
    model(torch.randn(8, 3, 32, 32))
    assert not torch.equal(model.get_buffer("1.running_mean"), before["1.running_mean"])
    buffers.restore()
    assert_state(model, before)


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_statistics_come_back_if_the_update_was_skipped(skipped: float) -> None:
    model = normed()
    buffers, before = Buffers(model), state(model)
    buffers.remember()
    model(torch.full((8, 3, 32, 32), torch.nan) if skipped else torch.randn(8, 3, 32, 32))
    after = state(model)
    buffers.restore_if(torch.tensor(skipped))
    counts = {name: value for name, value in after.items() if name.endswith("tracked")}
    assert_state(model, (before if skipped else after) | counts)


def test_a_model_without_buffers_has_nothing_to_remember() -> None:
    buffers = Buffers(nn.Linear(2, 2))
    buffers.remember()
    buffers.restore()
    buffers.restore_if(torch.tensor(1.0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_damaged_batch_leaves_no_trace(value: float) -> None:
    """Neither in the weights nor in the statistics that evaluation uses."""
    model: Any = normed()
    step = make_step(model, AllReduce(AverageConfig(), World()), World())
    batches = [global_batch(Case(batch=16), number) for number in range(3)]
    step(batches[0], 0, None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images = batches[1].images_BCHW.clone()
    images[5] = value
    stats = step(MicroBatch(images, *batches[1][1:]), 1, None)
    assert stats.skipped == 1
    for name, tensor in model.state_dict().items():
        assert name.endswith("tracked") or torch.equal(tensor, before[name]), name
    assert step(batches[2], 2, None).skipped == 0
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert model.eval()(batches[2].images_BCHW).isfinite().all()
