"""What is computed in which precision, and that the loss scale goes all the way."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.spawn import spawn
from tests.training.test_equivalence import Case, flat, global_batch, make_step
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.training.precision import use_precision
from trainyard.training.step import MicroBatch, TrainStep
from trainyard.training.update import DynamicLossScale, Update, clip_by_norm, no_clip
from trainyard.world import World

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    product, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tries = torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(product)
    torch.backends.cudnn.allow_tf32 = convolution
    torch.backends.cudnn.benchmark = tries


@pytest.mark.parametrize("name", ["tf32", "fp32", "bf16", "fp16", "tf32"])
def test_float32_is_multiplied_as_the_recipe_says(name: str) -> None:
    use_precision(name)
    backends: Any = torch.backends
    kinds = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    assert [kind.fp32_precision == "tf32" for kind in kinds] == [name == "tf32"] * 3
    # torch.compile reads the older names, and torch refuses that where the newer ones differ.
    assert backends.cuda.matmul.allow_tf32 is (name == "tf32")
    assert backends.cudnn.allow_tf32 is (name == "tf32")
    assert torch.get_float32_matmul_precision() == ("high" if name == "tf32" else "highest")


@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_are_tried_unless_they_must_be_deterministic(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        use_precision("bf16")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.backends.cudnn.benchmark is not deterministic


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("test_vit", num_classes=10, img_size=32)
    return model


@pytest.mark.parametrize("name", AUTOCAST)
def test_layers_compute_in_the_precision_of_the_recipe(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in low precision; the loss, the gradients and the weights in float32."""
    model: Any = vit()
    seen: dict[str, torch.dtype] = {}

    def note(key: str) -> Any:
        return lambda module, inputs, output: seen.update({key: output.dtype})

    model.blocks[0].mlp.fc1.register_forward_hook(note("product"))
    model.patch_embed.proj.register_forward_hook(note("convolution"))
    model.head.register_forward_hook(note("logits"))

    def loss(logits: Tensor, batch: Any) -> Tensor:
        seen["loss"] = logits.dtype
        return logits.square().mean(dim=1)

    gradients: list[torch.dtype] = []
    update = Update.__call__

    def look(self: Update, *arguments: Any) -> Any:
        gradients.extend(p.grad.dtype for p in model.parameters() if p.grad is not None)
        return update(self, *arguments)

    monkeypatch.setattr(Update, "__call__", look)
    step = make_step(
        model, AllReduce(AverageConfig(), World()), World(), case=Case(autocast=AUTOCAST[name])
    )
    replace(step, loss=loss)(global_batch(Case(batch=8), 0), 0, None)
    low = AUTOCAST[name] or torch.float32
    assert seen == {"convolution": low, "product": low, "logits": low, "loss": torch.float32}
    assert set(gradients) == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def losses(name: str, steps: int = 20) -> list[float]:
    step = make_step(
        vit(), AllReduce(AverageConfig(), World()), World(), case=Case(autocast=AUTOCAST[name])
    )
    found = []
    for number in range(steps):
        stats = step(global_batch(Case(), number), number, None)
        assert stats.skipped == 0
        found.append(float(stats.loss_sum / stats.count))
    return found


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 0.02), ("fp16", 0.003)])
def test_low_precision_trains_as_float32_does(name: str, tolerance: float) -> None:
    reference, found = losses("fp32"), losses(name)
    assert found == pytest.approx(reference, rel=tolerance)
    assert found != reference


# --- the loss scale ---


def scaled_step(world: World, model: nn.Module, initial: float) -> tuple[TrainStep, Any]:
    scale = DynamicLossScale(torch.device("cpu"), initial)
    step = make_step(
        model, AllReduce(AverageConfig(), world), world, case=Case(autocast=torch.float16, micro=4)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    update = Update(model, optimizer, scale, clip=no_clip, measure=lambda step: False)
    return replace(step, update=update), scale


def test_the_loss_scale_keeps_gradients_that_fp16_cannot_hold() -> None:
    """Those of a loss times 1e-7 are 0 without it."""

    def norm(initial: float) -> float:
        step, _ = scaled_step(World(), vit(), initial)
        faint = replace(step, loss=lambda logits, batch: 1e-7 * step.loss(logits, batch))
        return float(faint(global_batch(Case(batch=8), 0), 0, None).grad_norm)

    reference = make_step(vit(), AllReduce(AverageConfig(), World()), World())
    expected = 1e-7 * float(reference(global_batch(Case(batch=8), 0), 0, None).grad_norm)
    assert norm(2.0**16) == pytest.approx(expected, rel=0.02)
    assert norm(1.0) < 0.5 * expected


def test_clipping_and_the_gradient_norm_are_of_unscaled_gradients() -> None:
    model, batch = vit(), global_batch(Case(batch=8), 0)
    step, scale = scaled_step(World(), model, 2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    clip = clip_by_norm(0.1)
    clipped = Update(model, optimizer, scale, clip=clip, measure=lambda step: False)
    before = flat(model)
    norm = float(replace(step, update=clipped)(batch, 0, None).grad_norm)
    reference = make_step(vit(), AllReduce(AverageConfig(), World()), World())
    assert norm == pytest.approx(float(reference(batch, 0, None).grad_norm), rel=0.02)
    assert float((flat(model) - before).norm()) == pytest.approx(0.1, rel=0.01)


def overflow(world: World) -> list[tuple[float, float, list[float]]]:
    """Skipped, scale and some weights after each of three steps; rank 1 overflows in the second."""
    torch.set_num_threads(1)
    model = vit()
    step, scale = scaled_step(world, model, 2.0**8)
    found = []
    for number in range(3):
        share = MicroBatch(*(c[world.rank :: world.size] for c in global_batch(Case(), number)))
        if number == 1 and world.rank == 1:
            share = share._replace(images_BCHW=share.images_BCHW * 1e6)
        stats = step(share, number, None)
        found.append((float(stats.skipped), float(scale.value), flat(model)[:999].tolist()))
    return found


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    ranks = spawn(overflow, 2)
    assert ranks[0] == ranks[1]
    skipped, scales, weights = zip(*ranks[0], strict=True)
    assert skipped == (0, 1, 0)
    assert scales == (256, 128, 128)
    assert weights[1] == weights[0] != weights[2]
