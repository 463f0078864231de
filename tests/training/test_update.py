"""From a gradient to new weights: scaled, judged, clipped, stepped; or skipped without a trace."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.optim import Lamb
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn, optim

from tests.steps import CPU, build_update
from trainyard.optim.optimizers import with_momenta
from trainyard.training.update import (
    Clip,
    DynamicLossScale,
    LossScale,
    clip_adaptively,
    clip_by_norm,
    no_clip,
)

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(nn.functional.gelu(self.first(inputs)))
        return logits


def loss_of(model: nn.Module, step: int, precision: torch.dtype | None = None) -> Tensor:
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
        logits = model(inputs)
    loss: Tensor = logits.float().square().mean()
    return loss


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def backward(model: nn.Module, step: int, seed: Tensor | float = 1.0) -> None:
    """A gradient of its own for each step."""
    torch.autograd.backward(loss_of(model, step), torch.as_tensor(seed))


Make = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd, fused": lambda p: with_momenta(
        optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, fused=True)
    ),
    "sgd, fused, no momentum": lambda p: optim.SGD(p, 0.1, fused=True),
    "adamw": lambda p: optim.AdamW(p, 0.01),
    "adamw, fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "adam, fused": lambda p: optim.Adam(p, 0.01, weight_decay=0.01, fused=True),
    "lamb": lambda p: Lamb(p, 0.01),
}


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Any]:
    """Everything that an update may change, copied."""
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- what is not finite is skipped ---


@pytest.mark.parametrize("bad_steps", [(0,), (0, 1), (3,), (0, 2, 3, 7)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_the_skipped_steps_had_not_been(
    name: str, bad_steps: tuple[int, ...]
) -> None:
    """One element of one gradient is not finite: weights, momenta, step counts stay as they are.

    Also from the first update on, which is the one that makes an optimizer's state.
    """
    model, plain = network(), network()
    optimizer, reference = (OPTIMIZERS[name](m.parameters()) for m in (model, plain))
    update = build_update(model, optimizer)
    skipped = []
    for step in range(9):
        backward(model, step)
        gradient = model.last.weight.grad
        assert isinstance(gradient, Tensor)
        if step in bad_steps:
            gradient[1, 2] = (NAN, INF, -INF)[step % 3]
        done = update(step)
        assert all(parameter.grad is None for parameter in model.parameters())
        if done.skipped:
            assert not done.grad_norm.isfinite()
            skipped.append(step)
        if step not in bad_steps:
            backward(plain, step)
            reference.step()
            reference.zero_grad()
    assert tuple(skipped) == bad_steps
    assert_same(state_of(model, optimizer), state_of(plain, reference))


def test_kernels_that_can_skip_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first update: nothing asks on the host whether the gradient is finite."""
    model = network()
    update = build_update(model, optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True))
    backward(model, 0)
    update(0)

    def forbidden(tensor: Tensor) -> bool:
        raise AssertionError("waits for the device")

    for name in ("__bool__", "__float__", "__int__", "item"):
        monkeypatch.setattr(Tensor, name, forbidden)
    for step, seed in ((1, 1.0), (2, NAN), (3, 1.0)):
        backward(model, step, torch.full((), seed))
        update(step)


def test_the_norm_is_of_the_whole_model_before_clipping() -> None:
    model = network()
    backward(model, 0)
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    update = build_update(model, optim.SGD(model.parameters(), 0.1), clip=clip_by_norm(1e-3))
    torch.testing.assert_close(update(0).grad_norm, whole.norm())


def test_frozen_parameters_take_no_part() -> None:
    model = network()
    model.first.requires_grad_(False)
    before = model.first.weight.clone()
    update = build_update(model, optim.SGD(model.last.parameters(), 0.1))
    backward(model, 0)
    norms = [p.grad.norm() for p in model.last.parameters() if p.grad is not None]
    torch.testing.assert_close(update(0).grad_norm, torch.stack(norms).norm())
    assert torch.equal(model.first.weight, before)


# --- clipping ---


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_clipping_by_norm_is_torch_s(precision: torch.dtype | None) -> None:
    """In fp16 of the gradient after unscaling, which is what is logged too."""
    model, plain = network(), network()
    optimizer, reference = (optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (model, plain))
    is_scaled = precision is torch.float16
    scale = DynamicLossScale(CPU, initial=1024.0) if is_scaled else LossScale(CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    update = build_update(model, optimizer, scale, clip=clip_by_norm(0.25))
    clipped = 0
    for step in range(12):
        torch.autograd.backward(loss_of(model, step, precision), update.loss_scale)
        done = update(step)
        torch.autograd.backward(scaler.scale(loss_of(plain, step, precision)))
        scaler.unscale_(reference)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
        scaler.step(reference)
        scaler.update()
        reference.zero_grad()
        assert_same(done.grad_norm, norm)
        clipped += bool(norm > 0.25)
    assert_same(state_of(model, optimizer), state_of(plain, reference))
    assert 0 < clipped < 12


def test_adaptive_clipping_is_timm_s_and_spares_the_classifier() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=7)  # kernels, matrices, vectors
    plain = copy.deepcopy(model)
    gradients = {name: 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    gradients["layer1.0.conv1.weight"] *= 1e-4  # of these units none is clipped
    for network in (model, plain):
        for name, parameter in network.named_parameters():
            parameter.grad = gradients[name].clone()
    classifier: Any = model.get_classifier()  # type: ignore[operator]
    clip = clip_adaptively(0.02, exempt=list(classifier.parameters()))
    clip(list(model.parameters()), torch.zeros(()))
    others = [p for name, p in plain.named_parameters() if not name.startswith("fc.")]
    adaptive_clip_grad(others, 0.02)  # type: ignore[no-untyped-call]
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad)
        is_untouched = name in ("layer1.0.conv1.weight", "fc.weight", "fc.bias")
        assert (one.grad is not None and torch.equal(one.grad, gradients[name])) == is_untouched


def test_adaptive_clipping_as_the_paper_writes_it() -> None:
    """Brock et al. 2021, equation 3, by hand for the rows of a matrix."""
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4]]))
    weight.grad = torch.tensor([[6.0, 8.0], [1.0, 0.0], [0.001, 0.0]])
    clip_adaptively(0.1, exempt=())([weight], torch.zeros(()))
    expected = torch.tensor([[0.3, 0.4], [1e-4, 0.0], [0.001, 0.0]])  # eps = 1e-3 for zero rows
    torch.testing.assert_close(weight.grad, expected)


# --- the scale of the loss, for fp16 ---


SERIES = [1.0, INF, 1.0, 1.0, 1.0, NAN, NAN, *[1.0] * 7, INF, *[1.0] * 5]


@pytest.mark.parametrize("name", ["sgd", "sgd, fused", "adamw", "adamw, fused"])
def test_the_loss_scale_is_that_of_torch_s_scaler(name: str) -> None:
    """Over finite and overflowing gradients: same scales, same skips, same weights."""
    model, plain = network(), network()
    optimizer, reference = (OPTIMIZERS[name](m.parameters()) for m in (model, plain))
    scale = DynamicLossScale(CPU, initial=256.0, interval=3)
    update = build_update(model, optimizer, scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scales = []
    for step, factor in enumerate(SERIES):
        backward(model, step, update.loss_scale * factor)
        done = update(step)
        backward(plain, step, scaler.scale(torch.ones(())) * factor)
        before = copy.deepcopy(plain.state_dict())
        scaler.step(reference)
        has_skipped = all(torch.equal(before[k], v) for k, v in plain.state_dict().items())
        scaler.update()
        reference.zero_grad()
        assert bool(done.skipped) == has_skipped == (factor != 1)
        assert float(update.loss_scale) == scaler.get_scale()
        scales.append(scaler.get_scale())
    assert set(scales) == {64, 128, 256}  # up and down
    if "fused" in name:  # the scaler unscales in the kernel
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    else:
        assert_same(state_of(model, optimizer), state_of(plain, reference))


def test_the_loss_scale_ends_growing_where_torch_s_does() -> None:
    largest = 2.0**127
    scale = DynamicLossScale(CPU, initial=largest / 2, interval=1)
    theirs, good = torch.tensor(largest / 2), torch.tensor(0, dtype=torch.int32)
    for finite in (True, True, True, False, True):
        scale.adjust(torch.tensor(finite))
        # All that torch.amp.GradScaler does in an update.
        torch._amp_update_scale_(theirs, good, torch.tensor(float(not finite)), 2.0, 0.5, 1)
        assert float(scale.value) == float(theirs)
    assert float(scale.value) == largest


def test_the_loss_scale_goes_on_from_its_state() -> None:
    one = DynamicLossScale(CPU, initial=64.0, interval=4)
    finite = [True, True, False, True, True, True, True, False, True, True]
    for good in finite[:6]:
        one.adjust(torch.tensor(good))
    other = DynamicLossScale(CPU, initial=1.0, interval=4)
    other.load_state_dict(one.state_dict())
    for good in [*finite[6:], *[True] * 5]:
        one.adjust(torch.tensor(good))
        other.adjust(torch.tensor(good))
        assert one.state_dict() == other.state_dict()
    assert one.state_dict() == {"value": 64.0, "good": 3.0}


def test_no_scale_leaves_gradients_alone() -> None:
    scale = LossScale(CPU)
    gradient = torch.tensor([1.0, 2.0])
    scale.unscale([gradient])
    scale.adjust(torch.tensor(False))
    assert gradient.tolist() == [1, 2]
    assert float(scale.value) == 1
    assert scale.state_dict() == {}


# --- part by part ---


FUSED = [name for name in OPTIMIZERS if "fused" in name]
CLIPS: dict[str, Callable[[Network], Clip]] = {
    "none": lambda model: no_clip,
    "norm": lambda model: clip_by_norm(0.05),
    "agc": lambda model: clip_adaptively(0.01, exempt=[*model.last.parameters()]),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", FUSED)
def test_part_by_part_is_the_same(name: str, clip: str) -> None:
    """Bit by bit, with one norm, one decision to skip and one state, of two groups."""
    models = network(), network()
    optimizers = [
        OPTIMIZERS[name]([{"params": [*part.parameters()]} for part in (m.first, m.last)])
        for m in models
    ]
    updates = [
        build_update(model, optimizer, clip=CLIPS[clip](model))
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    whole, divided = updates
    first, last = models[1].first, models[1].last
    parts: list[list[Any]] = [[last.bias], [last.weight, first.bias], [first.weight]]
    for step in range(6):
        for model in models:
            backward(model, step, INF if step == 2 else 1.0)
        expected = whole(step)
        found = divided(step, lambda step, divisible: iter(parts))
        assert torch.equal(found.grad_norm, expected.grad_norm) == (step != 2)
        assert found.skipped == (step == 2)
        assert_same(state_of(models[1], optimizers[1]), state_of(models[0], optimizers[0]))
        groups = zip(optimizers[0].param_groups, optimizers[1].param_groups, strict=True)
        assert all(len(one["params"]) == len(other["params"]) for one, other in groups)


def test_other_optimizers_update_all_at_once() -> None:
    """Theirs may count steps of a group, or look at all weights together."""
    model = network()
    for name, build in OPTIMIZERS.items():
        asked: list[bool] = []

        def ready(step: int, divisible: bool) -> list[list[nn.Parameter]]:
            asked.append(divisible)  # noqa: B023
            return [[*model.parameters()]]

        backward(model, 0)
        build_update(model, build(model.parameters()))(0, ready)
        assert asked == [name in FUSED]
