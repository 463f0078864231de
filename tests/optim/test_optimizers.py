"""Parameter groups, and optimizers against plain torch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import nn, optim

from trainyard.optim.optimizers import OptimConfig, build_optimizer, parameter_groups


def names_by_decay(model: nn.Module, decay: float = 0.05) -> dict[float, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, decay)
    found = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert sum(len(group["params"]) for group in groups) == sum(map(len, found.values()))
    return found


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"])
def test_every_parameter_is_in_one_group(name: str) -> None:
    model = timm.create_model(name, num_classes=10)
    found = names_by_decay(model)
    assert found[0.05].isdisjoint(found[0.0])
    assert found[0.05] | found[0.0] == {name for name, _ in model.named_parameters()}


def test_norms_biases_and_vectors_do_not_decay() -> None:
    found = names_by_decay(timm.create_model("test_resnet", num_classes=10))
    assert {"fc.weight", "layer1.0.conv1.weight"} <= found[0.05]
    assert {"fc.bias", "layer1.0.bn1.weight", "layer1.0.bn1.bias"} <= found[0.0]
    assert not [name for name in found[0.05] if "bn" in name or name.endswith("bias")]


def test_what_the_model_exempts_does_not_decay() -> None:
    model: Any = timm.create_model("test_vit", num_classes=10)
    exempt = {name for name in model.no_weight_decay() if name in dict(model.named_parameters())}
    assert {"pos_embed", "cls_token"} <= exempt  # matrices by their shape
    assert exempt <= names_by_decay(model)[0.0]


def test_frozen_parameters_are_in_no_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert names_by_decay(model) == {0.05: {"1.weight"}, 0.0: {"1.bias"}}


def test_an_empty_group_is_left_out() -> None:
    assert [g["weight_decay"] for g in parameter_groups(nn.Linear(3, 3, bias=False), 0.1)] == [0.1]


Parameters = Iterator[nn.Parameter]


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (
            OptimConfig(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0),
            lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
        ),
        (
            OptimConfig(name="adamw", lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
            lambda parameters: optim.AdamW(
                parameters, 0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0
            ),
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_same_as_plain_torch(
    config: OptimConfig, plain: Callable[[Parameters], optim.Optimizer]
) -> None:
    ours, theirs = twins()
    follow(ours, build_optimizer(ours, config), theirs, plain(theirs.parameters()))


def test_sgd_written_out() -> None:
    """Weight decay on the matrices alone, momentum 0.9, as in the ResNet paper."""
    ours, theirs = twins()
    velocities = [torch.zeros_like(p) for p in theirs.parameters()]

    def update() -> None:
        for parameter, velocity in zip(theirs.parameters(), velocities, strict=True):
            decay = 0.01 if parameter.ndim > 1 else 0.0
            assert parameter.grad is not None
            velocity.mul_(0.9).add_(parameter.grad + decay * parameter.data)
            parameter.data -= 0.1 * velocity

    config = OptimConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01)
    follow(ours, build_optimizer(ours, config), theirs, update)


def test_adamw_written_out() -> None:
    """Decoupled weight decay, on the matrices alone."""
    ours, theirs = twins()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in theirs.parameters()]
    steps = iter(range(1, 1000))

    def update() -> None:
        step = next(steps)
        for parameter, (first, second) in zip(theirs.parameters(), moments, strict=True):
            assert parameter.grad is not None
            first.mul_(0.9).add_(0.1 * parameter.grad)
            second.mul_(0.99).add_(0.01 * parameter.grad**2)
            root = (second / (1 - 0.99**step)).sqrt() + 1e-8
            if parameter.ndim > 1:
                parameter.data *= 1 - 0.02 * 0.1
            parameter.data -= 0.02 * first / (1 - 0.9**step) / root

    config = OptimConfig(name="adamw", lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    follow(ours, build_optimizer(ours, config), theirs, update)


def twins() -> tuple[nn.Module, nn.Module]:
    """Two equal small models."""
    torch.manual_seed(0)
    first, second = (
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        for _ in range(2)
    )
    second.load_state_dict(first.state_dict())
    return first, second


def follow(
    ours: nn.Module,
    optimizer: optim.Optimizer,
    theirs: nn.Module,
    reference: optim.Optimizer | Callable[[], None],
) -> None:
    """20 steps of both on the same samples; the weights stay equal."""
    generator = torch.Generator().manual_seed(1)
    update = reference.step if isinstance(reference, optim.Optimizer) else reference
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    for _ in range(20):
        inputs = torch.randn(16, 6, generator=generator)
        labels = torch.randint(3, (16,), generator=generator)
        for model in (ours, theirs):
            model.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        update()
    for mine, other, start in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert not torch.equal(mine, start)
