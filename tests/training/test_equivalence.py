"""One process and several with the same global batch take the same steps."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.spawn import spawn
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import Averager
from trainyard.averaging.config import AverageConfig
from trainyard.training.buffers import Buffers
from trainyard.training.config import LossConfig
from trainyard.training.losses import build_loss
from trainyard.training.micro import MicroBatchSize
from trainyard.training.step import MicroBatch, TrainStep
from trainyard.training.update import DynamicLossScale, LossScale, Update, clip_by_norm, no_clip
from trainyard.world import World, gather, total

NUM_STEPS = 12


@dataclass(frozen=True)
class Case:
    """A training without batch norm, told apart by how a global batch is cut."""

    batch: int = 32
    micro: int | None = None
    bad: tuple[int, ...] = ()  # places in the global batch of samples with weight 0
    autocast: torch.dtype | None = None
    clip_norm: float | None = None
    mixed: bool = False


PLAIN = Case()
CASES = {
    "plain": PLAIN,
    "ranks differ by a sample": Case(batch=30),
    "a few samples": Case(batch=7),
    "micro-batches, the last one short": Case(batch=30, micro=4),
    "clipped": Case(batch=30, micro=4, clip_norm=0.1),
    # On 4 ranks all of rank 1's samples are bad, and on 3 a whole micro-batch of a rank is.
    "bad samples": Case(batch=30, micro=3, bad=(0, 1, 5, 9, 13, 17, 21, 25, 29, 3, 6)),
    "mixed": Case(batch=30, micro=4, mixed=True),
    "bf16": Case(batch=30, micro=4, autocast=torch.bfloat16),
    "fp16, with a loss scale that changes": Case(batch=30, micro=4, autocast=torch.float16),
}


class Trained(NamedTuple):
    losses: list[float]  # means over the global batch
    norms: list[float]
    weights: NDArray[np.float32]


def global_batch(case: Case, step: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (case.batch,), generator=generator)
    images = torch.randn(case.batch, 3, 32, 32, generator=generator)
    images += labels.view(-1, 1, 1, 1) / 10  # something to learn
    mixed_labels, lam = labels, torch.ones(case.batch)
    if case.mixed:
        mixed_labels = labels.roll(1)
        lam = torch.rand(case.batch, generator=generator)
    weights = torch.ones(case.batch)
    weights[list(case.bad)] = 0
    return MicroBatch(images, labels, mixed_labels, lam, weights)


def make_step(
    model: nn.Module, averager: Averager, world: World, *, lr: float = 0.05, case: Case = PLAIN
) -> TrainStep:
    device = torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    scale = LossScale(device)
    if case.autocast == torch.float16:
        scale = DynamicLossScale(device, initial=2.0**8, interval=5)
    clip = no_clip if case.clip_norm is None else clip_by_norm(case.clip_norm)
    return TrainStep(
        model=averager.wrap(model),
        averager=averager,
        loss=build_loss(LossConfig(), 0.1, teacher=None, mixes=case.mixed),
        micro=MicroBatchSize(case.micro, world=world, phase=lambda step: 0, report=print),
        to_reserve=lambda: 0,
        buffers=Buffers(model),
        autocast=case.autocast,
        graphs=False,
        set_rates=lambda rates: None,
        update=Update(model, optimizer, scale, clip=clip, measure=lambda step: False),
        update_ema=lambda step: None,
        seed=0,
        world=world,
    )


def train(world: World, case: Case) -> Trained:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    step = make_step(model, AllReduce(AverageConfig(), world), world, case=case)
    losses, norms = [], []
    for number in range(NUM_STEPS):
        whole = global_batch(case, number)
        share = MicroBatch(*(column[world.rank :: world.size] for column in whole))
        stats = step(share, number, 0.05)
        loss, count = total(world, torch.stack([stats.loss_sum, stats.count])).tolist()
        assert count == case.batch - len(case.bad)
        losses.append(loss / count)
        norms.append(float(stats.grad_norm))
    # As an array: a tensor that is sent lives only as long as the process that sends it.
    return Trained(losses, norms, flat(model).numpy())


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector, a copy."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_all(world: World) -> dict[str, Trained]:
    return {name: train(world, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    return train_all(World())


@pytest.fixture(scope="module", params=[3, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Trained]]:
    return spawn(train_all, request.param)


@pytest.mark.parametrize("name", CASES)
def test_same_losses_as_one_process(
    alone: dict[str, Trained], ranks: list[dict[str, Trained]], name: str
) -> None:
    tolerance = 0.02 if CASES[name].autocast else 1e-5
    reference, found = alone[name], ranks[0][name]
    differences = [abs(a / b - 1) for a, b in zip(found.losses, reference.losses, strict=True)]
    print(f"{name} on {len(ranks)}: largest relative difference {max(differences):.2g}")
    assert max(differences) < tolerance
    assert found.norms == pytest.approx(reference.norms, rel=10 * tolerance)
    assert reference.losses[-1] != pytest.approx(reference.losses[0], rel=0.02)  # it did train
    distance = np.linalg.norm(found.weights - reference.weights)
    assert distance < tolerance * np.linalg.norm(reference.weights)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_stay_equal(ranks: list[dict[str, Trained]], name: str) -> None:
    for other in ranks[1:]:
        np.testing.assert_array_equal(other[name].weights, ranks[0][name].weights)
        assert other[name].norms == ranks[0][name].norms


def test_micro_batches_change_nothing(alone: dict[str, Trained]) -> None:
    whole, cut = alone["ranks differ by a sample"], alone["micro-batches, the last one short"]
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5)


def test_the_gradient_is_the_mean_over_the_good_samples() -> None:
    """Written out: the mean of the losses of the samples whose weight is 1."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    batch = global_batch(Case(batch=12, bad=(2, 3, 11)), step=0)
    good = batch.weights > 0
    logits = model(batch.images_BCHW[good])
    mean = nn.functional.cross_entropy(logits, batch.labels[good], label_smoothing=0.1)
    gradients = torch.autograd.grad(mean, list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    make_step(model, AllReduce(AverageConfig(), World()), World(), lr=1.0, case=Case(micro=5))(
        batch, 0, 1.0
    )
    for was, parameter, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(was - parameter.detach(), gradient, rtol=1e-4, atol=1e-6)


def test_a_batch_of_bad_samples_only_moves_nothing() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    before = flat(model)
    batch = global_batch(Case(batch=4, bad=(0, 1, 2, 3)), step=0)
    stats = make_step(model, AllReduce(AverageConfig(), World()), World())(batch, 0, 1.0)
    assert torch.equal(flat(model), before)
    assert [float(stats.loss_sum), float(stats.count), float(stats.grad_norm)] == [0, 0, 0]


# --- how often the ranks talk, and about what ---


def count_messages(world: World, micro: int | None) -> tuple[list[int], int]:
    """All-reduces of gradients by DDP in each of four steps, and its buckets."""
    torch.set_num_threads(1)
    messages: list[int] = []

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        messages[-1] += 1
        buckets.add(bucket.index())
        return allreduce_hook(group, bucket)

    buckets: set[int] = set()
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    step = make_step(model, AllReduce(AverageConfig(), world), world, case=Case(micro=micro))
    assert isinstance(step.model, DistributedDataParallel)
    step.model.register_comm_hook(None, hook)
    for number in range(4):
        messages.append(0)
        share = MicroBatch(*(c[world.rank :: world.size] for c in global_batch(Case(30), number)))
        step(share, number, 0.01)
    return messages, len(buckets)


@pytest.mark.parametrize("micro", [None, 4])
def test_one_all_reduce_per_update(micro: int | None) -> None:
    """Even where ranks have 4 and 3 micro-batches: of 15 samples, or of 8 and 7 pairs."""
    for messages, num_buckets in spawn(count_messages, 4, micro):
        assert num_buckets == 1
        assert messages == [1, 1, 1, 1]  # to try how much fits takes none


def batch_norm_statistics(world: World) -> tuple[list[list[float]], list[float], list[float]]:
    """Every rank's own running means, and mine inside and after consensus()."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(2, 3, 32, 32))
    averager = AllReduce(AverageConfig(), world)
    step = make_step(model, averager, world)
    for number in range(3):
        whole = global_batch(Case(batch=8 * world.size), number)
        step(MicroBatch(*(column[world.rank :: world.size] for column in whole)), number, 0.01)

    def statistics() -> list[float]:
        norm: Any = model[1]
        assert norm.num_batches_tracked == 4
        return [*norm.running_mean.tolist(), *norm.running_var.tolist()]

    own = gather(world, statistics())
    with averager.consensus():
        inside = statistics()
    return own, inside, statistics()


def test_batch_norm_statistics_are_the_mean_in_consensus() -> None:
    ranks = spawn(batch_norm_statistics, 3)
    own = torch.tensor(ranks[0][0])
    assert not torch.allclose(own[0], own[1])  # each rank's are of its own samples
    for _, inside, after in ranks:
        assert inside == ranks[0][1] == after
    torch.testing.assert_close(torch.tensor(ranks[0][1]), own.mean(dim=0))
