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
from tests.training.test_equivalence import Case as Stepping
from tests.training.test_equivalence import make_step
from trainyard.averaging import gossip
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.gossip import Gossip, check_bf16_groups
from trainyard.averaging.topology import expand_nodes, rounds
from trainyard.errors import PeerError, RecipeError
from trainyard.model.ema import Ema
from trainyard.training.config import LossConfig
from trainyard.training.losses import build_loss
from trainyard.training.step import MicroBatch
from trainyard.training.update import DynamicLossScale, LossScale, Update, clip_by_norm
from trainyard.world import World

Array = np.ndarray[Any, Any]
CPU = torch.device("cpu")
STEPS = 7
LR, MOMENTUM, CLIP = 0.2, 0.9, 0.3


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


def update_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Update:
    return Update(
        model, optimizer, LossScale(CPU), clip=clip_by_norm(CLIP), measure=lambda step: False
    )


def flat(model: nn.Module) -> Array:
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()])


# --- the rule ---


class Case(NamedTuple):
    topology: str
    overlap: bool | None = None
    mixing: float | None = None
    hierarchical: bool = False
    compress: str | None = None

    @property
    def config(self) -> AverageConfig:
        return AverageConfig(name="gossip", **self._asdict())


def train(world: World, case: Case) -> list[Array]:
    """A rank's weights after each step."""
    model = model_of()
    averager = Gossip(case.config, world)
    wrapped = averager.wrap(model)
    update = update_of(model, sgd(model))
    found = []
    for step in range(STEPS):
        images, labels = samples(step, world.rank)
        divisor = averager.divisor(torch.tensor(4.0))
        loss = F.cross_entropy(wrapped(images), labels, reduction="sum")
        (loss / divisor()).backward()  # type: ignore[no-untyped-call]
        update(step, averager.ready_parameters)
        found.append(flat(model))
    with averager.consensus():  # nothing stays under way
        return found


def simulate(size: int, local_size: int, case: Case) -> list[list[Array]]:
    """The same in one process: weights[rank] after each step."""
    found = rounds(case.topology, size // local_size if case.hierarchical else size, local_size)
    if case.hierarchical:
        found = expand_nodes(found, local_size)
    model = model_of()
    weights = [flat(model)] * size
    velocities = [np.zeros_like(weights[0])] * size
    overlap, mixing = case.overlap is not False, case.mixing or 1.0

    def mixed(weights: list[Array], step: int) -> list[Array]:
        groups = found[step % len(found)]
        mine = [next(group for group in groups if rank in group) for rank in range(size)]
        sent = [halved(own) if case.compress else own for own in weights]
        means = [np.mean([sent[peer] for peer in group], axis=0) for group in mine]
        moves = [mean - own for mean, own in zip(means, sent, strict=True)]
        return [own + mixing * move for own, move in zip(weights, moves, strict=True)]

    history = []
    for step in range(STEPS):
        grads = [_gradient(model, weights[rank], *samples(step, rank)) for rank in range(size)]
        if case.hierarchical:
            nodes = [
                range(rank - rank % local_size, rank - rank % local_size + local_size)
                for rank in range(size)
            ]
            grads = [np.mean([grads[rank] for rank in node], axis=0) for node in nodes]
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
    Case("complete", overlap=False, mixing=0.5),
    Case("ring"),
    Case("ring", mixing=0.25),
    Case("one-peer-exponential", overlap=True),
    Case("one-peer-exponential", overlap=False),
    Case("alternating-exponential-ring"),
    Case("one-peer-exponential", hierarchical=True),
    Case("ring", overlap=False, mixing=0.5, hierarchical=True),
    Case("complete", mixing=0.5, compress="bf16"),
    Case("one-peer-exponential", hierarchical=True, compress="bf16"),
]
ON_THREE = [Case("ring"), Case("complete"), Case("tests.averaging.test_topology:star", mixing=0.5)]


def on_two_nodes(world: World) -> World:
    rank, local_size = world.rank, world.size // 2
    return replace(
        world,
        local_rank=rank % local_size,
        local_size=local_size,
        node=rank // local_size,
        num_nodes=2,
    )


def train_each(world: World, cases: list[Case]) -> list[list[Array]]:
    torch.set_num_threads(1)
    gossip._BUCKET_BYTES = 300  # so that there are several
    return [train(on_two_nodes(world) if world.size == 4 else world, case) for case in cases]


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


def test_complete_without_overlap_is_all_reduce() -> None:
    """Of weights after the update, bit for bit; of gradients, by SGD on equal shares, nearly."""
    for is_same, difference in spawn(beside_plain_averaging, 4):
        assert is_same
        assert difference < 1e-14


# --- consensus, and going back ---


def consensus_in_the_midst(world: World) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = model_of()
    ema = Ema(model, 0.5, warmup=False, cpu=True)
    averager = Gossip(AverageConfig(name="gossip", topology="ring", mixing=0.5), world)
    wrapped = averager.wrap(model)
    averager.register_ema(ema.module)
    optimizer = sgd(model)
    update = update_of(model, optimizer)

    def both() -> Array:
        return np.concatenate([flat(model), flat(ema.module)])

    def go(steps: range) -> Array:
        for step in steps:
            images, labels = samples(step, world.rank)
            F.cross_entropy(wrapped(images), labels).backward()  # type: ignore[no-untyped-call]
            update(step, averager.ready_parameters)
            ema.update(step)
        return both()

    own = go(range(3))
    moments = {p: dict(s) for p, s in optimizer.state.items()}
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in moments.items()}
    with averager.consensus():
        inside, state = both(), averager.state_dict()
    after = both()
    first = go(range(3, 6))
    # Back, while an exchange of other weights is under way.
    averager.load_state_dict(state)
    for parameter, saved in moments.items():
        optimizer.state[parameter] = saved
    again = go(range(3, 6))
    averager.load_state_dict({})  # as of another number of replicas: go on from what is there
    kept = both()
    figures = averager.metrics()
    return {
        "own": own,
        "inside": inside,
        "after": after,
        "first": first,
        "again": again,
        "kept": kept,
        **figures,
    }


def test_consensus_is_the_mean_and_changes_nothing() -> None:
    ranks = spawn(consensus_in_the_midst, 4)
    mean = np.mean([rank["own"] for rank in ranks], axis=0)
    half = len(mean) // 2
    distance = np.mean([np.sum((rank["own"] - mean)[:half] ** 2) for rank in ranks]) ** 0.5
    assert distance > 0.01
    for rank in ranks:
        np.testing.assert_allclose(rank["inside"], mean, rtol=1e-13, atol=1e-15)
        assert np.array_equal(rank["inside"], ranks[0]["inside"])
        assert np.array_equal(rank["after"], rank["own"])
        assert rank["consensus_distance"] == pytest.approx(distance, rel=1e-12)
        assert np.array_equal(rank["first"], rank["again"])
        assert not np.array_equal(rank["first"], rank["own"])
        assert np.array_equal(rank["kept"], rank["again"])


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
    hierarchical: bool = False,
    shares_scale: bool = False,
    is_bad: bool = False,
) -> Stepped:
    """`is_bad`: with one sample on the last rank that is no number."""
    model = model_of().float()
    averager = Gossip(Case("complete", hierarchical=hierarchical).config, on_two_nodes(world))
    scale = DynamicLossScale(CPU, 2.0**4) if shares_scale else LossScale(CPU)
    as_it_is: Callable[[Tensor], Tensor] = lambda value: value  # noqa: E731
    step = replace(
        make_step(model, averager, world, case=Stepping(micro=micro)),
        loss=build_loss(LossConfig(), 0.0, teacher=None, mixes=False),
        update=Update(
            model,
            sgd(model),
            scale,
            clip=clip_by_norm(CLIP),
            measure=lambda step: False,
            all_reduce_max=averager.all_reduce_max if shares_scale else as_it_is,
        ),
    )
    weights, skipped = [flat(model)], []
    for number in range(5):
        images, labels = samples(number, world.rank)
        if is_bad and number == BAD_STEP and world.rank == world.size - 1:
            images[1, 0, 0, 0] = torch.nan
        batch = MicroBatch(images.float(), labels, labels, torch.ones(4), torch.ones(4))
        skipped.append(int(step(batch, number, None).skipped))
        weights.append(flat(model))
    with averager.consensus():
        return Stepped(weights, skipped, float(scale.value))


def take_steps_in_all_ways(world: World) -> list[Stepped]:
    torch.set_num_threads(1)
    return [
        take_steps(world),
        take_steps(world, micro=3),
        take_steps(world, is_bad=True),
        take_steps(world, shares_scale=True, is_bad=True),
        take_steps(world, hierarchical=True),
        take_steps(world, hierarchical=True, micro=3),
    ]


@pytest.fixture(scope="module")
def stepped() -> list[tuple[Stepped, ...]]:
    """Of each way, what came of it on each rank."""
    return list(zip(*spawn(take_steps_in_all_ways, 4), strict=True))


@pytest.mark.parametrize("hierarchical", [False, True])
def test_micro_batches_change_nothing(
    stepped: list[tuple[Stepped, ...]], hierarchical: bool
) -> None:
    wholes, micros = (stepped[4], stepped[5]) if hierarchical else (stepped[0], stepped[1])
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


def test_with_a_loss_scale_all_skip_together(stepped: list[tuple[Stepped, ...]]) -> None:
    for rank in stepped[3]:
        assert rank.skipped == [0, 0, 1, 0, 0]
        assert rank.scale == 2.0**3
        mean = np.mean([each.weights[BAD_STEP] for each in stepped[3]], axis=0)
        np.testing.assert_allclose(rank.weights[BAD_STEP + 1], mean, rtol=1e-5, atol=1e-7)


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
    """About nodes of two ranks and of one, and about functions of one's own."""
    places = [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    node, local_rank, local_size = places[world.rank]
    uneven = replace(world, node=node, local_rank=local_rank, local_size=local_size, num_nodes=2)
    said = []
    for case, on in (
        (Case("complete", hierarchical=True), uneven),
        (Case(f"{__name__}:differs"), world),
        (Case(f"{__name__}:fails_on_one"), world),
    ):
        with pytest.raises((RecipeError, PeerError)) as caught:
            Gossip(case.config, on)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_is_told_by_all_ranks() -> None:
    for uneven, differing, failing in spawn(complaints, 3):
        assert "needs nodes with equally many ranks" in uneven
        assert "here the nodes have 2, 1 ranks" in uneven
        assert f"'{__name__}:differs' gives rank 2 other rounds than rank 0" in differing
        assert "failed: OSError('no such file')" in failing
