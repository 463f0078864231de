"""No ordinary step makes the host wait for the device, whatever a recipe asks for.

Batches and models are on the meta device, which stands for a GPU: its kernels are those of a GPU in
all that the code can tell, and nothing is computed. A dispatch mode raises where a GPU would make
the host wait: at a value read by the host, a shape that depends on values, a blocking copy.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data.batches import batch_of_images
from tests.test_recipes import narrow
from tests.tiers import tiered
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.config import RunConfig, builtin_recipes, load_recipe
from trainyard.course import Course
from trainyard.data.batch import Batch, PixelBatch
from trainyard.data.device.feed import Feed
from trainyard.data.stream.shards import Stream
from trainyard.image_size import ImageSize, height_width
from trainyard.monitor.clock import Clock
from trainyard.monitor.meters import Meter
from trainyard.optim.optimizers import build_optimizer
from trainyard.optim.schedules import Rates
from trainyard.run.build import (
    build_ema,
    build_feeds,
    build_loss_scale,
    build_run_course,
    build_run_schedule,
    build_step,
)
from trainyard.run.loss import build_run_loss
from trainyard.run.model import build_run_model
from trainyard.training import evaluate as evaluation
from trainyard.training import precision, step
from trainyard.training.checkpoint import TrainState
from trainyard.training.evaluate import Evaluator, Views
from trainyard.training.guard import Guard
from trainyard.training.step import TrainStep
from trainyard.world import World

META = torch.device("meta")
IMAGENET, CLASSES, BATCH = 1_281_167, 1000, 16
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


class HostWaits(Exception):
    """The host would wait for the device here."""


def depends_on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is aten.index.Tensor:  # only with a mask, though it has the tag
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where the host would wait for the device; allows and counts some reads of a value."""

    def __init__(self, allowed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = allowed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func is aten._fused_sgd_.default:  # it has no kernel for meta tensors
            return None
        if func is aten._local_scalar_dense.default and first is not None and first.is_meta:
            if self.left:
                self.left -= 1
                return 1.0
            raise HostWaits("a value is read")
        if depends_on_values(func, args, kwargs) and any(
            isinstance(x, Tensor) and x.is_meta for x in args
        ):
            raise HostWaits(f"{func}: its shape or result depends on values")
        if func in COPIES and first is not None:
            ends = [first.device, args[1].device if len(args) > 1 else kwargs.get("device")]
            if {str(end) for end in ends if end is not None} == {"cpu", "meta"}:
                if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                    raise HostWaits(f"{func}: a blocking copy of {tuple(first.shape)}")
                if func is aten.copy_.default and first.device.type == "cpu":
                    return first.zero_()  # there is nothing to copy
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def meta_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused optimizers and autocast take it for a GPU."""
    optimizer: Any = import_module("torch.optim.optimizer")
    known = optimizer._get_fused_kernels_supported_devices()
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [*known, "meta"])
    plain = partial(precision.autocast, torch.device("cpu"))
    for module in (step, evaluation):
        monkeypatch.setattr(module, "autocast", lambda device, dtype: plain(dtype))


class Parts:
    """The parts of a run that work in every step, on the meta device."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.world = config, World()
        self.course: Course = build_run_course(config, IMAGENET)
        with META:
            self.model = build_run_model(config, CLASSES).train()
        averager = AllReduce(AverageConfig(), self.world)
        ema = build_ema(config, self.model)
        self.state = TrainState(
            model=self.model,
            emas=ema.modules if ema else {},
            optimizer=build_optimizer(self.model, config.optim),
            averager=averager,
            scale=build_loss_scale(config, META),
            guard=Guard(META, config.run.max_skipped),
            clock=Clock(),
            classes=[str(number) for number in range(CLASSES)],
        )
        self.step: TrainStep = build_step(
            config,
            self.state,
            averager.wrap(self.model),
            loss=build_run_loss(
                config,
                Stream((), samples=1, classes=tuple(self.state.classes), numbers=()),
                course=self.course,
                device=META,
            ),
            world=self.world,
            ema=ema,
        )
        self.rates: Rates = build_run_schedule(config, self.course)(0)
        self.meter = Meter(self.world, META, self.state.clock, add_up=averager.add_up)

    def feed(self) -> Feed:
        """A feed without a loader."""
        feeds = build_feeds(self.config, self.world, META)
        if self.config.model.name == "whitened_convnet":
            # Autocast does nothing on meta, where a convolution with a bias refuses other images.
            feeds = replace(feeds, dtype=torch.float32)
        return feeds._feed(None, None, **feeds._augmented(0, BATCH))  # type: ignore[arg-type]

    def train_step(self, number: int, batch: Batch) -> None:
        assert not self.state.guard.tripped(number)
        stats = self.step(batch, number, self.rates)
        self.state.guard.add(stats.skipped)
        self.state.guard.hear(self.state.guard.told(number + 1))
        self.meter.add(stats)


def arriving(size: ImageSize, channels: int = 3) -> PixelBatch[Tensor]:
    shape = BATCH, *height_width(size), channels
    ids = torch.arange(BATCH)
    return PixelBatch(
        ids=ids,
        epochs=torch.zeros_like(ids),
        labels=torch.zeros(BATCH, dtype=torch.int64, device=META),
        weights=torch.ones(BATCH, device=META),
        images_BHWC=torch.empty(shape, dtype=torch.uint8, device=META),
    )


def reads_of(parts: Parts) -> int:
    """Optimizers without a kernel that can skip cost one read a step; see Update."""
    return 0 if getattr(parts.state.optimizer, "_step_supports_amp_scaling", False) else 1


OPTIONS = {
    "fp16": {"batch.precision": "fp16"},
    "adam, and all that a step may do besides": {
        "optim.name": "adam",
        "optim.clip_norm": "1.0",
        "batch.micro": "5",
        "model.freeze": '["stem*"]',
        "model.ema_decay": "0.999",
        "model.ema_warmup": "true",
        "model.drop_path": "0.1",
        "schedule.drop_path_start": "0.0",
    },
}
CASES: dict[str, tuple[str, dict[str, str]]] = {
    name: (name, {}) for name in sorted(builtin_recipes())
} | {option: ("convnext-tiny", changes) for option, changes in OPTIONS.items()}


# One recipe of each family and optimizer.
IN_CI = {
    "resnet50-a3",
    "vit-b32-lamb-32k",
    "convnext-tiny-muon",
    "deit3-small",
    "finetune",
    *OPTIONS,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    tiered(
        CASES,
        quick=["fp16", "resnet50-a1"],
        night=[case for case in CASES if case not in {*IN_CI, "fp16", "resnet50-a1"}],
    ),
)
def test_a_step_and_its_batch_wait_for_nothing(case: str) -> None:
    name, changes = CASES[case]
    small = {"batch.size": str(BATCH), "model.name": narrow(load_recipe(name).model.name)}
    parts = Parts(load_recipe(name, small | changes))
    size = parts.course.phases[0].image_size
    feed = parts.feed()
    with Watched(allowed=sys.maxsize):  # the first step of a phase allocates
        parts.train_step(8, feed._move(arriving(size, parts.config.data.channels)))
    with Watched(allowed=3 * reads_of(parts)) as watched:
        for number in (7, 8, 10):  # the guard looks at every tenth, and reads its count before
            parts.train_step(number, feed._move(arriving(size, parts.config.data.channels)))
    assert watched.left == 0


def test_an_evaluation_waits_at_its_end_alone() -> None:
    with META:
        models = {"": timm.create_model("test_resnet"), "ema_": timm.create_model("test_resnet")}
    images = torch.empty(8, 3, 64, 64, device=META)
    batch = batch_of_images(images, torch.zeros(8, dtype=torch.int64, device=META))
    taken = []

    def batches() -> Iterator[Batch]:
        for number in range(3):
            yield replace(batch, ids=batch.ids + 8 * number)
            taken.append(number)

    kept = torch.arange(5, device=META)
    given: Any = {
        "num_samples": 24,
        "world": World(),
        "device": META,
        "views": Views(True, (1, 1.2)),
    }
    with pytest.raises(HostWaits, match=r"copy of \(2, 4, 24\)"), Watched():
        Evaluator(columns=kept, **given).predictions(models, batches())
    assert taken == [0, 1, 2]


def test_the_proof_sees_each_kind_of_wait() -> None:
    value = torch.zeros(3, device=META)
    waits: list[Callable[[], Any]] = [
        lambda: value.sum().item(),
        lambda: bool(value.sum() > 0),
        lambda: value.nonzero(),
        lambda: value[value > 0],
        lambda: value.cpu(),
        lambda: torch.zeros(3).to(META),
        lambda: value.copy_(torch.zeros(3)),
    ]
    for wait in waits:
        with pytest.raises(HostWaits), Watched():
            wait()
    with Watched():
        torch.zeros(3).to(META, non_blocking=True)
        torch.zeros(3).copy_(value, non_blocking=True)
