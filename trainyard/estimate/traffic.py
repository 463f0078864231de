"""Bytes that a GPU sends per step, by averager."""

from statistics import mean

from trainyard.averaging.config import DEFAULT_EVERY, DEFAULT_TOPOLOGY, AverageConfig
from trainyard.averaging.topology import rounds
from trainyard.estimate.predict import SHARES


def sent_bytes(average: AverageConfig, num_bytes: float, *, ranks: int, nodes: int) -> float:
    """Mean bytes that a GPU sends per step, for `num_bytes` of float32 weights.

    By ring: an all-reduce among n sends 2 (n - 1) / n of them, a gather half as much. Trees send
    about as much in all.
    """
    sent = SHARES[average.compress] * num_bytes
    if average.name == "allreduce":
        return _ring(ranks) * sent
    if average.name == "sharded":  # weights are gathered for both passes, gradients scattered
        return 1.5 * _ring(ranks) * sent
    local = ranks // nodes
    inside, replicas, part = 0.0, ranks, 1.0
    if average.hierarchical:  # gradients all-reduced in the node, slices exchanged and gathered
        inside, replicas, part = _ring(local) * num_bytes, nodes, 1 / local
    if average.name == "periodic":
        every = average.every or DEFAULT_EVERY
        exchanged = part * _ring(replicas) * sent + _gathered(average, num_bytes, local)
        return inside + exchanged / every
    topology = average.topology or DEFAULT_TOPOLOGY
    of_nodes = 1 if average.hierarchical else local
    groups = [[len(group) for group in turn] for turn in rounds(topology, replicas, of_nodes)]
    exchanged = mean(sum(size * _mixed(size, average) for size in turn) for turn in groups)
    exchanged *= part * sent / replicas
    return inside + exchanged + _gathered(average, num_bytes, local)


def _ring(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _mixed(size: int, average: AverageConfig) -> float:
    """Share of the weights that a replica of a group sends; bf16 messages go to each peer."""
    return size - 1 if average.compress == "bf16" else _ring(size)


def _gathered(average: AverageConfig, num_bytes: float, local: int) -> float:
    """Bytes of gathered slices, in full precision."""
    return _ring(local) / 2 * num_bytes if average.hierarchical else 0.0
