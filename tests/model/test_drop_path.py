"""Stochastic depth whose rate changes: every block keeps its share."""

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from tests.errors import raises
from trainyard.config import check
from trainyard.course import build_course
from trainyard.model.drop_path import drop_path_setter
from trainyard.run.build import build_run_schedule

MODELS = ["test_vit", "test_resnet", "test_convnext", "resnet18", "vit_tiny_patch16_224"]


def built(name: str, rate: float) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=10, drop_path_rate=rate)
    return model


def rates(model: nn.Module) -> list[float]:
    """Of its blocks, but for those that never drop out."""
    found = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    return [rate for rate in found if rate]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6])
def test_as_if_built_with_the_rate(name: str, rate: float) -> None:
    model = built(name, 0.2)
    drop_path_setter(model, 0.2)(rate)
    assert rates(model) == pytest.approx(rates(built(name, rate)), rel=1e-6)  # timm's are float32
    assert rates(model)


def test_shares_outlive_a_rate_of_zero() -> None:
    model = built("test_vit", 0.2)
    before = rates(model)
    set_rate = drop_path_setter(model, 0.2)
    set_rate(0.0)
    assert rates(model) == []
    set_rate(0.4)
    set_rate(0.2)
    assert rates(model) == before


def test_a_forward_pass_drops_out_as_one_that_was_built_so() -> None:
    model, other = built("test_vit", 0.2), built("test_vit", 0.5)
    other.load_state_dict(model.state_dict())
    drop_path_setter(model, 0.2)(0.5)
    images_BCHW = torch.randn(8, 3, 160, 160)
    outputs = []
    for each in (model, other):
        torch.manual_seed(1)
        outputs.append(each.train()(images_BCHW))
    torch.testing.assert_close(*outputs)


def test_nothing_is_touched_while_the_rate_stays() -> None:
    model = built("test_vit", 0.2)
    set_rate = drop_path_setter(model, 0.2)
    set_rate(0.1)
    block = next(module for module in model.modules() if isinstance(module, DropPath))
    block.drop_prob = 0.7
    set_rate(0.1)
    assert block.drop_prob == 0.7


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_model_without_it_is_refused(rate: float) -> None:
    with raises("model.no-drop-path"):
        drop_path_setter(built("test_vit", 0.0), rate)


# --- as a recipe asks for it ---


def test_a_compiled_model_is_refused() -> None:
    keys: dict[str, dict[str, object]] = {
        "model": {"drop_path": 0.2},
        "schedule": {"drop_path_start": 0.1},
    }
    course = build_course("3 epochs", epoch_samples=100, batch=50, image_size=32)
    drops = [build_run_schedule(check(keys), course)(step).drop_path for step in range(6)]
    assert drops == pytest.approx([0.1, 0.1, 0.15, 0.15, 0.2, 0.2])
    compiled = keys | {"model": {"drop_path": 0.2, "compile": "default"}}
    with raises("recipe.drop-path-start-compiled"):
        build_run_schedule(check(compiled), course)
