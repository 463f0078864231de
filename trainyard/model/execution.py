"""Execution modes of a model: recomputed activations, compilation. Results do not change."""

from typing import Any

from torch import nn

from trainyard.errors import RecipeError

_MOST_SHAPES = 64  # beyond this torch.compile leaves a function uncompiled; its default is 8


def recompute_activations(model: nn.Module, name: str) -> None:
    """Keep only the activations between a timm model's blocks, from the next forward pass on."""
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise RecipeError(
            f"model.grad_checkpointing = true: {name} does not support it; set a smaller "
            "batch.micro"
        ) from None


def compile_in_place(model: nn.Module, mode: str) -> None:
    """Compile a model with torch.compile's `mode`; "off" does nothing.

    In place, so that names of weights stay. A model in DDP must be compiled after it is wrapped:
    it then compiles in pieces, so that averaging begins before the backward pass ends.

    Each shape has code of its own: that for any shape is slower, and a run has few shapes, those of
    its phases, of its last micro-batches and of its evaluations.
    """
    if mode != "off":
        import torch._dynamo  # takes a second

        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_SHAPES)
        model.compile(mode=mode, dynamic=False)


def has_cuda_graphs(mode: str) -> bool:
    """True if a mode of torch.compile replays CUDA graphs (on a GPU)."""
    return mode in ("reduce-overhead", "max-autotune")
