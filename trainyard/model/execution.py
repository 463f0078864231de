"""How a model is carried out: with activations computed again, compiled. Results stay."""

from torch import nn

from trainyard.errors import RecipeError


def recompute_activations(model: nn.Module, name: str) -> None:
    """Keep the activations between a timm model's blocks alone, from the next forward pass on."""
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise RecipeError(
            f"model.grad_checkpointing = true: {name} cannot do that; set a smaller batch.micro"
        ) from None


def compile_in_place(model: nn.Module, mode: str) -> None:
    """Compile a model by torch.compile's `mode`, or leave it as it is if that is "off".

    In place, so that the names of its weights stay. A model in DDP is compiled after it was
    wrapped: in pieces, so that averaging begins before the backward pass ends.
    """
    if mode != "off":
        model.compile(mode=mode)


def has_cuda_graphs(mode: str) -> bool:
    """Whether a mode of torch.compile replays CUDA graphs (on a GPU)."""
    return mode in ("reduce-overhead", "max-autotune")
