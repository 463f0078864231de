"""Grad-CAM: where in an image a model finds a class.

Selvaraju et al. 2017: the mean gradient of the class's logit weights the channels of the last
feature map. Of a ViT, whose last tokens but one have no gradient, the map is what its last block
gets, as tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trainyard.errors import InputError


def activation_maps(model: nn.Module, images_BCHW: Tensor, classes_B: Tensor) -> Tensor:
    """float32[B, h, w] from 0 to 1, of one class of each image, at the size of the features.

    InputError for a model without such a map.
    """
    with torch.enable_grad():
        logits_BC, features = _with_features(model, images_BCHW.detach().requires_grad_())
        chosen = logits_BC.gather(1, classes_B[:, None]).sum()
        (gradient,) = torch.autograd.grad(chosen, features)
    height_width = images_BCHW.shape[2:]
    maps_BCHW, gradient_BCHW = (
        _as_map(model, each.float(), height_width) for each in (features, gradient)
    )
    if maps_BCHW.shape[2:] == (1, 1):
        raise InputError("model.no-activation-map", name=type(model).__name__)
    weights_BC = gradient_BCHW.mean(dim=(2, 3), keepdim=True)
    found_BHW = (weights_BC * maps_BCHW).sum(dim=1).relu()
    return (found_BHW / found_BHW.amax(dim=(1, 2), keepdim=True).clamp(min=1e-12)).detach()


def _with_features(model: Any, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the features that they are computed from."""
    if hasattr(model, "blocks") and hasattr(model, "patch_embed"):
        inputs: list[Tensor] = []
        hook = model.blocks[-1].norm1.register_forward_hook(lambda *of: inputs.append(of[2]))
        try:
            return model(images_BCHW), inputs[0]
        finally:
            hook.remove()
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise InputError("model.no-activation-map", name=type(model).__name__)
    features = model.forward_features(images_BCHW)
    return model.forward_head(features), features


def _as_map(model: Any, features: Any, size: tuple[int, ...]) -> Tensor:
    """[B, C, h, w] of features, or of tokens without the class token, of images of this size."""
    patches: Any = getattr(model, "patch_embed", None)
    if features.ndim == 3 and hasattr(patches, "dynamic_feat_size"):
        tokens_BNC = features[:, getattr(model, "num_prefix_tokens", 0) :]
        height, width = patches.dynamic_feat_size(size)
        if tokens_BNC.shape[1] == height * width:
            map_BCHW: Tensor = tokens_BNC.transpose(1, 2).unflatten(2, (height, width))
            return map_BCHW
    if features.ndim != 4:
        raise InputError("model.no-activation-map", name=type(model).__name__)
    is_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    found_BCHW: Tensor = features.permute(0, 3, 1, 2) if is_last else features
    return found_BCHW
