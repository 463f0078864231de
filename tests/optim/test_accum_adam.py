"""AccumAdam and AccumAdamW, beside torch's Adam and beside their formula in plain Python."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from trainyard.optim.accum_adam import AccumAdam

STEPS = 50
SETTINGS: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,)]
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in shapes
    ]


def grads_at(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters_of()]


def lr_at(step: int) -> float:
    return 0.01 * (1 + step % 7)


def train(optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
            for parameter, grad in zip(group["params"], grads_at(step), strict=True):
                parameter.grad = grad
        optimizer.step()


def assert_close(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("decoupled", [False, True])
def test_of_one_step_it_is_adam(decoupled: bool) -> None:
    ours, theirs = parameters_of(), parameters_of()
    train(AccumAdam(ours, 0.01, accum_iter=1, decoupled=decoupled, **SETTINGS), range(STEPS))
    kind = optim.AdamW if decoupled else optim.Adam
    train(kind(theirs, 0.01, **SETTINGS), range(STEPS))
    assert_close(ours, theirs)


@pytest.mark.parametrize("accum_iter", [3, 4])
@pytest.mark.parametrize("decoupled", [False, True])
def test_written_out_in_plain_python(accum_iter: int, decoupled: bool) -> None:
    ours = parameters_of()
    optimizer = AccumAdam(ours, 0.01, accum_iter=accum_iter, decoupled=decoupled, **SETTINGS)
    train(optimizer, range(STEPS))
    found = [float(value) for parameter in ours for value in parameter.detach().flatten()]
    starts = [float(value) for p in parameters_of() for value in p.detach().flatten()]
    grads = [[float(v) for grad in grads_at(step) for v in grad.flatten()] for step in range(STEPS)]
    expected = [
        one_weight(start, [at[number] for at in grads], accum_iter, decoupled)
        for number, start in enumerate(starts)
    ]
    assert found == pytest.approx(expected, rel=1e-11)
    assert found != pytest.approx(starts, rel=0.1)


def one_weight(weight: float, grads: list[float], accum_iter: int, decoupled: bool) -> float:
    (beta1, beta2), eps, decay = SETTINGS["betas"], SETTINGS["eps"], SETTINGS["weight_decay"]
    first = second = 0.0
    recent: list[float] = []
    for step, grad in enumerate(grads, start=1):
        lr = lr_at(step - 1)
        if decoupled:
            weight *= 1 - lr * decay
        else:
            grad += decay * weight
        recent.append(grad)
        updates = math.ceil(step / accum_iter)
        ahead = beta1 * first + (1 - beta1) * grad
        root = math.sqrt((beta2 * second + (1 - beta2) * grad**2) / (1 - beta2**updates))
        weight -= lr * ahead / (1 - beta1**updates) / (root + eps)
        if step % accum_iter == 0:
            mean = sum(recent) / accum_iter
            first = beta1 * first + (1 - beta1) * mean
            second = beta2 * second + (1 - beta2) * mean**2
            recent.clear()
    return weight


@pytest.mark.parametrize("decoupled", [False, True])
def test_gradients_are_left_as_they_are(decoupled: bool) -> None:
    parameters = parameters_of()
    train(AccumAdam(parameters, 0.01, decoupled=decoupled, **SETTINGS), range(1))
    for parameter, grad in zip(parameters, grads_at(0), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad)


def test_saved_in_the_middle_of_an_accumulation() -> None:
    whole, first, second = (parameters_of() for _ in range(3))
    train(AccumAdam(whole, 0.01, accum_iter=4, **SETTINGS), range(11))
    before = AccumAdam(first, 0.01, accum_iter=4, **SETTINGS)
    train(before, range(6))
    after = AccumAdam(second, 0.01, accum_iter=4, **SETTINGS)
    after.load_state_dict(before.state_dict())
    for parameter, other in zip(second, first, strict=True):
        parameter.data.copy_(other.data)
    train(after, range(6, 11))
    assert all(torch.equal(mine, other) for mine, other in zip(second, whole, strict=True))


def test_a_parameter_without_gradient_waits() -> None:
    """Each counts the steps that it takes part in."""
    late, always = parameters_of()
    optimizer = AccumAdam([late, always], 0.01, accum_iter=2, weight_decay=0.0)
    before = late.detach().clone()
    always.grad = torch.ones_like(always)
    optimizer.step()
    assert torch.equal(late, before)
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in (late, always)] == [1, 2]
    # The first step of Adam is of the learning rate's length.
    torch.testing.assert_close(late.detach(), before - 0.01, rtol=1e-6, atol=1e-6)
