"""The plain vision transformer is timm's, but for positions, pooling and first weights."""

import math
from typing import Any

import pytest
import timm
import torch

from trainyard.model.build import build_model
from trainyard.model.config import ModelConfig
from trainyard.model.plain_vit import PlainViT, sine_positions

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2}


def small(image_size: int = 48) -> PlainViT:
    torch.manual_seed(0)
    config = ModelConfig(name="plain_vit_small_patch16_224", options=SMALL)
    model = build_model(config, num_classes=10, image_size=image_size)
    assert isinstance(model, PlainViT)
    return model


def test_positions_are_the_written_out_formula() -> None:
    found = sine_positions(3, 5, 16)
    assert found.shape == (15, 16)
    for row in range(3):
        for column in range(5):
            for number in range(4):
                angles = [place / 10_000 ** (number / 3) for place in (column, row)]
                expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
                own = found[row * 5 + column, number::4].tolist()
                assert own == pytest.approx(expected, abs=1e-6)


def test_the_model_is_timms_with_these_positions() -> None:
    model = small().eval()
    assert "pos_embed" not in model.state_dict()  # a constant: not trained, averaged or saved
    assert isinstance(model.head, torch.nn.Linear)
    torch.nn.init.normal_(model.head.weight)
    options: dict[str, Any] = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    timms = timm.create_model(
        "vit_small_patch16_224", num_classes=10, img_size=48, **SMALL, **options
    ).eval()
    timms.load_state_dict(model.state_dict() | {"pos_embed": sine_positions(3, 3, 32)[None]})
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(model(images), timms(images), rtol=1e-5, atol=1e-6)


def test_first_weights_are_those_of_big_vision() -> None:
    """Variances that flax gives to its layers: xavier, and lecun for the patches."""
    model: Any = timm.create_model("plain_vit_small_patch16_224", depth=2)
    attention, mlp = model.blocks[0].attn, model.blocks[0].mlp
    for layer, bound in (
        (attention.qkv, math.sqrt(6 / 768)),
        (attention.proj, math.sqrt(6 / 768)),
        (mlp.fc1, math.sqrt(6 / 1920)),
    ):
        assert layer.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=2e-2)
    assert model.patch_embed.proj.weight.std().item() == pytest.approx(768**-0.5, rel=2e-2)
    assert not model.head.weight.any()
