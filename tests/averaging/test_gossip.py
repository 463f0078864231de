"""Gossip on real ranks, beside its rule written out for ranks that one process plays."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.spawn import spawn
from tests.steps import CPU, build_update, make_step, plain_batch
from tests.steps import Case as Stepping
from trainyard.averaging import gossip
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.flat import split_into_buckets
from trainyard.averaging.gossip import Gossip, check_bf16_groups
from trainyard.averaging.topology import rounds
from trainyard.errors import PeerError, RecipeError
from trainyard.training.config import LossConfig
from trainyard.training.losses import build_loss
from trainyard.training.update import DynamicLossScale, LossScale, clip_by_norm
from trainyard.world import World

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
STEPS = 7
LR, MOMENTUM, CLIP = 0.2, 0.9, 0.3
STAR = "tests.averaging.test_topology:star"  # in which some rest


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def samples(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64) + 0.2 * rank
    return images, torch.randint(3, (4,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LR, MOMENTUM)


def flat(model: nn.Module) -> Array:
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()])


class Case(NamedTuple):
    topology: str
    overlap: bool | None = None
    compress: str | None = None

    @property
    def config(self) -> AverageConfig:
        return AverageConfig(name="gossip", **self._asdict())


def on_two_nodes(world: World) -> World:
    node, local_rank = divmod(world.rank, world.size // 2)
    local_size = world.size // 2
    return replace(world, local_rank=local_rank, local_size=local_size, node=node, num_nodes=2)


class Replica:
    """A model that goes on step by step."""

    def __init__(self, world: World, case: Case, optimizer: str = "sgd") -> None:
        torch.set_num_threads(1)
        gossip._BUCKET_BYTES = 300  # so that there are several
        self.world, self.model = world, model_of()
        self.averager = Gossip(case.config, on_two_nodes(world) if world.size == 4 else world)
        self.wrapped = self.averager.wrap(self.model)
        parameters = self.model.parameters()
        made: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: sgd(self.model),
            "sgd, fused": lambda: torch.optim.SGD(parameters, LR, MOMENTUM, fused=True),
            "adamw, fused": lambda: torch.optim.AdamW(parameters, 0.01, fused=True),
        }
        self.update = build_update(self.model, made[optimizer](), clip=clip_by_norm(CLIP))

    def backward(self, step: int) -> None:
        images, labels = samples(step, self.world.rank)
        divisor = self.averager.divisor(torch.tensor(4.0))
        loss = F.cross_entropy(self.wrapped(images), labels, reduction="sum")
        (loss / divisor()).backward()  # type: ignore[no-untyped-call]

    def train(self, *, divided: Callable[[int], bool] | None = None) -> list[Array]:
        """The weights after each step; `divided`: whether a step goes bucket by bucket."""
        found = []
        for step in range(STEPS):
            self.backward(step)
            ready = self.averager.ready_parameters
            if divided is None:
                self.update(step, ready)
            else:
                is_divided = divided(step)
                self.update(step, lambda step, _: ready(step, is_divided))  # noqa: B023
            found.append(flat(self.model))
        with self.averager.consensus():  # nothing stays under way
            return found


# --- the rule ---


def simulate(size: int, local_size: int, case: Case) -> list[list[Array]]:
    """The same steps in one process: weights[rank] after each."""
    found = rounds(case.topology, size, local_size)
    model = model_of()
    weights = [flat(model)] * size
    velocities = [np.zeros_like(weights[0])] * size
    overlap = case.overlap is not False

    def mixed(weights: list[Array], step: int) -> list[Array]:
        groups = found[step % len(found)]
        mine = [next(group for group in groups if rank in group) for rank in range(size)]
        sent = [halved(own) if case.compress else own for own in weights]
        means = [np.mean([sent[peer] for peer in group], axis=0) for group in mine]
        moves = [mean - own for mean, own in zip(means, sent, strict=True)]
        return [own + move for own, move in zip(weights, moves, strict=True)]

    history = []
    for step in range(STEPS):
        grads = [_gradient(model, weights[rank], *samples(step, rank)) for rank in range(size)]
        clipped = [grad * min(1, CLIP / (np.linalg.norm(grad) + 1e-6)) for grad in grads]
        velocities = [MOMENTUM * v + grad for v, grad in zip(velocities, clipped, strict=True)]
        if overlap:
            weights = mixed(weights, step)
        weights = [own - LR * v for own, v in zip(weights, velocities, strict=True)]
        if not overlap:
            weights = mixed(weights, step)
        history.append(weights)
    return [list(of_rank) for of_rank in zip(*history, strict=True)]


def halved(weights: Array) -> Array:
    rounded: Array = torch.from_numpy(weights).to(torch.bfloat16).double().numpy()
    return rounded


def _gradient(model: nn.Module, weights: Array, images: Tensor, labels: Tensor) -> Array:
    vector_to_parameters(torch.from_numpy(weights), model.parameters())
    loss = F.cross_entropy(model(images), labels)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    return np.concatenate([grad.numpy().ravel() for grad in grads])


ON_FOUR = [
    Case("complete"),
    Case("ring"),
    Case("ring", overlap=False),
    Case("one-peer-exponential", overlap=True),
    Case("one-peer-exponential", overlap=False),
    Case("alternating-exponential-ring"),
    Case("complete", compress="bf16"),
    Case("one-peer-exponential", overlap=False, compress="bf16"),
]
ON_THREE = [Case("ring"), Case("complete"), Case(STAR)]


def train_each(world: World, cases: list[Case]) -> list[list[Array]]:
    return [Replica(world, case).train() for case in cases]


@pytest.mark.parametrize(("size", "cases"), [(4, ON_FOUR), (3, ON_THREE)])
def test_the_rule_written_out(size: int, cases: list[Case]) -> None:
    ranks = spawn(train_each, size, cases)
    for number, case in enumerate(cases):
        expected = simulate(size, 2 if size == 4 else size, case)
        for rank in range(size):
            np.testing.assert_allclose(ranks[rank][number], expected[rank], rtol=1e-12, atol=1e-13)
        apart = np.abs(expected[0][-1] - expected[-1][-1]).max()
        assert apart > 1e-3  # it is no easy case


# --- beside plain averaging ---


def beside_plain_averaging(world: World) -> tuple[bool, float]:
    """Whether weights are the same in every step, and how far gradients averaged end from them."""
    torch.set_num_threads(1)
    model, plain, by_gradient = model_of(), model_of(), model_of()
    averager = Gossip(AverageConfig(name="gossip", topology="complete", overlap=False), world)
    averager.wrap(model)
    optimizers = [sgd(each) for each in (model, plain, by_gradient)]
    is_same = True
    for step in range(STEPS):
        images, labels = samples(step, world.rank)
        for each in (model, plain, by_gradient):
            each.zero_grad()
            F.cross_entropy(each(images), labels).backward()  # type: ignore[no-untyped-call]
        for grad in [p.grad for p in by_gradient.parameters() if p.grad is not None]:
            dist.all_reduce(grad)
            grad /= world.size
        for _ in averager.ready_parameters(step, False):
            for optimizer in optimizers:
                optimizer.step()
        backwards = [*plain.parameters()][::-1]
        sent = parameters_to_vector(backwards).detach()
        dist.all_reduce(sent)
        vector_to_parameters(sent / world.size, backwards)
        is_same &= np.array_equal(flat(model), flat(plain))
    return is_same, float(np.abs(flat(model) - flat(by_gradient)).max())


@pytest.mark.quick
def test_complete_without_overlap_is_all_reduce() -> None:
    """Of weights after the update, bit for bit; of gradients, by SGD on equal shares, nearly."""
    for is_same, difference in spawn(beside_plain_averaging, 4):
        assert is_same
        assert difference < 1e-14


# --- bucket by bucket: what is updated is sent while the rest is not yet updated ---

DIVIDED = [
    Case("complete"),
    Case("one-peer-exponential"),
    Case(STAR),
    Case("complete", compress="bf16"),
    Case("ring", overlap=False),
]


def train_divided(world: World) -> list[bool]:
    # A replica may go back and forth by itself.
    ways: list[Callable[[int], bool]] = [lambda step: bool(step % 3 or world.rank > 1)]
    ways.append(lambda step: False)
    found = []
    for case in DIVIDED:
        for name in ("sgd, fused", "adamw, fused"):
            one, other = (Replica(world, case, name).train(divided=way) for way in ways)
            found.append(np.array_equal(one, other))
    return found


def test_part_by_part_is_the_same_bit_by_bit() -> None:
    assert spawn(train_divided, 4) == [[True] * 2 * len(DIVIDED)] * 4


def note_order(world: World) -> list[str]:
    """The events of each bucket in a step: no bucket waits for all to arrive or to be updated."""
    replica = Replica(world, Case("complete"))
    events: list[str] = []

    def noted(name: str, number: int, function: Any) -> Any:
        def note(*words: Any) -> None:
            events.append(f"{name} {number}")
            function(*words)

        return note

    for number, bucket in enumerate(replica.averager._buckets):
        for name in ("wait", "mix", "send"):
            setattr(bucket, name, noted(name, number, getattr(bucket, name)))
    for step in range(2):
        replica.backward(step)
        events.clear()
        for number, _ in enumerate(replica.averager.ready_parameters(step, True)):
            events.append(f"update {number}")
    told = list(events)
    with replica.averager.consensus():
        return told


def test_what_is_updated_is_sent_at_once() -> None:
    """And what has arrived is mixed at once, though the rest has not."""
    for told in spawn(note_order, 2):
        number = len({event.split()[1] for event in told})
        assert number > 2
        turns = ("wait", "mix", "update", "send")
        assert told == [f"{what} {n}" for n in range(number) for what in turns]


def test_the_first_buckets_are_small() -> None:
    """So that the network rests as short as may be while the first one is updated."""
    tensors = [torch.zeros(2) for _ in range(40)]  # of 8 bytes each
    assert [len(some) for some in split_into_buckets(tensors, 100, 8)] == [1, 4, 12, 12, 11]
    assert [len(some) for some in split_into_buckets(tensors, 100)] == [12, 12, 12, 4]
    assert [len(some) for some in split_into_buckets(tensors, 100, 1000)] == [12, 12, 12, 4]
    tensors.insert(1, torch.zeros(99))
    assert [len(some) for some in split_into_buckets(tensors, 100, 8)] == [1, 1, 12, 12, 12, 3]


# --- a whole step: micro-batches, what is not finite ---


BAD_STEP = 2


class Stepped(NamedTuple):
    weights: list[Array]  # before the first step and after each
    skipped: list[int]
    scale: float


def take_steps(
    world: World,
    *,
    micro: int | None = None,
    is_scaled: bool = False,
    is_bad: bool = False,
) -> Stepped:
    """`is_bad`: with one sample on the last rank that is no number."""
    model = model_of().float()
    averager = Gossip(Case("complete").config, on_two_nodes(world))
    scale = DynamicLossScale(CPU, 2.0**4) if is_scaled else LossScale(CPU)
    step = make_step(
        model,
        averager,
        world,
        case=Stepping(micro=micro),
        loss=build_loss(LossConfig(), 0.0, teacher=None, mixes=False),
        update=build_update(model, sgd(model), scale, clip=clip_by_norm(CLIP)),
    )
    weights, skipped = [flat(model)], []
    for number in range(5):
        images, labels = samples(number, world.rank)
        if is_bad and number == BAD_STEP and world.rank == world.size - 1:
            images[1, 0, 0, 0] = torch.nan
        skipped.append(int(step(plain_batch(images.float(), labels), number, None).skipped))
        weights.append(flat(model))
    with averager.consensus():
        return Stepped(weights, skipped, float(scale.value))


def take_steps_in_all_ways(world: World) -> list[Stepped]:
    torch.set_num_threads(1)
    return [
        take_steps(world),
        take_steps(world, micro=3),
        take_steps(world, is_bad=True),
        take_steps(world, is_scaled=True, is_bad=True),
    ]


@pytest.fixture(scope="module")
def stepped() -> list[tuple[Stepped, ...]]:
    """Of each way, what came of it on each rank."""
    return list(zip(*spawn(take_steps_in_all_ways, 4), strict=True))


def test_micro_batches_change_nothing(stepped: list[tuple[Stepped, ...]]) -> None:
    wholes, micros = stepped[:2]
    for whole, micro in zip(wholes, micros, strict=True):
        np.testing.assert_allclose(micro.weights, whole.weights, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_is_skipped_by_one_replica_alone(
    stepped: list[tuple[Stepped, ...]],
) -> None:
    """It goes on from the mean; the others notice nothing."""
    good, bad = stepped[0], stepped[2]
    assert [rank.skipped for rank in bad] == [[0] * 5] * 3 + [[0, 0, 1, 0, 0]]
    mean = np.mean([rank.weights[BAD_STEP] for rank in bad], axis=0)
    np.testing.assert_allclose(bad[3].weights[BAD_STEP + 1], mean, rtol=1e-5, atol=1e-7)
    for one, other in list(zip(good, bad, strict=True))[:3]:
        for step in range(BAD_STEP + 2):
            assert np.array_equal(one.weights[step], other.weights[step])
    assert np.isfinite([rank.weights for rank in bad]).all()


def test_each_replica_has_a_loss_scale_of_its_own(stepped: list[tuple[Stepped, ...]]) -> None:
    """All replicas used to wait for the slowest in every step, to skip an overflow together."""
    assert [rank.scale for rank in stepped[3]] == [2.0**4] * 3 + [2.0**3]
    assert [rank.skipped for rank in stepped[3]] == [rank.skipped for rank in stepped[2]]


# --- what is sent ---


def note_what_is_sent(world: World) -> tuple[list[list[int]], bool, Array]:
    """Sizes of the messages of four steps, whether strides stayed, and a weight that is frozen."""
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)  # they are made alike nevertheless
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    model[1].weight.requires_grad_(False)
    averager = Gossip(AverageConfig(name="gossip", topology="ring"), world)
    averager.wrap(model)
    strides = [parameter.stride() for parameter in model.parameters()]
    sent: list[list[int]] = []
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent[-1].append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = noted
    for step in range(4):
        sent.append([])
        list(averager.ready_parameters(step, False))
    dist.all_reduce = all_reduce
    with averager.consensus():
        kept = strides == [parameter.stride() for parameter in model.parameters()]
        return sent, kept, flat(model)


def test_what_is_sent() -> None:
    """One message for what is trained, and none in a round in which a replica rests."""
    trained = 4 * 27 + 4 + 4 + 2 * 36 + 2
    ranks = spawn(note_what_is_sent, 3)
    for rank, (sent, kept, weights) in enumerate(ranks):
        # The first step begins two rounds, its own and the next; rank r rests in round r.
        in_round = [[] if number % 3 == rank else [trained] for number in range(5)]
        assert sent == [in_round[0] + in_round[1], *in_round[2:]]
        assert kept
        np.testing.assert_allclose(weights, ranks[0][2], rtol=1e-6, atol=1e-7)


# --- what cannot be ---


def test_bf16_is_for_small_groups() -> None:
    check_bf16_groups(rounds("complete", 4), bf16=True)
    check_bf16_groups(rounds("complete", 5), bf16=False)
    check_bf16_groups(rounds("one-peer-exponential", 64), bf16=True)
    with pytest.raises(RecipeError, match=r"^average\.compress = 'bf16' .* up to 4; .* up to 5"):
        check_bf16_groups(rounds("complete", 5), bf16=True)


def differs(size: int, local_size: int) -> list[list[list[int]]]:
    """No function of its arguments alone."""
    return [[[0, 1], [2]]] if dist.get_rank() < 2 else [[[0], [1, 2]]]


def fails_on_one(size: int, local_size: int) -> list[list[list[int]]]:
    if dist.get_rank() == 1:
        raise OSError("no such file")
    return [[[0, 1, 2]]]


def complaints(world: World) -> list[str]:
    """About functions of one's own."""
    messages = []
    for name in ("differs", "fails_on_one"):
        with pytest.raises((RecipeError, PeerError)) as caught:
            Gossip(Case(f"{__name__}:{name}").config, world)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_is_told_by_all_ranks() -> None:
    for differing, failing in spawn(complaints, 3):
        assert f"'{__name__}:differs' gives rank 2 other rounds than rank 0" in differing
        assert "failed: OSError: no such file (tests/averaging/test_gossip.py, line" in failing
