"""Averagers, moving averages and checkpoints keep to the device of the model.

Model and batches are on the meta device, which stands for a GPU, and the process group sends
nothing. An operation on tensors of the device and of the host fails, as on a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
from torch.utils._python_dispatch import TorchDispatchMode

from tests.averaging.test_contract import WAYS
from tests.data.batches import batch_of_images
from tests.steps import build_state, make_step
from trainyard.averaging.config import AverageConfig
from trainyard.config import load_recipe
from trainyard.model.ema import Ema
from trainyard.run.build import build_averager
from trainyard.training import step as train_step
from trainyard.training.checkpoint import contents
from trainyard.training.saver import HostCopies
from trainyard.world import World

META = torch.device("meta")
aten = torch.ops.aten
OURS = {name: way for name, way in WAYS.items() if way.get("name") in ("gossip", "periodic")}


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Values that the host reads from the device are 1; copies to the host are zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func is aten._local_scalar_dense.default and first.is_meta:
            return 1.0
        if first is not None and func is aten.copy_.default and args[1].device != first.device:
            return first if first.is_meta else first.zero_()
        to_host = torch.device(kwargs.get("device") or META).type == "cpu"
        if first is not None and func is aten._to_copy.default and first.is_meta and to_host:
            return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        if func is aten._foreach_copy_.default:
            pairs = [
                pair for pair in zip(*args[:2], strict=True) if pair[0].device == pair[1].device
            ]
            return func(*map(list, zip(*pairs, strict=True))) if pairs else None
        return func(*args, **kwargs)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The second of four ranks. As with NCCL, messages lie on the device."""
    dist.Backend.register_backend("silent", _create_fake_pg, extended_api=True, devices=["meta"])
    dist.init_process_group("silent", store=FakeStore(), rank=1, world_size=4)
    monkeypatch.setattr(dist, "all_gather_object", give_own)
    try:
        yield World(rank=1, size=4, local_rank=1, local_size=4)
    finally:
        dist.destroy_process_group()
        del dist.Backend.SILENT  # type: ignore[attr-defined]
        dist.Backend.backend_list.remove("silent")


def give_own(values: list[Any], own: Any, group: Any) -> None:
    values[:] = [own] * len(values)


def model_on_device() -> nn.Module:
    with META:
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(8, 10)),
        )


@pytest.mark.parametrize("ema_cpu", [False, True], ids=["", "average on the host"])
@pytest.mark.parametrize("way", OURS)
def test_nothing_leaves_the_device_of_the_model(
    way: str, ema_cpu: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no autocast of the meta device.
    monkeypatch.setattr(train_step, "autocast", lambda device, dtype: nullcontext())
    recipe = load_recipe("debug").model_copy(update={"average": AverageConfig(**OURS[way])})
    images = torch.empty(4, 3, 8, 8, device=META)
    batch = batch_of_images(images, torch.zeros(4, dtype=torch.int64, device=META))
    with Device():  # type: ignore[no-untyped-call]
        model = model_on_device()
        averager = build_averager(recipe, world, META)
        ema = Ema(model, {"ema": 0.5}, warmup=False, cpu=ema_cpu)
        step: Any = make_step(model, averager, world, update_ema=ema.update)
        averager.register_emas(ema.modules)
        state = build_state(model, step.update._optimizer, averager, emas=ema.modules)
        for number in range(7):
            step(batch, number, None)
        with averager.consensus():
            taken = contents(state, world, HostCopies())
            saved = averager.state_dict()
        averager.load_state_dict(saved)
        for number in range(7, 10):
            step(batch, number, None)
    assert {tensor.device for tensor in model.state_dict().values()} == {META}
    expected = torch.device("cpu") if ema_cpu else META
    assert {tensor.device for tensor in ema.modules["ema"].state_dict().values()} == {expected}
    assert {tensor.device.type for tensor in tensors_of(taken)} == {"cpu"}


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
