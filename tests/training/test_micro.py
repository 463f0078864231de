"""Running out of memory changes how a step is taken, not what comes of it."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.errors import raises
from tests.runs import read, recipe
from tests.spawn import spawn
from tests.steps import Case, flat, global_batch, make_step, share_of, vit
from trainyard.config import RunConfig, load_recipe
from trainyard.course import Course, build_course
from trainyard.errors import TrainyardError
from trainyard.run.build import check_batch_norm
from trainyard.run.trainer import train as train_run
from trainyard.training.micro import MicroBatchSearch, bytes_of_moments
from trainyard.training.step import TrainStep, is_out_of_memory
from trainyard.world import World, total

SAMPLES = 24


@dataclass(frozen=True)
class Shortage:
    """When a device has memory for so many samples only."""

    fits: int = SAMPLES
    step: int = 0  # from which on; before it everything fits
    in_backward: bool = False
    rank: int | None = None  # None for all


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, refuses: Callable[[], bool]) -> Tensor:
        ctx.refuses = refuses
        return images.view_as(images)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.refuses():
            raise torch.OutOfMemoryError("a GPU's memory is full")
        return gradients[0], None


class Small(nn.Module):
    """A model on a device with little memory."""

    def __init__(self, model: nn.Module, shortage: Shortage, rank: int) -> None:
        super().__init__()
        self.model, self.shortage = model, shortage
        self.is_short = shortage.rank in (None, rank)
        self.step = 0
        self.sizes: list[int] = []  # of the micro-batches of all steps, refused ones too
        self.weak: list[weakref.ref[Tensor]] = []

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.sizes.append(len(images_BCHW))

        def refuses() -> bool:
            shortage = self.shortage
            is_due = self.is_short and self.step >= shortage.step
            return is_due and len(images_BCHW) > shortage.fits

        if refuses() and not self.shortage.in_backward:
            raise torch.OutOfMemoryError("a GPU's memory is full")
        out: Tensor = self.model(images_BCHW)
        self.weak.append(weakref.ref(out))
        refused: Tensor = _Refuse.apply(out, refuses)
        return refused


def tiny(batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8)] if batch_norm else [vit()]
    head = [nn.Flatten(), nn.Dropout(dropout), nn.Linear(512 if batch_norm else 10, 10)]
    return nn.Sequential(*body, *head)


@dataclass
class Found:
    losses: list[float]
    weights: list[float]
    sizes: list[list[int]]  # of each step
    said: list[str]
    buffers: list[float]


def search_of(
    step: TrainStep, says: list[str] | None = None, *, phase: int = 1000, least: int = 1
) -> MicroBatchSearch:
    """The search before the step, in a course that changes the batch after `phase` steps."""
    course = build_course(
        "2000 steps",
        epoch_samples=99,
        batch=SAMPLES,
        image_size=8,
        batch_stages=[f"{phase} steps: {SAMPLES + 1}"],
    )
    report = print if says is None else says.append
    return MicroBatchSearch(step, course=course, to_reserve=lambda: 0, report=report, least=least)


def train(
    world: World,
    shortage: Shortage,
    batch_norm: bool = False,
    micro: int | None = None,
    dropout: float = 0.0,
) -> Found:
    """Three steps, whose micro-batch size is sought unless `micro` names it."""
    torch.set_num_threads(1)
    model = Small(tiny(batch_norm, dropout), shortage, world.rank)
    said: list[str] = []
    step = make_step(model, None, world, case=Case(micro=micro))
    search = search_of(step, said)
    losses, sizes = [], []
    for number in range(3):
        model.step, model.sizes = number, []
        whole = global_batch(Case(batch=SAMPLES * world.size), number)
        batch = share_of(whole, world)
        if micro is None:
            search(batch, number)
        stats = step(batch, number, None)
        loss, count = total(world, torch.stack([stats.loss_sum, stats.count])).tolist()
        losses.append(loss / count)
        sizes.append(model.sizes)
    buffers = [float(value) for buffer in model.buffers() for value in buffer.reshape(-1)]
    return Found(losses, flat(model).tolist(), sizes, said, buffers)


def assert_same(found: Found, reference: Found) -> None:
    assert found.losses == pytest.approx(reference.losses, rel=1e-5)
    distance = torch.tensor(found.weights) - torch.tensor(reference.weights)
    assert distance.norm() < 1e-5 * torch.tensor(reference.weights).norm()
    assert reference.losses[-1] != pytest.approx(reference.losses[0], rel=1e-3)  # it did train


# --- one process ---


@pytest.fixture(scope="module")
def alone() -> Found:
    """Without shortage."""
    return train(World(), Shortage())


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_batch_that_does_not_fit_is_taken_in_smaller_parts(
    alone: Found, in_backward: bool
) -> None:
    found = train(World(), Shortage(7, in_backward=in_backward))
    assert_same(found, alone)
    small = [6, 6, 6, 6]
    assert found.sizes == [[24, 12, *small, *small], small, small]  # tried, then done
    assert len(found.said) == 1


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_run_is_the_same_bit_by_bit_whether_its_size_was_sought_or_given(
    batch_norm: bool,
) -> None:
    """Statistics, dropout and optimizer see nothing of a search, nor of the parts that failed."""
    given = train(World(), Shortage(), batch_norm, micro=6, dropout=0.3)
    found = train(World(), Shortage(7, in_backward=True), batch_norm, dropout=0.3)
    assert found.sizes[0] == [24, 12, 6, 6, 6, 6, 6, 6, 6, 6]
    assert (found.losses, found.weights, found.buffers) == (
        given.losses,
        given.weights,
        given.buffers,
    )
    whole = train(World(), Shortage(), batch_norm, micro=24, dropout=0.3)
    assert train(World(), Shortage(), batch_norm, dropout=0.3).weights == whole.weights


def test_a_search_leaves_no_trace() -> None:
    model = tiny(batch_norm=True, dropout=0.3)
    step = make_step(model)
    batch = global_batch(Case(batch=SAMPLES), 0)
    step(batch, 0, None)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    search_of(step)(batch, 1)
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_activations_are_released_before_smaller_parts_are_tried() -> None:
    model = Small(tiny(), Shortage(7, in_backward=True), 0)
    step = make_step(model)
    alive: list[int] = []
    forward = model.forward

    def counted(images_BCHW: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in model.weak))
        return forward(images_BCHW)

    model.forward = counted  # type: ignore[method-assign]
    gc.disable()  # nor does it take a collection of cycles
    try:
        search_of(step)(global_batch(Case(batch=SAMPLES), 0), 0)
    finally:
        gc.enable()
    assert len(alive) == 6 and alive[:3] == [0, 0, 0]


def test_each_phase_is_searched_once() -> None:
    model, said = Small(tiny(), Shortage(7), 0), list[str]()
    step = make_step(model)
    search, batch = search_of(step, said, phase=10), global_batch(Case(batch=SAMPLES), 0)
    search(batch, 3)
    assert [step.micro] == [6]
    model.shortage, model.sizes = Shortage(), []
    search(batch, 9)
    assert model.sizes == []
    search(batch, 10)
    assert [step.micro] == [None]
    assert model.sizes == [24]
    search(batch, 11)
    assert model.sizes == [24]
    search(batch, 5)  # after the weights went back
    assert model.sizes == [24, 24]
    assert len(said) == 1


def test_a_sample_that_does_not_fit_is_an_error_that_says_what_to_do() -> None:
    model = Small(tiny(), Shortage(fits=0), 0)
    with raises("memory.sample-too-large"):
        search_of(make_step(model))(global_batch(Case(batch=SAMPLES), 0), 0)
    assert model.sizes == [24, 12, 6, 3, 2, 1]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("micro", [None, 12])
def test_memory_that_ends_later_ends_the_run_with_what_to_change(
    micro: int | None, in_backward: bool
) -> None:
    now, smaller = micro or 24, (micro or 24) // 2
    with raises("memory.micro-batch-too-large", num_samples=now, suggested=smaller):
        train(World(), Shortage(7, 1, in_backward), micro=micro)


def test_other_errors_are_raised_as_they_are() -> None:
    class Wrong(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    step, batch = make_step(Wrong(1, 1)), global_batch(Case(batch=4), 0)
    for work in (lambda: step(batch, 0, None), lambda: search_of(step)(batch, 0)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            work()


def test_memory_is_kept_for_what_the_first_update_allocates() -> None:
    model = nn.Linear(1000, 1000)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([model.weight])
    assert bytes_of_moments(model, optimizer) == 2 * 4 * 1000 * 1000
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    assert bytes_of_moments(model, optimizer) == 0


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


# --- two processes ---

SHORTAGES = {
    "forward pass": Shortage(7),
    "backward pass": Shortage(7, in_backward=True),
    "backward pass of one rank": Shortage(7, rank=1, in_backward=True),
}


def train_all(world: World) -> dict[str, Found]:
    found = {name: train(world, shortage) for name, shortage in SHORTAGES.items()}
    return found | {"none": train(world, Shortage())}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Found]]:
    return spawn(train_all, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTAGES)
def test_ranks_take_the_smallest_size_of_all(two: list[dict[str, Found]], name: str) -> None:
    for found in two:
        assert_same(found[name], found["none"])
        assert found[name].weights == two[0][name].weights
    assert [found[name].sizes[1] for found in two] == [[6, 6, 6, 6]] * 2
    assert all(len(found[name].said) == 1 for found in two)


def ends(world: World) -> list[str]:
    """The error of each rank if one has no memory at all, and if it later has too little."""
    codes = []
    for shortage in (Shortage(0, rank=1), Shortage(7, 1, in_backward=True, rank=1)):
        try:
            train(world, shortage)
        except TrainyardError as error:
            codes.append(error.code)
        except RuntimeError:
            codes.append("")
    return codes


@pytest.mark.slow
def test_memory_of_one_rank_ends_all_ranks() -> None:
    other, short = spawn(ends, 2, timeout_s=60)
    assert short == ["memory.sample-too-large", "memory.micro-batch-too-large"]
    assert other[0] == "rank.failed"
    assert other[1] == ""  # torch's own: the watchdog has words for it


# --- a limit of the operating system, by the command line ---

LIMITED = """
import resource, sys
from pathlib import Path
import torch, timm, trainyard.run.trainer  # all that is mapped before the limit is set
from trainyard.command_line import main

status = Path("/proc/self/status").read_text().splitlines()
mapped = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (mapped + (int(sys.argv[1]) << 20), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def run_limited(digits: Path, folder: Path, megabytes: int) -> list[dict[str, Any]]:
    """The reports of a run that may take so much more memory than the libraries do."""
    options = {
        "--data": digits,
        "--run": folder,
        "--batch.size": 512,
        "--batch.micro": "auto",
        "--data.image_size": 96,
        "--data.threads": 1,
        "--run.length": "2 steps",
        "--run.log_every": "1 steps",
        "--run.eval_every": "0 steps",
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-c", LIMITED, str(megabytes), "train", "debug", *words]
    # A heap for each thread would take address space by the 64 MB, and one for tensors would not
    # give back what is free in its middle.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    env = {**malloc, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.night
def test_a_process_with_little_memory_has_the_losses_of_one_with_enough(
    digits: Path, tmp_path: Path
) -> None:
    """A library in C that does not look whether it was given memory may end the process."""
    plenty = run_limited(digits, tmp_path / "plenty", 8000)
    check_losses(run_limited(digits, tmp_path / "little", LITTLE_MB), plenty)


def check_losses(little: list[dict[str, Any]], plenty: list[dict[str, Any]]) -> None:
    """Compare two runs of two steps; the first run had to take smaller micro-batches."""
    smaller = [
        [line for line in lines if line.get("event") == "smaller micro-batch"]
        for lines in (little, plenty)
    ]
    assert smaller[0] and not smaller[1]
    losses, reference = (
        [line["loss"] for line in lines if line["kind"] == "train"] for lines in (little, plenty)
    )
    assert len(losses) == 2
    assert losses == pytest.approx(reference, rel=1e-5)


def test_a_run_with_little_memory_has_the_losses_of_one_with_enough(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises its own error, for an allocation that no machine has memory for."""
    short = {"run.length": "2 steps", "run.eval_every": "0 steps"}
    config = recipe(digits, short, {"batch.micro": "auto"})
    forward = VisionTransformer.forward

    def forward_if_it_fits(self: VisionTransformer, images_BCHW: Tensor, **options: Any) -> Any:
        if self.training and len(images_BCHW) > 20:
            torch.empty(2**55, dtype=torch.uint8)
        return forward(self, images_BCHW, **options)

    for name in ("plenty", "little"):
        train_run(config, tmp_path / name, world=World(), console=Console(quiet=True))
        monkeypatch.setattr(VisionTransformer, "forward", forward_if_it_fits)
    check_losses(read(tmp_path / "little"), read(tmp_path / "plenty"))


LITTLE_MB = 520
"""The activations of all 512 samples would take some 600, and the rest takes some 150."""


# --- batch norm, which cannot normalise a single image ---


def course_of(config: RunConfig) -> Course:
    return build_course("4 steps", epoch_samples=99, batch=config.batch.size, image_size=8)


@pytest.mark.parametrize(("micro", "sizes"), [(4, [3, 3, 3]), (8, [5, 4]), (None, [9])])
def test_parts_are_even(micro: int | None, sizes: list[int]) -> None:
    """9 = 4 + 4 + 1 ended with torch's "Expected more than 1 value per channel"."""
    model = Small(tiny(batch_norm=True), Shortage(), 0)
    make_step(model, case=Case(micro=micro))(global_batch(Case(batch=9), 0), 1, None)
    assert model.sizes[-len(sizes) :] == sizes


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "is_refused"),
    [
        ("1", "auto", 1, True),
        ("3", "auto", 2, True),
        ("8", "1", 1, True),
        ("3", "2", 1, True),
        ("9", "4", 1, False),
        ("4", "auto", 2, False),
    ],
)
def test_a_single_image_is_refused_before_the_run(
    batch: str, micro: str, ranks: int, is_refused: bool
) -> None:
    config = load_recipe("debug", {"batch.size": batch, "batch.micro": micro})
    world = World(0, ranks, 0, ranks)
    check_batch_norm(config, tiny(), course_of(config), world)  # has no batch norm
    with raises("recipe.single-image-in-forward") if is_refused else nullcontext():
        check_batch_norm(config, tiny(batch_norm=True), course_of(config), world)


def test_batch_norm_is_not_halved_to_a_single_image() -> None:
    model = Small(tiny(batch_norm=True), Shortage(1), 0)
    with raises("memory.samples-too-large", num_samples=2):
        search_of(make_step(model), least=2)(global_batch(Case(batch=4), 0), 0)
    assert model.sizes == [4, 2]
