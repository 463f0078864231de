"""Compiled steps against eager ones: the families of the recipes, and the doctor's check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.functional import linear

from trainyard.config import RunConfig, check
from trainyard.doctor.check import Options, Row, collect_context, run_check
from trainyard.doctor.compiled import LIMIT, compare, compiled_checks
from trainyard.run import build
from trainyard.world import World

CLASSES = 100
CPU = torch.device("cpu")
Change = Callable[[nn.Module], object]


def recipe(name: str, precision: str = "fp32", **keys: Any) -> RunConfig:
    """A recipe of a model of that name, which compiles it."""
    optim = {"name": "sgd", "lr": 0.01} if "resnet" in name else {"name": "adamw", "lr": 1e-3}
    return check(
        {
            "model": {"name": name, "compile": "default"} | keys,
            "data": {"image_size": 32},
            "augment": {"mixup": 0.2},
            "optim": optim,
            "batch": {"size": 8, "precision": precision},
        }
    )


@pytest.mark.parametrize(
    ("name", "precision", "smaller"),
    [
        ("test_vit", "bf16", {"depth": 1, "img_size": 32}),
        ("test_convnext", "bf16", {"depths": (1, 1, 1, 1)}),
        ("test_resnet", "fp32", {"layers": (1, 1, 1, 1)}),
    ],
)
def test_a_compiled_family_trains_as_it_does_eager(
    name: str, precision: str, smaller: dict[str, Any]
) -> None:
    """By inductor's code, with dropout and drop path, for which it draws torch's numbers here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    smaller = smaller | {"drop_rate": 0.1, "drop_path_rate": 0.1}
    model = timm.create_model(name, num_classes=CLASSES, **smaller)
    # A pool of compilers takes longer to start than one takes for all of this.
    with torch._inductor.config.patch(fallback_random=True, compile_threads=1):
        found = compare(recipe(name, precision), model, CPU)
    torch._dynamo.reset()
    assert found.steps == 20
    assert found.whole.eager < 0.05 * (1 if precision == "bf16" else 1e-1)  # not of other numbers
    assert found.agrees, found


# --- without a compiler: a model is changed in place of being compiled ---


def change_by(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    def compile_in_place(model: nn.Module, mode: str, **_: object) -> None:
        if mode != "off":
            change(model)

    monkeypatch.setattr(build, "compile_in_place", compile_in_place)


def scale_a_gradient(model: nn.Module) -> None:
    bias: Any = model.get_parameter("blocks.2.norm1.bias")
    bias.register_hook(lambda gradient: 1.1 * gradient)


def keep_first_weights(model: nn.Module) -> None:
    """As constants of the code, though with their gradient."""
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    first = head.weight.detach().clone()
    changed: Any = head
    changed.forward = lambda x: linear(x, head.weight - head.weight.detach() + first, head.bias)


def round_to_bf16(model: nn.Module) -> None:
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)


def change_momentum(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.11


@pytest.mark.parametrize(
    ("name", "precision", "change", "worst"),
    [
        ("test_vit", "fp32", scale_a_gradient, "the gradient of blocks.2.norm1.bias"),
        ("test_vit", "bf16", scale_a_gradient, "the gradient of blocks.2.norm1.bias"),
        ("test_vit", "fp32", keep_first_weights, "the gradient of "),
        ("test_vit", "fp32", round_to_bf16, "the gradient of "),
        ("test_resnet", "fp32", change_momentum, "buffer "),
    ],
)
def test_what_is_wrong_is_found(
    name: str, precision: str, change: Change, worst: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_by(monkeypatch, change)
    config = recipe(name, precision)
    found = compare(config, build.build_run_model(config, CLASSES), CPU)
    assert not found.agrees
    assert found.factor > 2 * LIMIT
    assert found.worst.what.startswith(worst)


def test_steps_that_are_the_same_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    change_by(monkeypatch, lambda model: None)
    config = recipe("test_resnet", "fp16")
    found = compare(config, build.build_run_model(config, CLASSES), CPU)
    assert found.factor <= 1


# --- the doctor's row ---


def row_of(config: RunConfig) -> Row:
    options = Options(
        config=config, run=Path("runs"), has_recipe=True, seconds=0.0, import_seconds=1.0
    )
    context = collect_context(options, World(), CPU, lambda what: None)
    (check,) = compiled_checks(context)
    return run_check(check, context)


def test_the_row_of_a_recipe_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe("test_vit", drop_path=0.5)
    change_by(monkeypatch, lambda model: None)
    row = row_of(config)
    assert row.verdict == "ok"
    assert row.found.startswith("the same but for rounding in 1 steps: the gradient is off")
    change_by(monkeypatch, scale_a_gradient)
    row = row_of(config)
    assert row.verdict == "warn" and "model.compile = 'off'" in row.advice
    assert row.found.startswith(
        "the gradient of blocks.2.norm1.bias is off from float64 by 1.0e-01"
    )


def test_the_row_of_auto_says_what_it_takes() -> None:
    row = row_of(recipe("test_vit", compile="auto"))
    assert row == ("torch.compile", "model.compile = 'auto' takes 'off': no CUDA device", "ok", "")


def test_the_row_of_a_model_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module) -> None:
        raise TorchDynamoException("No working C++ compiler found")

    change_by(monkeypatch, fail)
    row = row_of(recipe("test_vit"))
    assert row.verdict == "fail"
    assert "No working C++ compiler found" in row.found
    assert "model.compile = 'off'" in row.advice
