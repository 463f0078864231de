"""One process and several with the same global batch take the same steps."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.spawn import spawn
from tests.steps import PLAIN, Case, flat, global_batch, make_step, share_of, vit
from trainyard.world import World, total

pytestmark = pytest.mark.slow

NUM_STEPS = 7  # fp16 has a larger scale from the fifth on
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


def train(world: World, case: Case) -> Trained:
    model = vit()
    step = make_step(model, None, world, case=case)
    losses, norms = [], []
    for number in range(NUM_STEPS):
        stats = step(share_of(global_batch(case, number), world), number, 0.05)
        loss, count = total(world, torch.stack([stats.loss_sum, stats.count])).tolist()
        assert count == case.batch - len(case.bad)
        losses.append(loss / count)
        norms.append(float(stats.grad_norm))
    # As an array: a tensor that is sent lives only as long as the process that sends it.
    return Trained(losses, norms, flat(model).numpy())


def train_all(world: World) -> dict[str, Trained]:
    torch.set_num_threads(1)
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
    assert found.losses == pytest.approx(reference.losses, rel=tolerance)
    assert found.norms == pytest.approx(reference.norms, rel=10 * tolerance)
    distance = np.linalg.norm(found.weights - reference.weights)
    limit = tolerance * np.linalg.norm(reference.weights)
    assert distance < limit < np.linalg.norm(reference.weights - flat(vit()).numpy()) / 2
    for other in ranks[1:]:
        np.testing.assert_array_equal(other[name].weights, found.weights)
        assert other[name].norms == found.norms


def test_micro_batches_change_nothing(alone: dict[str, Trained]) -> None:
    whole, cut = alone["ranks differ by a sample"], alone["micro-batches, the last one short"]
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.quick
def test_the_gradient_is_the_mean_over_the_good_samples() -> None:
    """Written out: the mean of the losses of the samples whose weight is 1."""
    model = vit()
    batch = global_batch(Case(batch=12, bad=(2, 3, 11)), step=0)
    good = batch.weights > 0
    logits = model(batch.images_BCHW[good])
    mean = nn.functional.cross_entropy(logits, batch.labels[good], label_smoothing=0.1)
    gradients = torch.autograd.grad(mean, list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    make_step(model, lr=1.0, case=Case(micro=5))(batch, 0, 1.0)
    for was, parameter, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(was - parameter.detach(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.quick
def test_a_batch_of_bad_samples_only_moves_nothing() -> None:
    model = vit()
    before = flat(model)
    stats = make_step(model)(global_batch(Case(batch=4, bad=(0, 1, 2, 3)), step=0), 0, 1.0)
    assert torch.equal(flat(model), before)
    assert [float(stats.loss_sum), float(stats.count), float(stats.grad_norm)] == [0, 0, 0]


def count_messages(world: World, micro: int | None) -> tuple[list[int], int]:
    """All-reduces of gradients by DDP in each of four steps, and its buckets."""
    torch.set_num_threads(1)
    messages: list[int] = []
    buckets: set[int] = set()

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        messages[-1] += 1
        buckets.add(bucket.index())
        return allreduce_hook(group, bucket)

    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    step = make_step(model, None, world, case=Case(micro=micro))
    assert isinstance(step.passes.model, DistributedDataParallel)
    step.passes.model.register_comm_hook(None, hook)
    for number in range(4):
        messages.append(0)
        step(share_of(global_batch(Case(30), number), world), number, 0.01)
    return messages, len(buckets)


@pytest.mark.parametrize("micro", [None, 4])
def test_one_all_reduce_per_update(micro: int | None) -> None:
    """Even where ranks have 4 and 3 micro-batches: of 15 samples, or of 8 and 7 pairs."""
    for found in spawn(count_messages, 4, micro):
        assert found == ([1, 1, 1, 1], 1)
