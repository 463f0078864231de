"""The moving average is timm's, and the formula's, and survives a restart."""

from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from trainyard.model.ema import Ema

STEPS = 50


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))


def fresh() -> nn.Module:
    model = normed()
    model(torch.zeros(2, 3, 8, 8))
    return model


def train_one(model: nn.Module, step: int) -> None:
    """Something that moves weights and batch-norm statistics."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    loss = model(images + step / 10).square().mean()
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.sub_(gradient, alpha=0.05)


def decay_of(updates: int, decay: float, warmup: bool) -> float:
    """Of the n-th update, counted from 1; the first one copies."""
    if updates == 1:
        return 0.0
    return min(decay, 1 - updates ** (-2 / 3)) if warmup else decay


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("cpu", [False, True])
def test_the_average_is_the_written_out_formula(warmup: bool, cpu: bool) -> None:
    model = fresh()
    decays = {"ema-0.9": 0.9, "ema-0.6": 0.6}
    ema = Ema(model, decays, warmup=warmup, cpu=cpu)
    first = {name: tensor.double() for name, tensor in model.state_dict().items()}
    expected = {kind: dict(first) for kind in decays}
    for step in range(STEPS):
        train_one(model, step)
        ema.update(step)
        for kind, of in decays.items():
            decay = decay_of(step + 1, of, warmup)
            for name, tensor in model.state_dict().items():
                weighted = decay * expected[kind][name] + (1 - decay) * tensor.double()
                is_counter = name == "1.num_batches_tracked"
                expected[kind][name] = tensor.double() if is_counter else weighted
    assert 0 < decay_of(3, 0.9, True) < 0.9  # it does warm up
    for kind, module in ema.modules.items():
        averaged = module.state_dict()
        for name, tensor in expected[kind].items():
            torch.testing.assert_close(averaged[name].double(), tensor, rtol=1e-5, atol=1e-6)
        assert not torch.equal(averaged["0.weight"], model.state_dict()["0.weight"])
        assert not module.training


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_that_of_timms_training(warmup: bool) -> None:
    """Whose loop counts updates from 1."""
    model = fresh()
    ours = Ema(model, {"ema": 0.95}, warmup=warmup, cpu=False)
    timms = ModelEmaV3(model, decay=0.95, use_warmup=warmup)
    for step in range(STEPS):
        train_one(model, step)
        ours.update(step)
        timms.update(model, step=step + 1)
    for name, tensor in timms.module.state_dict().items():
        assert torch.equal(ours.modules["ema"].state_dict()[name], tensor), name


def test_a_restart_in_the_warm_up_changes_nothing() -> None:
    def run(stop: int, start: int = 0, state: Any = None) -> tuple[nn.Module, Ema]:
        model = fresh()
        ema = Ema(model, {"ema": 0.999}, warmup=True, cpu=False)
        if state is not None:
            model.load_state_dict(state[0])
            ema.modules["ema"].load_state_dict(state[1])
        for step in range(start, stop):
            train_one(model, step)
            ema.update(step)
        return model, ema

    model, ema = run(20)
    saved = {k: v.clone() for k, v in model.state_dict().items()}, ema.modules["ema"].state_dict()
    again = run(STEPS, 20, saved)[1].modules["ema"].state_dict()
    for name, tensor in run(STEPS)[1].modules["ema"].state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_the_average_of_a_compiled_model_has_the_names_of_the_model() -> None:
    model = fresh()
    model.compile(backend="eager")
    ema = Ema(model, {"ema": 0.9}, warmup=False, cpu=False)
    ema.update(0)
    assert list(ema.modules["ema"].state_dict()) == list(fresh().state_dict())
