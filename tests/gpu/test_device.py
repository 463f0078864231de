"""Parts of a run on a GPU: steps that wait for nothing, averagers over NCCL, transforms, copies."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch import distributed as dist

from tests.data.batches import batch_of_images
from tests.gpus import needs_gpu
from tests.steps import Case, global_batch, mapped
from trainyard.averaging.allreduce import AllReduce, wrap_in_ddp
from trainyard.averaging.base import Averager
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.periodic import Periodic
from trainyard.averaging.sharded import Sharded
from trainyard.config import load_recipe
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.transforms import batch_transforms, pixel_transforms
from trainyard.data.batch import TENSORS, Batch, Keys
from trainyard.data.device.feed import Normalise
from trainyard.model.ema import Ema
from trainyard.monitor.clock import Clock
from trainyard.monitor.meters import Meter
from trainyard.optim.optimizers import build_optimizer
from trainyard.optim.schedules import Rates
from trainyard.run.build import build_loss_scale, build_run_course, build_run_schedule, build_step
from trainyard.run.model import build_run_model
from trainyard.training.checkpoint import TrainState
from trainyard.training.guard import Guard
from trainyard.training.losses import build_loss
from trainyard.training.saver import HostCopies
from trainyard.training.step import TrainStep
from trainyard.world import World

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH, SIDE = 24, 48


# --- a step ---


class Parts:
    """A step of a recipe on a device, in a world of one."""

    def __init__(self, device: torch.device, averager: Averager, **changes: str) -> None:
        options = {
            "optim.name": "sgd",
            "batch.size": "32",
            "run.length": "100 steps",
            "run.log_every": "90 steps",
        }
        config = load_recipe("debug", options | changes)
        torch.manual_seed(0)
        self.model: nn.Module = build_run_model(config, 10).to(device).train()
        ema = Ema(self.model, {"ema": 0.9}, warmup=False, cpu=False)
        course = build_run_course(config, 1000)
        wrapped = averager.wrap(self.model)
        averager.register_emas(ema.modules)
        self.rates: Rates = build_run_schedule(config, course)(50)
        self.state = TrainState(
            model=self.model,
            emas=ema.modules,
            optimizer=build_optimizer(self.model, config.optim),
            averager=averager,
            scale=build_loss_scale(config, device),
            guard=Guard(device, 20),
            clock=Clock(),
            classes=[],
        )
        self.step: TrainStep = build_step(
            config,
            self.state,
            wrapped,
            loss=build_loss(config.loss, 0.1, teacher=None),
            world=World(),
            ema=ema,
        )
        self.meter = Meter(World(), device, self.state.clock, add_up=averager.add_up)
        self.device = device

    def batch(self, number: int) -> Batch:
        return mapped(global_batch(Case(), number), lambda tensor: tensor.to(self.device))

    def train(self, number: int, batch: Batch) -> None:
        assert not self.state.guard.tripped(number)
        stats = self.step(batch, number, self.rates)
        self.state.guard.add(stats.skipped)
        self.state.guard.hear(self.state.guard.told(number + 1))
        self.meter.add(stats)


WAYS = {
    "fp32": {},
    "bf16": {"batch.precision": "bf16"},
    "fp16, clipped": {"batch.precision": "fp16", "optim.clip_norm": "1.0"},
    "adamw, micro-batches": {"optim.name": "adamw", "batch.micro": "12"},
    "clipped by unit": {"optim.clip_agc": "0.01"},
    "batch norm": {"model.name": "test_resnet"},
}


@pytest.mark.parametrize("way", WAYS)
@needs_gpu
def test_steps_wait_for_nothing(way: str, device: torch.device) -> None:
    """As tests/training/test_no_sync.py proves without a GPU."""
    parts = Parts(device, AllReduce(AverageConfig(), World()), **WAYS[way])
    batches = [parts.batch(number) for number in range(14)]
    for number in range(4):
        parts.train(number, batches[number])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(4, 14):
            parts.train(number, batches[number])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- averagers, with the only rank ---


def averaged(name: str, folder: str, results: Any) -> None:
    """Weights after some steps, plain and with an averager, over NCCL where there is a GPU."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=0,
        world_size=1,
        device_id=device if has_gpu else None,
    )
    world = World()

    class Wrapped(AllReduce):
        def wrap(self, model: nn.Module) -> nn.Module:
            super().wrap(model)
            self._ddp = wrap_in_ddp(model)
            return self._ddp

    options: dict[str, Any] = {"name": "periodic", "every": 2}
    averagers: dict[str, Callable[[], Averager]] = {
        "allreduce": lambda: Wrapped(AverageConfig(), world),
        "periodic": lambda: Periodic(AverageConfig(**options), world),
        "sharded": lambda: Sharded(AverageConfig(name="sharded"), world, device),
    }
    found = []
    for averager in (AllReduce(AverageConfig(), world), averagers[name]()):
        parts = Parts(device, averager)
        for number in range(6):
            parts.train(number, parts.batch(number))
        with averager.consensus():
            weights = parts.model.state_dict()
            found.append({key: _whole(tensor) for key, tensor in weights.items()})
    results.put(found)


def _whole(tensor: Tensor) -> Any:
    full = getattr(tensor, "full_tensor", None)
    return (full() if full else tensor).detach().cpu().numpy()


@pytest.mark.parametrize("name", ["allreduce", "periodic", "sharded"])
def test_an_averager_of_the_only_rank_changes_nothing(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=averaged, args=(name, str(tmp_path), results))
    process.start()
    try:
        plain, other = results.get(timeout=150)
    finally:
        process.kill()
        process.join()
    assert plain.keys() == other.keys()
    for key, values in plain.items():
        np.testing.assert_allclose(other[key], values, rtol=1e-3, atol=1e-5, err_msg=key)


# --- batches ---


def pixels() -> Tensor:
    """Images with edges and areas of one colour: uint8[B, 3, H, W] over rows of pixels."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(256, (BATCH, 3, 6, 6), dtype=torch.uint8, generator=generator)
    fine = nn.functional.interpolate(coarse.float(), size=(SIDE, SIDE), mode="bilinear")
    return fine.to(torch.uint8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


KEYS = Keys(np.arange(BATCH), np.full(BATCH, 3), 1000)
PIXELS: dict[str, dict[str, Any]] = {
    "RandAugment": {"randaugment": "rand-m9-mstd0.5-inc1"},
    "RandAugment, strong": {"randaugment": "rand-m15-n2-mstd0.5-mmax15-inc1"},
    "3-Augment": {"randaugment": "3a"},
    "jitter": {"color_jitter": (0.4, 0.4, 0.4, 0.1)},
}
BATCHES: dict[str, dict[str, Any]] = {
    "erasing": {"erasing": 0.5, "erasing_mode": "pixel"},
    "mixed alike": {"mixup": 0.8, "cutmix": 1.0},
    "mixed singly": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "elem"},
}


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", PIXELS)
def test_pixels_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    config = AugmentConfig(**PIXELS[name])
    (transform,) = pixel_transforms(config, seed=0, mean=MEAN)
    expected = transform(pixels(), KEYS).int()
    given = pixels().to(device)
    with no_waits(device):
        found = transform(given, KEYS)
    off = (found.cpu().int() - expected).abs()
    # Single precision in another order: edges of what is uncovered may differ.
    assert (off > 2).float().mean() < 0.01
    assert off.float().mean() < 0.2


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    (transform,) = batch_transforms(AugmentConfig(**BATCHES[name]), seed=0)

    def batch(at: torch.device) -> Batch:
        labels, weights = torch.arange(BATCH), torch.ones(BATCH)
        weights[3] = 0
        return batch_of_images(pixels().float().to(at), labels.to(at), weights.to(at))

    given = batch(device)
    with no_waits(device):
        found = transform(given, KEYS)
    expected = transform(batch(torch.device("cpu")), KEYS)
    for name in TENSORS:
        one, other = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalised_as_on_the_cpu(
    channels_last: bool, dtype: torch.dtype, device: torch.device
) -> None:
    found, expected = (
        Normalise(at, mean=MEAN, std=STD, channels_last=channels_last, dtype=dtype)(pixels().to(at))
        for at in (device, torch.device("cpu"))
    )
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)
    step = torch.finfo(dtype).eps * 4
    torch.testing.assert_close(found.cpu(), expected, rtol=step, atol=max(step, 3e-7))


# --- checkpoints ---


@needs_gpu
def test_copies_for_a_checkpoint_are_page_locked_and_stay(device: torch.device) -> None:
    copies = HostCopies()
    for number in range(3):  # the memory is used again
        copies.begin()
        model: Any = timm.create_model("test_resnet")
        model = model.to(device, memory_format=torch.channels_last)
        before = {key: tensor.cpu() for key, tensor in model.state_dict().items()}
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # work before the copies
        taken = copies(model.state_dict())
        copies.synchronise()
        for parameter in model.parameters():
            parameter.data.fill_(number)
        for key, tensor in before.items():
            assert taken[key].is_pinned()
            assert torch.equal(taken[key], tensor), key
