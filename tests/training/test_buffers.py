"""Batch-norm statistics after steps that were repeated, in whole or in part, or skipped."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from tests.command_line import newest
from tests.runs import RESNET, recipe
from trainyard import train
from trainyard.training.buffers import Buffers


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(6)
    first, second = nn.Conv2d(3, 4, 3, stride=4), nn.Conv2d(4, 6, 3, stride=4)
    return nn.Sequential(first, norms[0], second, norms[1], nn.Flatten(), nn.Linear(24, 10))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_buffers_come_back_as_they_were() -> None:
    model = normed()
    model(torch.randn(8, 3, 32, 32))
    buffers, before = Buffers(model), state(model)
    buffers.remember()
    model(torch.randn(8, 3, 32, 32))
    assert not torch.equal(model.get_buffer("1.running_mean"), before["1.running_mean"])
    buffers.restore()
    assert_state(model, before)


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_statistics_come_back_if_the_update_was_skipped(skipped: float) -> None:
    model = normed()
    buffers, before = Buffers(model), state(model)
    buffers.remember()
    model(torch.full((8, 3, 32, 32), torch.nan) if skipped else torch.randn(8, 3, 32, 32))
    after = state(model)
    buffers.restore_if(torch.tensor(skipped))
    counts = {name: value for name, value in after.items() if name.endswith("tracked")}
    assert_state(model, (before if skipped else after) | counts)


def test_a_model_without_buffers_has_nothing_to_remember() -> None:
    buffers = Buffers(nn.Linear(2, 2))
    buffers.remember()
    buffers.restore()
    buffers.restore_if(torch.tensor(1.0))


def test_statistics_move_once_though_activations_are_recomputed(
    digits: Path, tmp_path: Path
) -> None:
    found = []
    for recomputed in ("false", "true"):
        keys = {
            "run.length": "3 steps",
            "batch.micro": "32",
            "model.grad_checkpointing": recomputed,
        }
        folder = tmp_path / recomputed
        train(recipe(digits, RESNET, keys), folder, console=Console(quiet=True))
        found.append(load_file(newest(folder) / "model.safetensors"))
    kept, again = found
    assert kept.keys() == again.keys() and all(torch.equal(kept[key], again[key]) for key in kept)
