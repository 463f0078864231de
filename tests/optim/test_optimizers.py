"""Every optimizer for 50 steps beside torch's, timm's, schedulefree's, or its formula."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn, optim

from trainyard.config import check
from trainyard.errors import RecipeError
from trainyard.optim.config import OptimConfig
from trainyard.optim.groups import set_group_rates
from trainyard.optim.optimizers import build_optimizer

STEPS = 50
DECAY = 0.05
NAMES = list(OptimConfig.model_fields["name"].annotation.__args__)  # type: ignore[union-attr]

Groups = list[dict[str, Any]]
Update = Callable[[float], object]
"""One step of a reference with a learning rate."""


class Small(nn.Module):
    """A kernel, matrices, vectors and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BD = self.norm(self.conv(images_BCHW).flatten(1))
        scores_BK: Tensor = self.head(nn.functional.gelu(self.hidden(features_BD)))
        return scores_BK

    def get_classifier(self) -> nn.Module:
        return self.head


def twins() -> tuple[nn.Module, nn.Module]:
    """Two equal small models, in double precision: what differs then is the method."""
    torch.manual_seed(0)
    model = Small().double()
    return model, copy.deepcopy(model)


def plain_groups(model: nn.Module) -> Groups:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]


def lr_at(step: int, lr: float) -> float:
    """Up and down again."""
    return lr * min((step + 1) / 10, 1 - step / (2 * STEPS))


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    images_BCHW = torch.randn(16, 2, 4, 4, generator=generator, dtype=torch.float64)
    labels_B = torch.randint(3, (16,), generator=generator)
    model.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(model(images_BCHW), labels_B))


def follow(config: OptimConfig, reference: Callable[[nn.Module], Update]) -> None:
    """50 steps of both on the same samples; the weights stay equal."""
    ours, theirs = twins()
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    optimizer, update = build_optimizer(ours, config), reference(theirs)
    for step in range(STEPS):
        backward(ours, step)
        backward(theirs, step)
        lr = lr_at(step, config.lr)
        set_group_rates(optimizer, lr=lr, weight_decay=config.weight_decay)
        optimizer.step()
        update(lr)
    for mine, other, start in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
        assert not torch.equal(mine, start)


def library(build: Callable[[Groups], Any]) -> Callable[[nn.Module], Update]:
    """A reference that is another library's optimizer, with its groups and nothing of ours."""

    def reference(model: nn.Module) -> Update:
        optimizer = build(plain_groups(model))
        if hasattr(optimizer, "train"):
            optimizer.train()

        def update(lr: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

        return update

    return reference


def config_of(name: str, **keys: Any) -> OptimConfig:
    values = {"name": name, "lr": 0.01, "weight_decay": DECAY, **keys}
    return OptimConfig.model_validate(values)


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (config_of("sgd", lr=0.1), lambda groups: optim.SGD(groups, 0.1, momentum=0.9)),
        (
            config_of("sgd", lr=0.1, momentum=0.8, nesterov=True),
            lambda groups: optim.SGD(groups, 0.1, momentum=0.8, nesterov=True),
        ),
        (
            config_of("adam", betas=(0.8, 0.95), eps=1e-6),
            lambda groups: optim.Adam(groups, betas=(0.8, 0.95), eps=1e-6),
        ),
        (
            config_of("adamw", betas=(0.8, 0.95), eps=1e-6),
            lambda groups: optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6),
        ),
        (
            config_of("lamb", eps=1e-6),
            lambda groups: timm.optim.Lamb(groups, eps=1e-6, max_grad_norm=None),
        ),
        (
            config_of("lamb", eps=1e-6, trust_clip=True, bias_correction=False),
            lambda groups: timm.optim.Lamb(
                groups, eps=1e-6, max_grad_norm=None, trust_clip=True, bias_correction=False
            ),
        ),
        (
            config_of("lars", lr=1.0, trust_coefficient=0.01, trust_clip=True, nesterov=True),
            lambda groups: timm.optim.Lars(
                groups, momentum=0.9, trust_coeff=0.01, trust_clip=True, nesterov=True
            ),
        ),
        (
            config_of("lion", lr=1e-3, betas=(0.9, 0.99)),
            lambda groups: timm.optim.Lion(groups, betas=(0.9, 0.99)),
        ),
    ],
    ids=["sgd", "nesterov", "adam", "adamw", "lamb", "lamb clipped", "lars", "lion"],
)
def test_same_as_the_library(config: OptimConfig, plain: Callable[[Groups], Any]) -> None:
    follow(config, library(plain))


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_timm_s_with_adamw_for_vectors_and_classifier(nesterov: bool) -> None:
    def reference(model: nn.Module) -> Update:
        assert isinstance(model, Small)
        by_muon = [model.conv.weight, model.hidden.weight]
        head = [model.head.weight]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [
            {"params": by_muon, "weight_decay": DECAY},
            {"params": head, "weight_decay": DECAY, "use_fallback": True},
            {"params": vectors, "weight_decay": 0.0, "use_fallback": True},
        ]
        settings: dict[str, Any] = {
            "momentum": 0.95,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "nesterov": nesterov,
        }
        optimizer: Any = timm.optim.Muon(groups, **settings)

        def update(lr: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

        return update

    follow(config_of("muon", momentum=0.95, betas=(0.9, 0.95), nesterov=nesterov), reference)


@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw"])
def test_schedule_free_is_the_authors(name: str) -> None:
    schedulefree: Any = pytest.importorskip("schedulefree")
    if name == "schedule_free_sgd":
        plain = library(lambda groups: schedulefree.SGDScheduleFree(groups, momentum=0.95))
    else:
        plain = library(lambda groups: schedulefree.AdamWScheduleFree(groups, betas=(0.95, 0.99)))
    follow(config_of(name, betas=(0.95, 0.99)), plain)


# --- beside the formulas of the papers ---


def formula(step: Callable[[Tensor, Tensor, dict[str, Any], float], None]) -> Any:
    """A reference that updates one weight after the other: weight, gradient, its state, lr."""

    def reference(model: nn.Module) -> Update:
        states: list[dict[str, Any]] = [{"t": 0} for _ in model.parameters()]

        def update(lr: float) -> None:
            for parameter, state in zip(model.parameters(), states, strict=True):
                assert parameter.grad is not None
                state["t"] += 1
                step(parameter.data, parameter.grad, state, lr)

        return update

    return reference


def decay_of(weight: Tensor) -> float:
    return DECAY if weight.ndim > 1 else 0.0


def test_sgd_written_out() -> None:
    """He et al. 2016, with torch's momentum; decay on the matrices alone."""

    def step(weight: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        state["v"] = 0.9 * state.get("v", 0) + grad + decay_of(weight) * weight
        weight -= lr * state["v"]

    follow(config_of("sgd", lr=0.1), formula(step))


def moments(grad: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * grad
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * grad**2
    return state["m"], state["v"]


def test_adam_written_out() -> None:
    """Kingma and Ba 2015; decay is part of the gradient."""

    def step(weight: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first, second = moments(grad + decay_of(weight) * weight, state)
        root = (second / (1 - 0.99 ** state["t"])).sqrt() + 1e-8
        weight -= lr * first / (1 - 0.9 ** state["t"]) / root

    follow(config_of("adam", betas=(0.9, 0.99)), formula(step))


def test_adamw_written_out() -> None:
    """Loshchilov and Hutter 2019; decay is apart from the gradient."""

    def step(weight: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first, second = moments(grad, state)
        weight *= 1 - lr * decay_of(weight)
        root = (second / (1 - 0.99 ** state["t"])).sqrt() + 1e-8
        weight -= lr * first / (1 - 0.9 ** state["t"]) / root

    follow(config_of("adamw", betas=(0.9, 0.99)), formula(step))


@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_colossal_ai_s_lamb_written_out(decay: float) -> None:
    """No bias correction, a trust ratio without bounds, decay and ratio on vectors too."""

    def step(weight: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first, second = moments(grad, state)
        update = first / (second.sqrt() + 1e-6) + decay * weight
        norms = weight.norm(), update.norm()
        ratio = norms[0] / norms[1] if all(norms) else 1.0
        weight -= lr * ratio * update

    keys = {"betas": (0.9, 0.99), "eps": 1e-6, "bias_correction": False, "trust_clip": False}
    follow(config_of("lamb", decay="all", weight_decay=decay, **keys), formula(step))


def test_lion_written_out() -> None:
    """Chen et al. 2023, algorithm 2."""

    def step(weight: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = state.get("m", torch.zeros_like(weight))
        update = (0.9 * momentum + 0.1 * grad).sign()
        weight -= lr * (update + decay_of(weight) * weight)
        state["m"] = 0.99 * momentum + 0.01 * grad

    follow(config_of("lion", lr=1e-3, betas=(0.9, 0.99)), formula(step))


def test_lars_written_out() -> None:
    """You et al. 2017, equation 6; vectors, which do not decay, have no local rate."""

    def step(weight: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        update = grad
        if weight.ndim > 1:
            ratio = 0.01 * weight.norm() / (grad.norm() + DECAY * weight.norm() + 1e-8)
            update = ratio * (grad + DECAY * weight)
        state["v"] = 0.9 * state.get("v", 0) + update
        weight -= lr * state["v"]

    follow(config_of("lars", lr=0.5, trust_coefficient=0.01), formula(step))


def test_schedule_free_sgd_written_out() -> None:
    """Defazio et al. 2024, section 2: gradients at y, steps of z, whose average is x."""
    pytest.importorskip("schedulefree")

    def step(weight: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        z, x = state.setdefault("z", weight.clone()), state.setdefault("x", weight.clone())
        state["peak"] = max(state.get("peak", 0), lr)
        state["sum"] = state.get("sum", 0) + state["peak"] ** 2
        z -= lr * (grad + decay_of(weight) * weight)
        x += state["peak"] ** 2 / state["sum"] * (z - x)
        weight.copy_(0.1 * z + 0.9 * x)

    follow(config_of("schedule_free_sgd", lr=0.1), formula(step))


# --- of our own ---


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns(name: str) -> None:
    """And takes a model that is laid out channels last."""
    if name.startswith("schedule_free"):
        pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    model = Small().to(memory_format=torch.channels_last)
    lr = {"sgd": 0.1, "lars": 2.0, "lamb": 0.02, "schedule_free_sgd": 0.5}.get(name, 0.01)
    optimizer = build_optimizer(model, config_of(name, lr=lr))
    images_BCHW, labels_B = torch.randn(16, 2, 4, 4), torch.randint(3, (16,))
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(images_BCHW), labels_B)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_fused_update_that_is_skipped_changes_nothing(name: str, at: int) -> None:
    ours, theirs = twins()
    optimizer, reference = (build_optimizer(m, config_of(name)) for m in (ours, theirs))
    assert optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
    for step in range(6):
        backward(ours, step)
        backward(theirs, step)
        reference.step()
        if step == at:
            skip_once(optimizer)
        optimizer.step()
    same = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in same)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, reference.state[other][key]), key


def skip_once(optimizer: Any) -> None:
    """An update with gradients that are not finite, between two good ones."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    optimizer.found_inf = torch.zeros(())
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_update_is_the_same_and_is_compiled_once(name: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, theirs = twins()
    compiled, plain = (
        build_optimizer(model, config_of(name, compile=compile))
        for model, compile in ((ours, True), (theirs, False))
    )
    for step in range(6):
        for model, optimizer in ((ours, compiled), (theirs, plain)):
            backward(model, step)
            set_group_rates(optimizer, lr=lr_at(step, 0.01), weight_decay=DECAY)
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Rates and bias corrections are tensors then, and of single precision.
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-6)
    # At most twice: before there is a state, and with one; not anew with each learning rate.
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    state = compiled.state_dict()
    plain.load_state_dict({**state, "param_groups": plain.state_dict()["param_groups"]})


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(RecipeError, match=r"pip install 'trainyard\[schedulefree\]'"):
        build_optimizer(Small(), OptimConfig(name="schedule_free_sgd"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"momentum": 0.0, "nesterov": True}, "optim.nesterov = true: needs optim.momentum above"),
        ({"clip_norm": 1.0, "clip_agc": 0.01}, "optim.clip_agc = 0.01: there is optim.clip_norm"),
        ({"name": "schedule_free_sgd", "betas": [0.0, 0.9]}, "the first must be above 0"),
        ({"name": "accum_adam", "compile": True}, "optim.compile = true: an update of accum_adam"),
        ({"lr_scale": ["head.*"]}, "write a pattern of parameter names and a factor"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check({"optim": keys})
