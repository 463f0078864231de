"""Gossip in whole steps, what it sends, and what it refuses; its rule is in test_rules.py."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from tests.averaging.test_rules import (
    CLIP,
    LR,
    MOMENTUM,
    Array,
    flat,
    model_of,
    on_two_nodes,
    samples,
)
from tests.data.batches import batch_of_images
from tests.errors import raises
from tests.spawn import spawn
from tests.steps import (
    CPU,
    Case,
    build_state,
    build_update,
    make_step,
    save_checkpoint,
)
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.flat import split_into_buckets
from trainyard.averaging.gossip import Gossip, check_bf16_groups
from trainyard.averaging.topology import rounds
from trainyard.errors import TrainyardError
from trainyard.training.checkpoint import TrainState, load_checkpoint
from trainyard.training.config import LossConfig
from trainyard.training.losses import build_loss
from trainyard.training.update import DynamicLossScale, LossScale, clip_by_norm
from trainyard.world import World

pytestmark = pytest.mark.slow


@pytest.mark.quick
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
    averager = Gossip(AverageConfig(name="gossip", topology="complete"), on_two_nodes(world))
    scale = DynamicLossScale(CPU, 2.0**4) if is_scaled else LossScale(CPU)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    step = make_step(
        model,
        averager,
        world,
        case=Case(micro=micro),
        loss=build_loss(LossConfig(), 0.0, teacher=None, mixes=False),
        update=build_update(model, optimizer, scale, clip=clip_by_norm(CLIP)),
    )
    weights, skipped = [flat(model)], []
    for number in range(5):
        images, labels = samples(number, world.rank)
        if is_bad and number == BAD_STEP and world.rank == world.size - 1:
            images[1, 0, 0, 0] = torch.nan
        skipped.append(int(step(batch_of_images(images.float(), labels), number, None).skipped))
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


# --- moving averages ---


def with_averages(world: World, *names: str) -> TrainState:
    """A model and its moving averages, each of other weights on each rank."""
    torch.manual_seed(world.rank)
    model = nn.Linear(3, 2)
    averager = Gossip(AverageConfig(name="gossip", topology="ring"), world)
    averager.wrap(model)
    emas: dict[str, nn.Module] = {name: nn.Linear(3, 2) for name in names}
    averager.register_emas(emas)
    return build_state(model, torch.optim.SGD(model.parameters(), 0.1), averager, emas=emas)


def go_on_with_fewer_averages(world: World, folder: Path, is_list: bool) -> list[bool]:
    """Whether each moving average is the replica's own again, after the first of three has gone."""
    torch.set_num_threads(1)
    saved = with_averages(world, "ema-0.5", "ema-0.9", "ema-0.99")
    with saved.averager.consensus():
        path = save_checkpoint(saved, folder, world=world)
    if is_list:
        file = path / "replicas" / f"{world.rank:05d}.pt"
        replica = torch.load(file)
        replica["averager"]["own"] = [*replica["averager"]["own"].values()]
        torch.save(replica, file)
    resumed = with_averages(world, "ema-0.9", "ema-0.99")
    load_checkpoint(resumed, path)
    assert not np.array_equal(flat(resumed.model), flat(resumed.emas["ema-0.9"]))
    return [np.array_equal(flat(resumed.emas[n]), flat(saved.emas[n])) for n in resumed.emas]


@pytest.mark.parametrize("is_list", [False, True], ids=["by name", "as 0.2.0 wrote it"])
def test_moving_averages_go_to_those_of_their_names(is_list: bool, tmp_path: Path) -> None:
    """By position each got the one before it, whose decay was another."""
    assert spawn(go_on_with_fewer_averages, 2, tmp_path, is_list) == [[True, True]] * 2


# --- what cannot be ---


@pytest.mark.quick
def test_bf16_is_for_small_groups() -> None:
    check_bf16_groups(rounds("complete", 4), bf16=True)
    check_bf16_groups(rounds("complete", 5), bf16=False)
    check_bf16_groups(rounds("one-peer-exponential", 64), bf16=True)
    with raises("recipe.bf16-group-too-large", limit=4, size=5):
        check_bf16_groups(rounds("complete", 5), bf16=True)


def differs(size: int, local_size: int) -> list[list[list[int]]]:
    """No function of its arguments alone."""
    return [[[0, 1], [2]]] if dist.get_rank() < 2 else [[[0], [1, 2]]]


def fails_on_one(size: int, local_size: int) -> list[list[list[int]]]:
    if dist.get_rank() == 1:
        raise OSError("no such file")
    return [[[0, 1, 2]]]


def codes(world: World) -> list[str]:
    """The codes of the errors about two topologies: functions of this module."""
    found = []
    for name in ("differs", "fails_on_one"):
        with pytest.raises(TrainyardError) as caught:
            Gossip(AverageConfig(name="gossip", topology=f"{__name__}:{name}"), world)
        found.append(caught.value.code)
    return found


def test_what_is_wrong_on_one_rank_ends_all() -> None:
    differing, failing = zip(*spawn(codes, 3), strict=True)
    assert set(differing) == {"recipe.topology-differs-by-rank"}
    assert failing == ("rank.failed", "function.failed", "rank.failed")
