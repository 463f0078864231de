"""What collectives cost: closed forms, and who shares which link."""

import pytest

from trainyard.averaging.topology import expand_nodes, rounds
from trainyard.errors import InputError
from trainyard.estimate.network import (
    LINKS,
    Cluster,
    Link,
    Span,
    all_reduce_seconds,
    build_round,
    gather_seconds,
)

SLOW, FAST = Link(1e-3, 1e8), Link(1e-6, 1e11)
FLAT = Cluster(1, SLOW, SLOW, algorithms=("ring",))
NODES_OF_4 = Cluster(4, FAST, SLOW, algorithms=("ring",))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_sends_twice_all_but_its_own_part(ranks: int) -> None:
    wanted = 2 * (ranks - 1) / ranks * 3e6 / 1e8 + 2 * (ranks - 1) * 1e-3
    assert all_reduce_seconds(3e6, Span(ranks, ranks), FLAT) == pytest.approx(wanted)
    assert gather_seconds(3e6, Span(ranks, ranks), FLAT) == pytest.approx(wanted / 2)


def test_a_ring_inside_a_node_knows_nothing_of_the_network() -> None:
    wanted = 2 * 3 / 4 * 3e6 / 1e11 + 6e-6
    assert all_reduce_seconds(3e6, Span(4, 1), NODES_OF_4) == pytest.approx(wanted)


def test_a_ring_over_nodes_goes_at_the_pace_of_the_network() -> None:
    wanted = 2 * 7 / 8 * 3e6 / 1e8 + 2 * 1e-3 + 12 * 1e-6
    assert all_reduce_seconds(3e6, Span(8, 2), NODES_OF_4) == pytest.approx(wanted)


def test_one_rank_sends_nothing() -> None:
    assert all_reduce_seconds(3e6, Span(1, 1), FLAT) == 0


def test_a_tree_is_taken_where_a_ring_is_long_or_there_are_two_nodes() -> None:
    both = Cluster(1, SLOW, SLOW)
    many = Span(1024, 1024)
    assert all_reduce_seconds(1e3, many, both) == pytest.approx(2 * 1e-5 + 20e-3)
    assert all_reduce_seconds(1e3, many, FLAT) > 1.9
    few = Span(4, 4)  # and much to send
    assert all_reduce_seconds(1e9, few, both) == all_reduce_seconds(1e9, few, FLAT)
    two = Cluster(4, FAST, SLOW)
    wanted = 3e6 / 1e8 + 2 * 1e-3 + 6 * 1e-6
    assert all_reduce_seconds(3e6, Span(8, 2), two) == pytest.approx(wanted)


@pytest.mark.parametrize("algorithms", [("ring",), ("ring", "tree")])
def test_more_bytes_ranks_or_flows_never_take_less(algorithms: tuple[str, ...]) -> None:
    cluster = Cluster(8, LINKS["nvlink3"], LINKS["25gbe"], algorithms=algorithms)  # type: ignore[arg-type]

    def seconds(num_bytes: float, nodes: int, flows: int) -> float:
        return all_reduce_seconds(num_bytes, Span(8 * nodes, nodes, flows), cluster)

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
    near = build_round(inside, [1e6, 2e6], NODES_OF_4)
    assert near.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert near.seconds.tolist() == pytest.approx([3e6 / 1e11 + 2 * 2e-6] * 8)
    far = build_round(across, [1e6, 2e6], NODES_OF_4)
    assert far.group.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert far.seconds.tolist() == pytest.approx([4 * 3e6 / 1e8 + 2 * 2e-3] * 8)


def test_nodes_that_meet_as_a_whole_send_once_and_others_stay_inside() -> None:
    first = rounds("alternating-exponential-ring", 16, 4)[0]  # two nodes each by itself
    seconds = build_round(first, [1e6], NODES_OF_4).seconds
    alone = all_reduce_seconds(1e6, Span(4, 1), NODES_OF_4)
    together = all_reduce_seconds(1e6, Span(8, 2), NODES_OF_4)
    assert sorted(seconds.tolist()) == pytest.approx([alone] * 8 + [together] * 8)


def test_a_ring_of_ranks_leaves_a_node_only_at_its_ends() -> None:
    _, second = rounds("ring", 8, 4)
    seconds = build_round(second, [1e6], NODES_OF_4).seconds
    assert [value > 1e-3 for value in seconds] == [True, False, False, True] * 2


def test_the_slices_of_a_node_share_its_way_out() -> None:
    across = expand_nodes(rounds("one-peer-exponential", 2), 4)[0]
    seconds = build_round(across, [1e6 / 4], NODES_OF_4).seconds
    assert seconds.tolist() == pytest.approx([1e6 / 1e8 + 2e-3] * 8)
