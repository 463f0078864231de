"""Every optimizer for 50 steps beside torch's, timm's, schedulefree's, or Colossal-AI's rule."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn, optim

from tests.errors import raises
from tests.tiers import tiered
from tests.training.test_compile import compiles
from trainyard.config import check
from trainyard.optim.config import NAMES, OptimConfig, optimizer_names
from trainyard.optim.groups import set_group_rates
from trainyard.optim.optimizers import build_optimizer
from trainyard.training.checkpoint import optimizer_state, put_optimizer

STEPS = 50
DECAY = 0.05
ALL = optimizer_names()

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
        return updating(optimizer)

    return reference


def updating(optimizer: Any) -> Update:
    def update(lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

    return update


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
            config_of("lamb"),
            lambda groups: timm.optim.Lamb(groups, max_grad_norm=None),
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
            config_of("lion", lr=1e-3),
            lambda groups: timm.optim.Lion(groups),
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
        return updating(timm.optim.Muon(groups, nesterov=nesterov))

    follow(config_of("muon", nesterov=nesterov), reference)


@pytest.mark.parametrize("r", [0.0, 0.75])
@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw"])
def test_schedule_free_is_the_authors(name: str, r: float) -> None:
    schedulefree: Any = pytest.importorskip("schedulefree")
    if name == "schedule_free_sgd":
        plain = library(lambda groups: schedulefree.SGDScheduleFree(groups, momentum=0.95, r=r))
    else:
        betas = (0.95, 0.99)
        plain = library(lambda groups: schedulefree.AdamWScheduleFree(groups, betas=betas, r=r))
    follow(config_of(name, betas=(0.95, 0.99), schedule_free_r=r), plain)


@pytest.mark.parametrize("lr", [5.0, 0.1, 1e-5])
@pytest.mark.parametrize("clip", [False, True])
def test_lars_written_out(lr: float, clip: bool) -> None:
    """`trust_clip` takes the smaller of ratio and rate: it changes ratios far below 1 too."""
    model = nn.Linear(20, 20, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.randn(20, 20)
    config = config_of("lars", lr=lr, momentum=0.0, trust_clip=clip)
    build_optimizer(model, config).step()
    decayed = DECAY * before
    ratio = 1e-3 * before.norm() / (model.weight.grad.norm() + decayed.norm())
    rate = min(float(ratio), lr) if clip else float(ratio) * lr
    torch.testing.assert_close(before - model.weight, rate * (model.weight.grad + decayed))


@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_colossal_ai_s_lamb_written_out(decay: float) -> None:
    """No bias correction, a trust ratio without bounds, decay and ratio on vectors too."""

    def reference(model: nn.Module) -> Update:
        moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in model.parameters()]

        def update(lr: float) -> None:
            for weight, (first, second) in zip(model.parameters(), moments, strict=True):
                assert weight.grad is not None
                first += 0.1 * (weight.grad - first)
                second += 0.01 * (weight.grad**2 - second)
                step = first / (second.sqrt() + 1e-6) + decay * weight.data
                norms = weight.data.norm(), step.norm()
                weight.data -= lr * (norms[0] / norms[1] if all(norms) else 1.0) * step

        return update

    keys = {"betas": (0.9, 0.99), "eps": 1e-6, "bias_correction": False, "trust_clip": False}
    follow(config_of("lamb", decay="all", weight_decay=decay, **keys), reference)


# --- of our own ---


LRS = {"sgd": 0.1, "lars": 1.0, "lamb": 0.02, "schedule_free_sgd": 0.5}


class Training:
    """A model that is laid out channels last, and its optimizer."""

    def __init__(self, name: str) -> None:
        if name.startswith("schedule_free"):
            pytest.importorskip("schedulefree")
        torch.manual_seed(0)
        self.model = Small().to(memory_format=torch.channels_last)
        self.optimizer = build_optimizer(self.model, config_of(name, lr=LRS.get(name, 0.01)))

    def train(self, steps: int) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        images_BCHW = torch.randn(16, 2, 4, 4, generator=generator)
        labels_B = torch.randint(3, (16,), generator=generator)
        losses = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self.model(images_BCHW), labels_B)
            losses.append(float(loss.detach()))
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
        return losses


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns(name: str) -> None:
    """Torch's can skip in their kernels."""
    training = Training(name)
    can_skip = getattr(training.optimizer, "_step_supports_amp_scaling", False)
    assert can_skip == (name in ("sgd", "adam", "adamw"))
    losses = training.train(30)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", tiered(ALL, night=set(ALL) - {*NAMES, "adopt", "lamb"}))
def test_every_optimizer_of_timm_takes_steps_and_resumes_bit_for_bit(name: str) -> None:
    """Wherever it is cut: some act in every second step alone."""
    whole = Training(name)
    begin = whole.train(1)[0]
    saved = []
    for _ in range(3):
        saved.append(
            copy.deepcopy((whole.model.state_dict(), optimizer_state(whole.optimizer, whole.model)))
        )
        whole.train(1)
    assert whole.train(8)[-1] < begin
    for steps, (weights, state) in zip((11, 10, 9), saved, strict=True):
        resumed = Training(name)
        resumed.model.load_state_dict(weights)
        put_optimizer(resumed.optimizer, resumed.model, state, Path("checkpoint"))
        resumed.train(steps)
        for key, tensor in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[key], tensor), key


@pytest.mark.parametrize(
    "name",
    [
        "xyz",
        "adahessian",  # needs second derivatives
        "kron",  # draws random numbers that no checkpoint has
        "bnbadam8bit",
        "lookahead_adamw",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with raises("recipe.invalid-value", key="optim.name", value=f'"{name}"'):
        check({"optim": {"name": name}})


def test_the_name_that_was_meant_is_named() -> None:
    with raises("recipe.invalid-value") as caught:
        check({"optim": {"name": "adamv"}})
    assert "'adam'" in str(caught.value)


def test_keys_that_are_not_set_have_the_defaults_of_the_library() -> None:
    """--optim.name lion used to train with a second beta of 0.999, and lamb with an eps of 1e-8."""
    defaults = {name: build_optimizer(Small(), OptimConfig(name=name)).defaults for name in NAMES}
    assert defaults["lion"]["betas"] == (0.9, 0.99)
    assert defaults["lamb"]["eps"] == 1e-6
    assert (defaults["muon"]["momentum"], defaults["muon"]["betas"]) == (0.95, (0.9, 0.95))
    assert (defaults["sgd"]["momentum"], defaults["sgd"]["nesterov"]) == (0.9, False)
    assert defaults["lars"]["momentum"] == 0.9


@compiles
@pytest.mark.night
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_update_is_the_same_and_is_compiled_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pool of compilers takes longer to start than one takes for all of this.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
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
    with raises("recipe.needs-package", value="schedule_free_sgd"):
        build_optimizer(Small(), OptimConfig(name="schedule_free_sgd"))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"momentum": 0.0, "nesterov": True}, "nesterov"),
        ({"clip_norm": 1.0, "clip_agc": 0.01}, "clip_agc"),
        ({"name": "schedule_free_sgd", "betas": [0.0, 0.9]}, "betas"),
        ({"name": "adan", "betas": [0.9, 0.99]}, "betas"),
        ({"name": "accum_adam", "compile": True}, "compile"),
        ({"lr_scale": ["head.*"]}, "lr_scale"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], key: str) -> None:
    with raises("recipe.invalid-value", key=f"optim.{key}"):
        check({"optim": keys})


def test_an_optimizer_that_replaces_a_schedule_takes_none() -> None:
    with raises("recipe.keys-conflict", other="schedule.name = 'cosine'"):
        check({"optim": {"name": "schedule_free_sgd"}})
