"""What is computed in which precision, and that the loss scale goes all the way."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.steps import CPU, Case, build_update, global_batch, make_step, vit
from trainyard.training.precision import use_precision
from trainyard.training.update import DynamicLossScale, Update

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
    step = make_step(model, case=Case(autocast=AUTOCAST[name]), loss=loss)
    step(global_batch(Case(batch=8), 0), 0, None)
    low = AUTOCAST[name] or torch.float32
    assert seen == {"convolution": low, "product": low, "logits": low, "loss": torch.float32}
    assert set(gradients) == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def losses(name: str, steps: int = 20) -> list[float]:
    step = make_step(vit(), case=Case(autocast=AUTOCAST[name]))
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


def test_the_loss_scale_keeps_gradients_that_fp16_cannot_hold() -> None:
    """Those of a loss times 1e-7 are 0 without it."""

    def norm(initial: float) -> float:
        model = vit()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        update = build_update(model, optimizer, DynamicLossScale(CPU, initial))
        case = Case(autocast=torch.float16, micro=4)
        loss = make_step(model).passes.loss
        faint = make_step(
            model, case=case, update=update, loss=lambda logits, batch: 1e-7 * loss(logits, batch)
        )
        return float(faint(global_batch(Case(batch=8), 0), 0, None).grad_norm)

    reference = make_step(vit())
    expected = 1e-7 * float(reference(global_batch(Case(batch=8), 0), 0, None).grad_norm)
    assert norm(2.0**16) == pytest.approx(expected, rel=0.02)
    assert norm(1.0) < 0.5 * expected
