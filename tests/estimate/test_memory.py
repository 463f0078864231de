"""Bytes beside those of real models, optimizers and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainyard.averaging.config import AverageConfig
from trainyard.config import RunConfig, load_recipe, override
from trainyard.estimate.memory import (
    Memory,
    Sizes,
    checkpoint_bytes,
    gpu_memory,
    kept_bytes,
    model_sizes,
)
from trainyard.files import RunDirectory
from trainyard.optim.config import NAMES
from trainyard.optim.optimizers import build_optimizer
from trainyard.run.model import build_run_model
from trainyard.training.precision import AUTOCASTS

pytestmark = pytest.mark.slow


def config_of(**keys: str) -> RunConfig:
    return load_recipe("debug", {key.replace("__", "."): value for key, value in keys.items()})


@pytest.mark.parametrize("name", [*NAMES, "adan", "madgrad", "nadamuon"])
def test_a_real_optimizer_keeps_as_many_bytes(name: str) -> None:
    if name.startswith("schedule_free"):
        pytest.importorskip("schedulefree")
    config = config_of(optim__name=name, schedule__name="constant")
    model = build_run_model(config, num_classes=10)
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [
        tensor
        for state in optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.numel() > 1
    ]
    found = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    sizes = model_sizes(model, config)
    assert sizes.moments == pytest.approx(found, rel=0.001)
    assert sizes.gradients == sum(4 * p.numel() for p in model.parameters())


def test_sgd_without_momentum_keeps_nothing() -> None:
    config = config_of(optim__name="sgd", optim__momentum="0")
    assert model_sizes(build_run_model(config, 10), config).moments == 0


def test_what_is_not_trained_has_no_gradients() -> None:
    whole = model_sizes(build_run_model(config_of(), 10), config_of())
    config = config_of(model__freeze="blocks.*")
    frozen = model_sizes(build_run_model(config, 10), config)
    assert frozen.gradients < whole.gradients
    assert frozen.weights == whole.weights


def test_each_moving_average_is_a_copy_of_the_weights() -> None:
    for decays, copies in (("0.9", 1), ("[0.9, 0.99]", 2)):
        config = config_of(model__ema_decay=decays, model__ema_cpu="true")
        sizes = model_sizes(build_run_model(config, 10), config)
        assert sizes.average == sizes.on_host == copies * sizes.weights > 0


def test_a_real_checkpoint(finished: Path) -> None:
    directory = RunDirectory(finished)
    config = load_recipe(str(directory.recipe))
    sizes = model_sizes(build_run_model(config, num_classes=10), config)
    newest = (finished / "checkpoints" / "latest").resolve()
    found = sum(path.stat().st_size for path in newest.iterdir())
    assert checkpoint_bytes(sizes, config.average, ranks=1) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "size"), [("resnet18", 64), ("test_vit", 160)])
def test_what_autograd_keeps(name: str, size: int, precision: str) -> None:
    """Of a real model on the CPU, with two numbers of images that are not those of the trace."""
    if precision == "bf16" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch 2.15 takes kernels for AVX-512 then, though told not to")
    config = config_of(model__name=name, data__image_size=f"{size}", batch__precision=precision)
    model = build_run_model(config, num_classes=10).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    per_image, besides = kept_bytes(model, config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for images in (3, 5):
        found = really_kept(model, images, size, AUTOCASTS[precision])
        assert per_image * images + besides == pytest.approx(found, rel=0.01)


def really_kept(model: nn.Module, images: int, size: int, dtype: torch.dtype | None) -> int:
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
    name = "vit_tiny_patch16_224"
    plain = config_of(model__name=name, data__image_size="224", batch__precision="bf16")
    again = override(plain, {"model.grad_checkpointing": "true"})
    whole, part = (kept_bytes(build_run_model(c, 10).train(), c)[0] for c in (plain, again))
    assert part < whole / 4


SIZES = Sizes(weights=100e6, gradients=100e6, moments=200e6, average=100e6, on_host=0.0)


def memory(average: str = "allreduce", capacity: float | None = None, ranks: int = 8) -> Memory:
    config = RunConfig(average=AverageConfig.model_validate({"name": average}))
    return gpu_memory(SIZES, (10e6, 0.0), config, gpus=ranks, share=1000, capacity=capacity)


def test_shares_are_halved_until_they_fit() -> None:
    found = memory(capacity=4e9)
    assert found.micro == 125
    assert found.total < 4e9
    assert found.total + found.micro * 1.15 * 10e6 > 4e9  # twice as many would not fit
    assert memory().micro == 1000


def test_sharded_weights_are_divided() -> None:
    whole = memory().total
    assert whole - memory("sharded").total == pytest.approx(500e6 * 7 / 8 - 10e6)
    assert memory("gossip").total - whole == pytest.approx(100e6)
    assert memory("gossip", ranks=1).total == pytest.approx(whole)


@pytest.mark.quick
def test_an_average_in_host_memory_takes_none_of_the_gpu() -> None:
    found = [
        gpu_memory(sizes, (1.0, 0.0), RunConfig(), gpus=1, share=1, capacity=None).total
        for sizes in (SIZES, SIZES._replace(on_host=SIZES.average))
    ]
    assert found[0] - found[1] == pytest.approx(SIZES.average)


def test_gradients_of_micro_batches_add_up_whole() -> None:
    found = []
    for accumulate in (None, "parts"):
        keys = {"average": {"name": "sharded", "accumulate": accumulate}, "batch": {"micro": 100}}
        config = RunConfig.model_validate(keys)
        found.append(
            gpu_memory(SIZES, (10e6, 0.0), config, gpus=8, share=1000, capacity=None).total
        )
    assert found[0] - found[1] == pytest.approx(100e6 * 7 / 8)


def test_a_model_that_does_not_fit_is_found() -> None:
    found = memory(capacity=1.9e9)
    assert (found.largest, found.micro, found.fits) == (0, 1, False)


def test_replicas_that_differ_save_their_own() -> None:
    one = checkpoint_bytes(SIZES, AverageConfig(), ranks=8)
    assert one == 400e6
    assert checkpoint_bytes(SIZES, AverageConfig(name="gossip"), ranks=8) == 200e6 + 8 * 300e6
