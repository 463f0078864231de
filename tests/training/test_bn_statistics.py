"""Batch norm statistics are a mean over all images that came by, on any number of ranks."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.data.batches import batch_of_images
from tests.errors import raises
from tests.spawn import spawn
from trainyard.data.batch import Batch
from trainyard.errors import Stopped
from trainyard.model.freeze import freeze
from trainyard.training.bn_statistics import batch_norms, estimate_statistics
from trainyard.world import World

Statistics = dict[str, NDArray[np.float64]]


def build() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("test_resnet", num_classes=4, drop_rate=0.5)
    return model.train()


def shares(size: int) -> list[list[Batch]]:
    """Two global batches of seven images, by rank; one image is bad, and has no say."""
    random = torch.Generator().manual_seed(1)
    found: list[list[Batch]] = [[] for _ in range(size)]
    for number in range(2):
        images = torch.randn(7, 3, 32, 32, generator=random) * (1 + number) + number
        weights = torch.ones(7)
        if number:
            images[2], weights[2] = math.nan, 0
        for rank in range(size):
            found[rank].append(batch_of_images(images[rank::size], weights=weights[rank::size]))
    return found


def statistics(model: nn.Module) -> Statistics:
    return {
        name: value.double().numpy()  # arrays, which outlive the process that sends them
        for name, value in model.state_dict().items()
        if "running" in name
    }


def estimate(world: World) -> tuple[int, Statistics, Statistics]:
    torch.set_num_threads(1)
    model, other = build(), build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count = estimate_statistics([model, other], shares(world.size)[world.rank], world=world)
    assert all(module.training for module in model.modules())  # as it was
    assert all(layer.track_running_stats for layer in batch_norms(model))
    for name, value in model.state_dict().items():  # statistics have changed, and nothing else
        assert torch.equal(before[name], value) != ("running" in name), name
    assert {layer.momentum for layer in batch_norms(model)} == {0.1}
    return count, statistics(model), statistics(other)


def plain_statistics(size: int) -> Statistics:
    """The mean over images of their batch's mean and variance, each share normalised by itself."""
    model = build().eval()
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)
    }
    sums: dict[str, Any] = {
        f"{name}.{key}": 0.0 for name in layers for key in ("running_mean", "running_var")
    }
    for name, layer in layers.items():

        def add(_: nn.Module, inputs: tuple[Tensor], name: str = name) -> None:
            values = inputs[0].double().transpose(0, 1).flatten(1)
            sums[f"{name}.running_mean"] += len(inputs[0]) * values.mean(dim=1).numpy()
            sums[f"{name}.running_var"] += len(inputs[0]) * values.var(dim=1).numpy()

        layer.train()
        layer.register_forward_pre_hook(add)
    images = 0.0
    with torch.no_grad():
        for batch in (batch for share in shares(size) for batch in share):
            if batch.weights.sum() > 1:
                model(batch.images_BCHW[batch.weights > 0])
                images += float(batch.weights.sum())
    return {name: np.asarray(value / images) for name, value in sums.items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_statistics_are_the_mean_over_all_images(size: int) -> None:
    reference = plain_statistics(size)
    results = spawn(estimate, size) if size > 1 else [estimate(World())]
    for count, found, other in results:
        assert count == (12 if size == 3 else 13)  # one is left alone
        assert found.keys() == reference.keys()
        for name, value in found.items():
            np.testing.assert_allclose(value, reference[name], rtol=1e-4, atol=1e-6)
            assert np.array_equal(value, results[0][1][name])  # on all ranks
        assert any(not np.array_equal(found[name], other[name]) for name in found)


def test_a_model_has_nothing_to_estimate_without_batch_norm() -> None:
    assert not batch_norms(timm.create_model("test_vit"))
    assert not batch_norms(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))


def test_images_of_which_none_can_be_read() -> None:
    batch = batch_of_images(torch.zeros(2, 3, 32, 32), weights=torch.zeros(2))
    with raises("data.batches-unreadable"):
        estimate_statistics([build()], [batch], world=World())


def test_statistics_stay_if_the_images_end_with_an_error() -> None:
    """A stop cuts an evaluation off, and the weights are saved then."""

    def batches() -> Iterator[Batch]:
        yield shares(1)[0][0]
        raise Stopped

    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Stopped):
        estimate_statistics([model], batches(), world=World())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_frozen_statistics_stay() -> None:
    """torch's update_bn resets them."""
    model = build()
    freeze(model, ["bn1.*"])
    before = model.get_buffer("bn1.running_mean").clone()
    estimate_statistics([model], shares(1)[0], world=World())
    assert torch.equal(model.get_buffer("bn1.running_mean"), before)
