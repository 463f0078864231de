"""Messages and steps: closed forms, plain Python, and what averagers really send."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.spawn import spawn
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.topology import rounds
from trainyard.errors import InputError
from trainyard.estimate.network import (
    LINKS,
    Bucket,
    Exchange,
    Floats,
    Jitter,
    Link,
    Network,
    Span,
    all_reduce_seconds,
    all_reduced,
    build_buckets,
    build_exchange,
    describe,
    exchanged,
    gather_seconds,
    sent_bytes,
    sharded,
    step_time,
    total_bytes,
)
from trainyard.world import World

SLOW, FAST = Link(1e-3, 1e8), Link(1e-6, 1e11)
FLAT = Network(1, SLOW, SLOW, algorithms=("ring",))
NODES_OF_4 = Network(4, FAST, SLOW, algorithms=("ring",))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_sends_twice_all_but_its_own_part(ranks: int) -> None:
    wanted = 2 * (ranks - 1) / ranks * 3e6 / 1e8 + 2 * (ranks - 1) * 1e-3
    assert all_reduce_seconds(3e6, Span(ranks, ranks), FLAT) == pytest.approx(wanted)
    assert gather_seconds(3e6, Span(ranks, ranks), FLAT) == pytest.approx(wanted / 2)


@pytest.mark.parametrize(
    ("span", "wanted"),
    [
        (Span(1, 1), 0),
        (Span(4, 1), 2 * 3 / 4 * 3e6 / 1e11 + 6e-6),
        (Span(8, 2), 2 * 7 / 8 * 3e6 / 1e8 + 2 * 1e-3 + 12 * 1e-6),
    ],
    ids=["alone", "inside a node", "over nodes"],
)
def test_a_ring_goes_at_the_pace_of_its_slowest_link(span: Span, wanted: float) -> None:
    assert all_reduce_seconds(3e6, span, NODES_OF_4) == pytest.approx(wanted)


def test_a_tree_is_taken_where_a_ring_is_long_or_there_are_two_nodes() -> None:
    both = Network(1, SLOW, SLOW)
    many = Span(1024, 1024)
    assert all_reduce_seconds(1e3, many, both) == pytest.approx(2 * 1e-5 + 20e-3)
    assert all_reduce_seconds(1e3, many, FLAT) > 1.9
    few = Span(4, 4)  # and much to send
    assert all_reduce_seconds(1e9, few, both) == all_reduce_seconds(1e9, few, FLAT)
    two = Network(4, FAST, SLOW)
    wanted = 3e6 / 1e8 + 2 * 1e-3 + 6 * 1e-6
    assert all_reduce_seconds(3e6, Span(8, 2), two) == pytest.approx(wanted)


@pytest.mark.parametrize("algorithms", [("ring",), ("ring", "tree")])
def test_more_bytes_ranks_or_flows_never_take_less(algorithms: tuple[str, ...]) -> None:
    network = Network(8, LINKS["nvlink3"], LINKS["25gbe"], algorithms=algorithms)  # type: ignore[arg-type]

    def seconds(num_bytes: float, nodes: int, flows: int) -> float:
        return all_reduce_seconds(num_bytes, Span(8 * nodes, nodes, flows), network)

    for values in (
        [seconds(size, 4, 1) for size in (1e4, 1e6, 1e8)],
        [seconds(1e6, nodes, 1) for nodes in (1, 2, 4, 8, 16, 512)],
        [seconds(1e6, 4, flows) for flows in (1, 2, 8)],
    ):
        assert values == sorted(values)


def test_ranks_fill_whole_nodes() -> None:
    assert NODES_OF_4.span(3) == Span(3, 1)
    assert NODES_OF_4.span(12) == Span(12, 3)
    with pytest.raises(InputError, match="6 GPUs are no whole number of nodes of 4"):
        NODES_OF_4.span(6)


def test_pairs_share_what_leaves_their_node() -> None:
    inside, _, across = rounds("one-peer-exponential", 8, 4)
    near = build_exchange(inside, [1e6, 2e6], NODES_OF_4)
    assert near.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert near.seconds.tolist() == pytest.approx([3e6 / 1e11 + 2 * 2e-6] * 8)
    far = build_exchange(across, [1e6, 2e6], NODES_OF_4)
    assert far.group.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert far.seconds.tolist() == pytest.approx([4 * 3e6 / 1e8 + 2 * 2e-3] * 8)


def test_nodes_that_meet_as_a_whole_send_once_and_others_stay_inside() -> None:
    first = rounds("alternating-exponential-ring", 16, 4)[0]  # two nodes each by itself
    seconds = build_exchange(first, [1e6], NODES_OF_4).seconds
    alone = all_reduce_seconds(1e6, Span(4, 1), NODES_OF_4)
    together = all_reduce_seconds(1e6, Span(8, 2), NODES_OF_4)
    assert sorted(seconds.tolist()) == pytest.approx([alone] * 8 + [together] * 8)


def test_a_ring_of_ranks_leaves_a_node_only_at_its_ends() -> None:
    _, second = rounds("ring", 8, 4)
    seconds = build_exchange(second, [1e6], NODES_OF_4).seconds
    assert [value > 1e-3 for value in seconds] == [True, False, False, True] * 2


# --- steps ---

TWO = (Bucket(1e6, 0.25), Bucket(4e6, 1.0))


def even(seconds: float, ranks: int = 4, steps: int = 12) -> Floats:
    return np.full((steps, ranks), seconds)


def test_the_last_bucket_is_what_cannot_be_hidden() -> None:
    first, last = (all_reduce_seconds(b.num_bytes, Span(4, 4), FLAT) for b in TWO)
    long = all_reduced(even(10.0), TWO, FLAT)
    assert long == pytest.approx(10 + last)
    short = all_reduced(even(0.003), TWO, FLAT)  # the first is there after half of it
    assert short == pytest.approx(0.0015 + first + last)


def test_all_reduce_waits_for_the_slowest_of_each_step() -> None:
    compute = Jitter(0.3).draw(10.0, steps=20, ranks=4, seed=1)
    last = all_reduce_seconds(TWO[1].num_bytes, Span(4, 4), FLAT)
    assert all_reduced(compute, TWO, FLAT) == pytest.approx(compute.max(1) + last)


def test_sharded_hides_all_but_its_ends_or_all_of_its_compute() -> None:
    first, last = (gather_seconds(b.num_bytes, Span(4, 4), FLAT) for b in TWO)
    # The forward pass begins with the last bucket, the backward pass with the first.
    long = sharded(even(10.0), TWO, FLAT)
    assert long == pytest.approx(last + 10 + first + last)
    nothing = sharded(even(0.0), TWO, FLAT)
    assert nothing == pytest.approx(3 * (first + last))


def everyone(ranks: int, seconds: float) -> Exchange:
    return Exchange(np.zeros(ranks, dtype=np.int64), np.full(ranks, seconds))


def test_an_exchange_is_hidden_where_compute_takes_longer() -> None:
    for compute, exchange in ((0.3, 0.2), (0.2, 0.3)):
        turns = [everyone(4, exchange)]
        longer = max(compute, exchange)
        assert exchanged(even(compute), turns, overlap=True) == pytest.approx(longer)
        both = compute + exchange
        assert exchanged(even(compute), turns, overlap=False) == pytest.approx(both)


def plainly(
    compute: Floats, turns: list[list[list[int]]], seconds: list[float], overlap: bool
) -> float:
    """t_i(k + 1) as it stands in the documentation, rank by rank."""
    num_steps, ranks = compute.shape
    clock = [0.0] * ranks
    for step in range(num_steps):
        number = step % len(turns)
        after = [0.0] * ranks
        for group in turns[number]:
            for rank in group:
                done = clock[rank] + compute[step, rank]
                if overlap:
                    begun = max(clock[peer] for peer in group)
                    after[rank] = max(done, begun + seconds[number])
                else:
                    last = max(clock[peer] + compute[step, peer] for peer in group)
                    after[rank] = last + seconds[number]
        clock = after
    mean: float = sum(clock) / ranks / num_steps
    return mean


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("topology", ["complete", "ring", "one-peer-exponential"])
def test_the_recurrence_of_waiting_is_that_of_plain_python(topology: str, overlap: bool) -> None:
    compute = Jitter(0.3, 0.02, 5.0).draw(1.0, steps=17, ranks=8, seed=3)
    turns = [[list(group) for group in turn] for turn in rounds(topology, 8)]
    seconds = [0.9 + 0.2 * number for number in range(len(turns))]
    found = exchanged(
        compute,
        [
            build_exchange(turn, [0.0], FLAT)._replace(seconds=np.full(8, each))
            for turn, each in zip(turns, seconds, strict=True)
        ],
        overlap=overlap,
    )
    assert found == pytest.approx(plainly(compute, turns, seconds, overlap), rel=1e-12)


def test_compute_times_are_drawn_alike_and_average_to_what_they_should() -> None:
    drawn = Jitter(0.2).draw(0.1, steps=50, ranks=16, seed=5)
    assert drawn.shape == (50, 16)
    assert (drawn == Jitter(0.2).draw(0.1, steps=50, ranks=16, seed=5)).all()
    assert (drawn != Jitter(0.2).draw(0.1, steps=50, ranks=16, seed=6)).any()
    assert drawn.mean() == pytest.approx(0.1)
    assert np.log(drawn).std() == pytest.approx(0.2, rel=0.1)
    stalled = Jitter(0.2, 0.1, 3.0).draw(0.1, steps=50, ranks=16, seed=5) - drawn
    assert set(stalled.round(9).ravel()) == {0, 3}
    assert (stalled > 1).mean() == pytest.approx(0.1, abs=0.05)


def test_buckets_are_filled_from_the_last_parameter_as_torch_does() -> None:
    mega = 1 << 20
    buckets = build_buckets([4 * mega, 3 * mega, 2 * mega, 5 * mega, mega // 8, mega // 8])
    sizes = [bucket.num_bytes / mega for bucket in buckets]
    assert sizes == [1.0, 28.0, 28.0]  # MiB: a first one of 1, then of at least 25
    assert [bucket.ready for bucket in buckets] == pytest.approx([2 / 6, 4 / 6, 1])
    assert total_bytes(buckets) == 57 * mega


# --- averagers ---

BUCKETS = build_buckets([1_000_000] * 25)
FREE = Link(0, 1e30)
TEN_GBE = Network(8, LINKS["nvlink3"], LINKS["10gbe"])
AVERAGES = [
    AverageConfig(),
    AverageConfig(name="gossip"),
    AverageConfig(name="gossip", overlap=False),
    AverageConfig(name="periodic", every=16),
    AverageConfig(name="sharded"),
]


@pytest.mark.parametrize("average", AVERAGES, ids=describe)
def test_slower_links_and_more_compute_take_longer(average: AverageConfig) -> None:
    slower = Network(8, LINKS["nvlink3"], LINKS["1gbe"])
    found = [
        step_time(average, BUCKETS, network, ranks=32, compute=compute)
        for network, compute in ((TEN_GBE, 0.01), (TEN_GBE, 1.0), (slower, 1.0))
    ]
    totals = [step.total for step in found]
    assert totals == sorted(totals)
    assert totals[0] < totals[1]
    assert all(min(step) >= 0 for step in found)
    assert found[0] == step_time(average, BUCKETS, TEN_GBE, ranks=32, compute=0.01)  # no chance


def test_fewer_peers_are_waited_for_less() -> None:
    network = Network(8, Link(0, 1e30), Link(0, 1e30), Jitter(0.1))
    allreduce, gossip, periodic = (
        step_time(average, BUCKETS, network, ranks=64, compute=1.0).waiting
        for average in (AVERAGES[0], AVERAGES[1], AVERAGES[3])
    )
    # The largest of 64 normal numbers is 2.4 standard deviations above their mean.
    assert allreduce == pytest.approx(0.24, rel=0.15)
    assert gossip < allreduce / 4
    assert periodic < allreduce / 2


def test_an_averager_without_a_model_of_its_traffic_is_refused() -> None:
    """A new one would otherwise divide by its number of rounds, 0."""
    new = AverageConfig.model_construct(name="new")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"'new': its traffic is not .*estimate/network\.py"):
        step_time(new, BUCKETS, TEN_GBE, ranks=32, compute=0.1)


def test_compressed_messages_are_shorter() -> None:
    bare, halved = (
        step_time(average, BUCKETS, TEN_GBE, ranks=32, compute=0.0).network
        for average in (AverageConfig(), AverageConfig(compress="bf16"))
    )
    assert halved == pytest.approx(bare / 2, rel=0.05)


# --- traffic ---


def sent(ranks: int = 8, nodes: int = 1, **keys: Any) -> float:
    return sent_bytes(AverageConfig.model_validate(keys), 1.0, Span(ranks, nodes))


def test_by_hand() -> None:
    assert sent() == 2 * 7 / 8
    assert sent(ranks=1) == 0
    assert sent(compress="bf16") == 7 / 8
    assert sent(name="sharded") == 3 * 7 / 8
    assert sent(name="gossip") == 1  # all of it, to a peer
    assert sent(name="gossip", compress="bf16") == 0.5
    assert sent(name="gossip", topology="ring") == pytest.approx(2 * 2 / 3, rel=0.3)
    assert sent(name="periodic", every=4) == 2 * 7 / 8 / 4


def handed_over(world: World, keys: dict[str, Any]) -> float:
    """What a step sends, as a share of the bytes of the weights, by the ring's own count."""
    from trainyard.config import load_recipe
    from trainyard.run.build import build_averager

    torch.set_num_threads(1)
    averager = build_averager(load_recipe("debug", keys), world, torch.device("cpu"))
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300, bias=False)
    wrapped = averager.wrap(model)
    handed: list[float] = []
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        size = dist.get_world_size(options.get("group"))
        handed.append(2 * (size - 1) / size * tensor.nbytes)
        return real(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        for step in range(6):
            if step == 2:  # what overlaps has an exchange more to begin with
                handed.clear()
            wrapped(torch.ones(2, 300)).sum().backward()
            list(averager.ready_parameters(step, False))
    finally:
        dist.all_reduce = real
    return sum(handed) / 4 / (4 * 300 * 300)


@pytest.mark.parametrize(
    "keys",
    [
        {"average.name": "gossip"},
        {"average.name": "gossip", "average.topology": "complete"},
        {"average.name": "periodic", "average.every": "2"},
    ],
    ids=str,
)
def test_what_averagers_hand_over(keys: dict[str, Any]) -> None:
    from trainyard.config import load_recipe

    wanted = sent_bytes(load_recipe("debug", keys).average, 1.0, Span(4, 1))
    for found in spawn(handed_over, 4, keys):
        assert found == pytest.approx(wanted, rel=0.01)
