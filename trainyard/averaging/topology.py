"""The topologies of gossip: rounds of groups that mix, as plain data."""

from collections import Counter
from collections.abc import Callable
from operator import index
from typing import Any

from trainyard.errors import RecipeError
from trainyard.hints import did_you_mean
from trainyard.own_code import as_recipe_error, imported, is_own

KEY = "average.topology"
Group = tuple[int, ...]
Round = list[Group]
"""Groups of replicas, each replica in exactly one; the members of a group mix to their mean."""


def rounds(topology: str, size: int, local_size: int = 1) -> list[Round]:
    """The rounds of a topology over `size` replicas, `local_size` on each node.

    After the last round the first one follows. `topology` is a name of BUILT_IN, or a function
    "module:function" that takes `size` and `local_size`, imported as in own_code.py. RecipeError if
    it cannot be imported, fails, or has a round without each replica exactly once.
    """
    build = BUILT_IN.get(topology) or _function_of(topology)
    with as_recipe_error(KEY, topology):
        proposed = build(size, local_size)
        numbered = [[tuple(sorted(map(index, group))) for group in groups] for groups in proposed]
    if not numbered:
        raise RecipeError(
            "recipe.topology-without-rounds",
            "{key} = {value!r} gives no rounds",
            key=KEY,
            value=topology,
        )
    for number, groups in enumerate(numbered):
        _check(groups, size, topology, number)
    return numbered


def _function_of(topology: str) -> Callable[..., Any]:
    if not is_own(topology):
        names = ", ".join(BUILT_IN)
        raise RecipeError(
            "recipe.unknown-topology",
            "{key} = {value!r} is neither one of {names} nor a function of your own, "
            '"module:function"{hint}',
            key=KEY,
            value=topology,
            names=names,
            hint=did_you_mean(topology, BUILT_IN),
        )
    return imported(KEY, topology)


def _check(groups: Round, size: int, topology: str, number: int) -> None:
    counts = Counter(replica for group in groups for replica in group)
    for replica in sorted({*range(size), *counts}):
        wanted = int(0 <= replica < size)
        if counts[replica] != wanted:
            raise RecipeError(
                "recipe.topology-rank-not-once",
                "{key} = {value!r}, round {round}: has rank {rank} {num_times} times; each of the "
                "ranks 0 to {last_rank} must appear exactly once, and no other",
                key=KEY,
                value=topology,
                round=number,
                rank=replica,
                num_times=counts[replica],
                last_rank=size - 1,
            )


# --- built in ---


def _complete(size: int, local_size: int) -> list[Round]:
    """One group of all replicas: one round mixes exactly."""
    return [[tuple(range(size))]]


def _ring(size: int, local_size: int) -> list[Round]:
    """Pairs with the right neighbour, then with the left one.

    In an odd ring one replica rests per round, each in its turn. The ring mixes in part. 2k rounds
    of an even ring shrink a disagreement at least by the factor

        cos^(2k - 1)(2 pi / size)

    since a round projects, and that is the cosine between the spaces of two rounds. In an odd ring
    each round shrinks it, in the long run, by the factor |1 + z| / 2. Here z is the root of
    z^((size + 1) / 2) + z^((size - 1) / 2) = 2, other than 1, that makes the factor largest: an
    eigenvalue of a round that is followed by a step around the ring.
    """
    if size % 2:
        return [
            [(rest,), *(_pair(rest + k, rest + k + 1, size) for k in range(1, size, 2))]
            for rest in range(size)
        ]
    starts = (0, 1) if size > 2 else (0,)
    return [[_pair(k, k + 1, size) for k in range(start, size, 2)] for start in starts]


def _pair(one: int, other: int, size: int) -> Group:
    return (one % size, other % size)


def _one_peer_exponential(size: int, local_size: int) -> list[Round]:
    """Pairs at distances 1, 2, 4, ...: log2(size) rounds mix exactly.

    This is the one-peer exponential graph of Ying et al. 2021 (arXiv 2110.13363, section 4), but
    pairs exchange both ways; there, a replica sends to one peer and receives from another.
    """
    _check_power_of_two("one-peer-exponential", size, "replicas", least=1)
    pairs: list[Round] = [
        [(one, one + distance) for one in range(size) if not one & distance]
        for distance in _powers_of_two(size)
    ]
    return pairs or [[(0,)]]


def _alternating_exponential_ring(size: int, local_size: int) -> list[Round]:
    """For each distance of nodes two rounds (Wang et al. 2024, arXiv 2410.11998).

    In the first round, half of the pairs of nodes mix inside each node, and the other half mix as
    one group per pair; in the second round the halves change places. All rounds together mix
    exactly.
    """
    num_nodes = size // local_size
    _check_power_of_two("alternating-exponential-ring", num_nodes, "nodes", least=2)
    nodes = [tuple(range(n * local_size, (n + 1) * local_size)) for n in range(num_nodes)]
    result: list[Round] = []
    number = 0
    for distance in _powers_of_two(num_nodes):
        first: Round = []
        second: Round = []
        for one in (node for node in range(num_nodes) if not node & distance):
            apart, together = (first, second) if number % 2 == 0 else (second, first)
            apart += [nodes[one], nodes[one + distance]]
            together.append(nodes[one] + nodes[one + distance])
            number += 1
        result += [first, second]
    return result


def _powers_of_two(limit: int) -> list[int]:
    return [1 << k for k in range(limit.bit_length() - 1)]


def _check_power_of_two(topology: str, count: int, what: str, *, least: int) -> None:
    if count < least or count & (count - 1):
        wanted = f"{least}, {2 * least}, {4 * least}, ..."
        raise RecipeError(
            "recipe.topology-not-power-of-two",
            "average.topology = {value!r} needs {allowed} {unit}, not {num_found}: take 'ring' or "
            "'complete', which are for any number",
            value=topology,
            allowed=wanted,
            unit=what,
            num_found=count,
        )


BUILT_IN: dict[str, Callable[[int, int], list[Round]]] = {
    "complete": _complete,
    "ring": _ring,
    "one-peer-exponential": _one_peer_exponential,
    "alternating-exponential-ring": _alternating_exponential_ring,
}
