"""Parameters that are not trained stay as they are, and so do their batch norms' statistics."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from rich.console import Console
from safetensors.torch import load_file
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from tests.errors import raises
from tests.runs import of_digits
from trainyard.config import load_recipe
from trainyard.model.ema import Ema
from trainyard.model.freeze import freeze, freeze_statistics
from trainyard.run.trainer import train
from trainyard.world import World

STEM = ("conv1.*", "bn1.*", "layer1.*")


def model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built: nn.Module = timm.create_model("test_resnet", num_classes=5, zero_init_last=False)
    return built


def frozen() -> nn.Module:
    built = model()
    freeze(built, STEM)
    return built


def step(module: nn.Module, seed: int) -> None:
    """One step of SGD on the parameters that are trained."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(4, 3, 32, 32, generator=generator)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)
    loss: Any = nn.functional.cross_entropy(module(images), torch.tensor([0, 1, 2, 3]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def is_stem(name: str) -> bool:
    return name.startswith(("conv1.", "bn1.", "layer1."))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_what_is_frozen_stays_and_the_rest_is_trained() -> None:
    module = frozen().train()
    before = snapshot(module)
    step(module, 0)
    moved = changed(before, module.state_dict())
    assert moved == {name for name in before if not is_stem(name)}


def test_names_stay_those_of_timm() -> None:
    assert frozen().state_dict().keys() == model().state_dict().keys()


def test_statistics_alone_are_kept() -> None:
    built = model()
    freeze_statistics(built.modules())
    built.train()
    before = snapshot(built)
    step(built, 0)
    parts = ("running_mean", "running_var", "num_batches_tracked")
    assert changed(before, snapshot(built)) == {n for n in before if not n.endswith(parts)}


@pytest.mark.parametrize("how", ["evaluated", "copied"])
def test_statistics_stay_after_a_model_is_evaluated_or_copied(how: str) -> None:
    module = frozen()
    if how == "copied":  # as for a moving average
        module = copy.deepcopy(module)
    module.eval()
    module.train()
    before = snapshot(module)
    step(module, 0)
    assert not {name for name in changed(before, module.state_dict()) if is_stem(name)}


def test_a_copy_does_not_reach_into_the_original() -> None:
    original = frozen()
    copied = copy.deepcopy(original)
    norm = original.get_submodule("bn1")
    norm.training = True
    copied.train()
    assert norm.training
    assert not copied.get_submodule("bn1").training


def test_a_batch_norm_that_is_trained_in_part_keeps_counting() -> None:
    module = model()
    freeze(module, ["bn1.bias"])
    before = snapshot(module)
    step(module.train(), 0)
    moved = changed(before, module.state_dict())
    assert {"bn1.weight", "bn1.running_mean"} <= moved
    assert "bn1.bias" not in moved


def test_patterns_that_cannot_be_right() -> None:
    for pattern, near in (
        ("layer1", "layer1.*"),
        ("layr1.*", "layer1.*"),
        ("qqq", "conv1.0.weight"),
    ):
        with raises("recipe.pattern-unmatched", key="model.freeze", pattern=pattern) as caught:
            freeze(model(), [pattern])
        assert f"'{near}'" in str(caught.value.fields["hint"])
    with raises("model.all-frozen"):
        freeze(model(), ["*"])


def test_no_patterns_freeze_nothing() -> None:
    module = model()
    freeze(module, ())
    assert all(p.requires_grad for p in module.parameters())


def test_a_recipe_freezes_through_a_whole_run(digits: Path, tmp_path: Path) -> None:
    overrides = of_digits(digits) | {
        "data.threads": "1",
        "model.name": "test_resnet",
        "model.freeze": '["conv1.*", "bn1.*", "layer1.*"]',
        "optim.clip_norm": "1",
        "run.length": "4 steps",
        "run.eval_every": "2 steps",
    }
    config = load_recipe("debug", overrides)
    train(config, tmp_path / "run", world=World(), console=Console(quiet=True))
    torch.manual_seed(config.run.seed)
    before = timm.create_model("test_resnet", num_classes=10).state_dict()
    after = load_file(tmp_path / "run" / "checkpoints" / "latest" / "model.safetensors")
    moved = changed(before, after)
    assert moved == {name for name in before if not is_stem(name)}


# --- the moving average is timm's, and the formula's, and survives a restart ---


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
