"""Check that the compiled steps of a recipe are its eager steps, but for rounding.

The same steps in float64 tell what both are off by. Each step begins with the same weights, since
runs that differ in rounding drift apart. In a network with kinks, such as ReLU, rounding switches
units on and off, and single steps are off by far more than others, compiled or eager. So the median
of the compiled steps is held against the largest error of the eager ones.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from trainyard.averaging.allreduce import AllReduce
from trainyard.config import RunConfig
from trainyard.doctor.check import WARN, Check, Context, Row, differing
from trainyard.errors import InputError
from trainyard.image_size import height_width
from trainyard.monitor.clock import Clock
from trainyard.optim.optimizers import build_optimizer
from trainyard.optim.schedules import Rates
from trainyard.run.build import (
    build_mode,
    build_run_course,
    build_run_model,
    build_run_schedule,
    build_step,
)
from trainyard.training.checkpoint import TrainState
from trainyard.training.guard import Guard
from trainyard.training.losses import build_loss
from trainyard.training.precision import use_precision
from trainyard.training.step import MicroBatch
from trainyard.training.update import DynamicLossScale, LossScale
from trainyard.world import World

LIMIT = 5.0
"""Most that a compiled value may be off by, in errors of the eager one; 1.4 was seen, in fp32 and
bf16, of ViT, ConvNeXt and ResNet on a CPU."""

_STEPS = 20
_SAMPLES = 8
_CLASSES = 100
_FP16_SCALE = 2.0**8  # of the loss; a run finds its own, by steps that it skips
_FLOAT32 = torch.finfo(torch.float32).eps
_WHAT = "torch.compile"
_GRADIENT = "the gradient"


class Error(NamedTuple):
    """What a value is off by, relative to its norm."""

    what: str
    eager: float
    """The largest of all steps."""
    compiled: float
    """The median of all steps."""


class Comparison(NamedTuple):
    """Steps held against the same steps in float64."""

    steps: int
    whole: Error
    """Of the gradient of all parameters."""
    worst: Error
    """Of the value with the largest `factor`."""
    factor: float
    """The compiled error over the eager one, or over that of `whole` if it is larger."""

    @property
    def agrees(self) -> bool:
        return self.factor <= LIMIT


class _Noting(AllReduce):
    """The averager of a single replica, which keeps the gradients of the last step."""

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        for parameters in super().ready_parameters(step, divisible):
            self.gradients: list[Tensor | None] = [parameter.grad for parameter in parameters]
            yield parameters


class _Training:
    """The step of a run on a model, without the run."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        self.model, self._averager = model, _Noting(config.average, World())
        self._dtype = next(model.parameters()).dtype
        is_fp16 = config.batch.precision == "fp16"
        state = TrainState(
            model=model,
            emas={},
            optimizer=build_optimizer(model, config.optim),
            averager=self._averager,
            scale=DynamicLossScale(device, _FP16_SCALE) if is_fp16 else LossScale(device),
            guard=Guard(device, config.run.max_skipped),
            clock=Clock(),
            classes=[],
        )
        smoothing, mixes = config.augment.label_smoothing, config.augment.mixes
        self._step = build_step(
            config,
            state,
            self._averager.wrap(model),
            loss=build_loss(config.loss, smoothing, teacher=None, mixes=mixes),
            world=World(),
            update_ema=lambda step: None,
        )
        # In proportion to the batch: the recipe's rate is that of its own batch, after a warm-up.
        lr = config.optim.lr * min(1, _SAMPLES / config.batch.size)
        self._rates = Rates(lr, config.optim.weight_decay, None)

    def step(self, batch: MicroBatch, number: int) -> dict[str, Tensor]:
        """Make a step. Returns its loss, gradients and buffers (batch norm statistics), by name."""
        images = batch.images_BCHW.to(self._dtype)
        stats = self._step(batch._replace(images_BCHW=images), number, self._rates)
        trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        gradients = dict(zip(trained, self._averager.gradients, strict=True))
        self._averager.gradients = []  # CUDA graphs write the next ones in their place
        found = {f"{_GRADIENT} of {name}": each for name, each in gradients.items()}
        found |= {f"buffer {name}": each for name, each in self.model.named_buffers()}
        return {"the loss": stats.loss_sum} | {
            what: each for what, each in found.items() if each is not None
        }


class _Errors:
    """Errors of eager and compiled values, step by step, by what they are of."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, float]]] = {}

    def add(self, exact: dict[str, Tensor], *others: dict[str, Tensor]) -> None:
        """Add the errors of a step's eager and compiled values."""
        whole = torch.zeros(3, dtype=torch.float64)
        for what, value in exact.items():
            wanted = value.double()
            differences = [other[what].double() - wanted for other in others]
            parts = [part.square().sum() for part in (wanted, *differences)]
            squares = torch.stack(parts).cpu()
            self._note(what, squares)
            if what.startswith(_GRADIENT):
                whole += squares
        self._note(_GRADIENT, whole)

    def _note(self, what: str, squares: Tensor) -> None:
        size, eager, compiled = squares.sqrt().tolist()
        if size:
            errors = (_finite(eager / size), _finite(compiled / size))
            self._found.setdefault(what, []).append(errors)

    def compared(self, steps: int) -> Comparison:
        errors = {
            what: Error(what, max(eager for eager, _ in found), median(own for _, own in found))
            for what, found in self._found.items()
        }
        whole = errors[_GRADIENT]

        def factor(error: Error) -> float:
            return _finite(error.compiled / max(error.eager, whole.eager, _FLOAT32))

        worst = max(errors.values(), key=factor)
        return Comparison(steps, whole, worst, factor(worst))


def _finite(number: float) -> float:
    """A number, or infinity in place of NaN, which has no order."""
    return math.inf if math.isnan(number) else number


def compare(
    config: RunConfig,
    model: nn.Module,
    device: torch.device,
    *,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Train a model of a recipe for 20 steps as a run would, compiled, eager and in float64.

    Images are random. It ends early, once `seconds` have passed after the first step, which
    compiles.
    RuntimeError if the model cannot be compiled or memory does not suffice.
    """
    model = model.to(device).train()
    eager = _with(config, model={"compile": "off"}, optim={"compile": False})
    exact = _with(eager, batch={"precision": "fp32"})
    trainings = [
        _Training(exact, copy.deepcopy(model).double(), device),
        _Training(eager, copy.deepcopy(model), device),
        _Training(config, model, device),
    ]
    errors, compiled_at = _Errors(), math.inf
    for number in range(_STEPS):
        say(f"{_WHAT}: step {number + 1} of {_STEPS}")
        batch = _batch(config, number, device)
        errors.add(*(training.step(batch, number) for training in trainings))
        _make_equal([training.model for training in trainings])
        compiled_at = min(compiled_at, time.monotonic())
        if time.monotonic() > compiled_at + seconds:
            break
    return errors.compared(number + 1)


@torch.no_grad()
def _make_equal(models: Sequence[nn.Module]) -> None:
    """Give all models the weights and buffers of the first one, rounded to those of the last."""
    for tensors in zip(*(model.state_dict().values() for model in models), strict=True):
        rounded = tensors[0].to(tensors[-1].dtype)
        for tensor in tensors:
            tensor.copy_(rounded)


def _with(config: RunConfig, **changes: dict[str, object]) -> RunConfig:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=changes[name]) for name in changes}
    )


def _batch(config: RunConfig, step: int, device: torch.device) -> MicroBatch:
    """Random images, a little brighter for higher labels, the same on every device."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(_CLASSES, (_SAMPLES,), generator=generator)
    size = build_run_course(config, config.batch.size).phase(0).image_size
    shape = (config.data.channels, *height_width(size))
    images = torch.randn(_SAMPLES, *shape, generator=generator)
    images += labels.view(-1, 1, 1, 1) / _CLASSES
    if config.model.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    lam = torch.rand(_SAMPLES, generator=generator)
    if not config.augment.mixes:
        lam = torch.ones(_SAMPLES)
    columns = (images, labels, labels.roll(1), lam, torch.ones(_SAMPLES))
    return MicroBatch(*(column.to(device) for column in columns))


# --- the check ---


def compiled_checks(context: Context) -> list[Check]:
    """The check of a recipe that compiles its model; none of others."""
    if context.options.config.model.compile == "off":
        return []
    advice = "a run fails too: set model.compile = 'off', unless the message tells what is missing"
    return [Check(_WHAT, _measure, _judge, advice)]


def _measure(context: Context) -> Comparison | str | None:
    """A machine's comparison, or why nothing is compiled there; None on its other ranks."""
    if context.world.rank not in context.machines:
        return None
    options, device = context.options, context.device
    config = options.config
    torch.manual_seed(config.run.seed)
    build_run_schedule(config, build_run_course(config, config.batch.size))  # refuses some
    model = build_run_model(config, _CLASSES)
    mode = build_mode(config, model, device)
    if mode.name == "off":
        return f"model.compile = 'auto' takes 'off': {mode.reason}"
    use_precision(config.batch.precision)
    _leave_out_chance(model)
    try:
        return compare(config, model, device, seconds=10 * options.seconds, say=context.say)
    except RuntimeError as error:  # torch.compile fails, or memory does not suffice
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"{type(error).__name__}: {first_line}") from error


def _leave_out_chance(model: nn.Module) -> None:
    """Turn off dropout and drop path, for which compiled code draws other random numbers."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = 0.0


def _judge(values: list[Comparison | str | None], context: Context) -> Row:
    compared = {rank: each for rank, each in enumerate(values) if isinstance(each, Comparison)}
    if not compared:
        return Row(_WHAT, str(values[0]))
    others = {rank: _said(each.worst) for rank, each in compared.items() if not each.agrees}
    if others:
        advice = "set model.compile = 'off', or train both ways and compare the accuracy"
        return Row(_WHAT, differing(others, context), WARN, advice)
    worst = max(compared.values(), key=lambda each: each.factor)
    return Row(_WHAT, f"the same but for rounding in {worst.steps} steps: {_said(worst.whole)}")


def _said(error: Error) -> str:
    off_by = f"{error.compiled:.1e} compiled, {error.eager:.1e} eager"
    return f"{error.what} is off from float64 by {off_by}"
