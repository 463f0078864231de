"""What a model has to do, beside what autograd really keeps and what papers say."""

import sys
import threading
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from trainyard.estimate.compute import trace_training
from trainyard.model.flops import forward_flops


@pytest.mark.parametrize(
    "name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224", "efficientnet_b0"]
)
def test_training_is_three_forward_passes(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name).train()
    work = trace_training(model, 224, torch.bfloat16)
    # But for the gradient of the images, which nobody asks for; attention computes more again.
    assert work.flops == pytest.approx(3 * forward_flops(model, 224), rel=0.07)


def test_grouped_convolutions_are_told_apart() -> None:
    with torch.device("meta"):
        model = timm.create_model("convnext_atto").train()
    work = trace_training(model, 64, None)
    blocks = 12
    grouped = [each for each in work.operations if each.kind == "grouped"]
    assert len(grouped) == 2 * blocks


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet18", "test_vit"])
def test_what_autograd_keeps(name: str, dtype: torch.dtype | None) -> None:
    """Of a real model on the CPU, with two numbers of images that are not those of the trace."""
    model = timm.create_model(name, num_classes=10).to(memory_format=torch.channels_last).train()
    size = 160 if name == "test_vit" else 64
    work = trace_training(model, size, dtype)
    for images in (3, 5):
        found = kept(model, images, size, dtype)
        assert work.kept_bytes * images + work.cast_bytes == pytest.approx(found, rel=0.01)


def kept(model: nn.Module, images: int, size: int, dtype: torch.dtype | None) -> int:
    """Bytes."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    batch = torch.zeros(images, 3, size, size).to(memory_format=torch.channels_last)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            scores = model(batch)
        nn.functional.cross_entropy(scores.float(), torch.zeros(images, dtype=torch.long))
    return sum(storage.nbytes() for storage in storages.values())


def test_activations_computed_again_are_not_kept() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224").train()
    plain = trace_training(model, 224, torch.bfloat16)
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    again = trace_training(model, 224, torch.bfloat16)
    assert again.kept_bytes < plain.kept_bytes / 4
    assert again.flops == pytest.approx(4 / 3 * plain.flops, rel=0.1)


def test_a_model_is_left_as_it_is() -> None:
    model = timm.create_model("resnet18").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace_training(model, 64, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_thread_that_looks_at_frames_changes_nothing() -> None:
    """A debugger or a watchdog holds references to local variables of other threads."""
    with torch.device("meta"):
        model = timm.create_model("resnet18").train()
    alone = trace_training(model, 64, None)
    has_ended = threading.Event()

    def look() -> None:
        while not has_ended.is_set():
            frames = sys._current_frames()  # kept while the other thread goes on
            has_ended.wait(0.0005)
            del frames

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert trace_training(model, 64, None) == alone
    finally:
        has_ended.set()
        thread.join()
