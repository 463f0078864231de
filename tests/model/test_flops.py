"""Floating-point operations, beside what papers say of their models."""

import pytest
import timm
import torch
from torch import nn

from trainyard.model.flops import forward_flops

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "giga_macs"),
    [
        ("resnet50", 4.1),
        ("vit_base_patch16_224", 17.6),
        ("convnext_tiny", 4.5),
        ("convnext_base", 15.4),
        ("swin_tiny_patch4_window7_224", 4.5),
        ("efficientnet_b0", 0.39),
    ],
)
def test_published_figures(name: str, giga_macs: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert forward_flops(model, 224) == pytest.approx(2e9 * giga_macs, rel=0.02)


@pytest.mark.quick
def test_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10))
    assert forward_flops(model, 4) == 2 * (16 * 8 * 3 * 9 + 8 * 16 * 10)


def test_a_model_is_left_as_it_is() -> None:
    model = timm.create_model("resnet18", num_classes=7)
    model.compile()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert forward_flops(model, 64) == forward_flops(model.eval(), 64) > 2e8
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, before[name]), name
