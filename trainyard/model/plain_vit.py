"""The plain vision transformer of big_vision; timm builds it by name.

Beyer, Zhai, Kolesnikov 2022, "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580), with
a linear classifier.
"""

import math
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

__all__ = ["plain_vit_small_patch16_224"]

_NAME = "plain_vit_small_patch16_224"
default_cfgs = generate_default_cfgs(
    {
        _NAME: {
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
    }
)


class PlainViT(VisionTransformer):
    """timm's VisionTransformer with fixed positions, and the first weights of big_vision.

    There is no class token; patches are normalised before their mean is taken.
    """

    def __init__(self, **options: Any) -> None:
        plain: dict[str, Any] = {"class_token": False, "global_pool": "avg", "fc_norm": False}
        super().__init__(**{**plain, "weight_init": "jax", **options})
        patches: Any = self.patch_embed
        blocks: Any = self.blocks
        height, width = patches.grid_size
        del self.pos_embed
        positions_1NC = sine_positions(height, width, self.embed_dim)[None]
        self.register_buffer("pos_embed", positions_1NC, persistent=False)
        # timm initialises queries, keys and values as one matrix, whose bound is narrower.
        bound = math.sqrt(3 / self.embed_dim)
        for block in blocks:
            nn.init.uniform_(block.attn.qkv.weight, -bound, bound)


def sine_positions(height: int, width: int, channels: int) -> Tensor:
    """float32[height * width, channels]: sine and cosine of x, then of y, at channels / 4
    frequencies from 1 to 1/10000 (Vaswani et al. 2017, in two dimensions).
    """
    count = channels // 4
    frequencies = 10_000.0 ** -(torch.arange(count) / (count - 1))
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [coordinate.flatten()[:, None] * frequencies for coordinate in (x, y)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)


@register_model
def plain_vit_small_patch16_224(pretrained: bool = False, **options: Any) -> PlainViT:
    """ViT-S/16: 12 blocks of 384 channels with 6 heads."""
    sizes = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    model: PlainViT = build_model_with_cfg(PlainViT, _NAME, pretrained, **(sizes | options))
    return model
