"""Parameters that are not trained stay as they are, and so do their batch norms' statistics."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.errors import raises
from tests.runs import of_digits
from trainyard.config import load_recipe
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
