"""Cost of messages: links with latency and bandwidth, and collectives made of messages.

n ranks on m nodes, B bytes. Constants are those of NCCL's own model (NVIDIA/nccl,
src/graph/tuning.cc) if it has them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import InputError
from trainyard.estimate.jitter import Floats, Jitter


class Link(NamedTuple):
    latency: float  # seconds, per message from one rank to the next
    bandwidth: float  # bytes per second, each way


# Latencies: a ring's hop with NCCL's simple protocol: NVLink 3.4, PCIe 5.7, network 14 us; over
# TCP assumed 30 us. NVLink: 2/3 of its nominal bandwidth, as all_reduce_perf shows on 8 A100
# (NVIDIA/nccl-tests #149). PCIe 3.0: NCCL's 12 GB/s. Networks: line rates, which TCP may not reach.
LINKS = {
    "nvlink2": Link(3.4e-6, 100e9),  # V100
    "nvlink3": Link(3.4e-6, 200e9),  # A100
    "nvlink4": Link(3.4e-6, 300e9),  # H100, H200
    "nvlink5": Link(3.4e-6, 600e9),  # B200
    "pcie3": Link(5.7e-6, 12e9),
    "pcie4": Link(5.7e-6, 24e9),
    "8x400gb-ib": Link(14e-6, 400e9),
    "4x200gb-ib": Link(14e-6, 100e9),
    "200gb-ib": Link(14e-6, 25e9),
    "100gb-ib": Link(14e-6, 12.5e9),
    "100gbe": Link(30e-6, 12.5e9),
    "25gbe": Link(30e-6, 3.125e9),
    "10gbe": Link(30e-6, 1.25e9),
    "1gbe": Link(30e-6, 0.125e9),
}

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `between` is the whole bandwidth out of a node, shared by its GPUs."""

    gpus_per_node: int = 8
    inside: Link = LINKS["nvlink3"]
    between: Link = LINKS["100gb-ib"]
    jitter: Jitter = field(default_factory=Jitter)
    algorithms: tuple[Algorithm, ...] = ("ring", "tree")  # NCCL picks the faster; gloo has a ring

    def span(self, ranks: int) -> "Span":
        """The span of `ranks` ranks. InputError if they do not fill whole nodes."""
        if ranks <= self.gpus_per_node:
            return Span(ranks, 1)
        if ranks % self.gpus_per_node:
            raise InputError(
                f"{ranks} GPUs are no whole number of nodes of {self.gpus_per_node}: "
                "set --gpus-per-node"
            )
        return Span(ranks, ranks // self.gpus_per_node)


class Span(NamedTuple):
    """Ranks that average, and the nodes that they lie on."""

    ranks: int
    nodes: int
    flows: int = 1  # groups that average at once and share the links of their nodes


def all_reduce_seconds(num_bytes: float, span: Span, cluster: Cluster) -> float:
    ranks, nodes, flows = span
    if ranks == 1:
        return 0.0
    inside, between = cluster.inside, cluster.between
    leaving = between.bandwidth / flows
    slowest = inside.bandwidth if nodes == 1 else min(inside.bandwidth, leaving)
    ring = 2 * (ranks - 1) / ranks * num_bytes / slowest
    ring += 2 * (ranks - nodes) * inside.latency + 2 * (nodes - 1) * between.latency
    if "tree" not in cluster.algorithms:
        return ring
    # Two binary trees over the nodes, each for half of the bytes, and a chain inside a node. Two
    # nodes send to each other at once; with more, inner ones forward the data of two.
    tree = {1: 0, 2: 1}.get(nodes, 2) * num_bytes / leaving
    if ranks > nodes:
        tree = max(tree, 2 * num_bytes / inside.bandwidth)
    tree += 2 * (ranks / nodes - 1) * inside.latency + 2 * math.log2(nodes) * between.latency
    return min(ring, tree)


def gather_seconds(num_bytes: float, span: Span, cluster: Cluster) -> float:
    """Seconds of an all-gather to `num_bytes`, or a reduce-scatter: half a ring all-reduce."""
    return all_reduce_seconds(num_bytes, span, replace(cluster, algorithms=("ring",))) / 2


class Round(NamedTuple):
    """One round of a topology."""

    group: NDArray[np.int64]  # by rank
    seconds: Floats  # of the exchange, by rank


def build_round(
    groups: Sequence[Sequence[int]], messages: Sequence[float], cluster: Cluster
) -> Round:
    """A round in which each group averages `messages`, in bytes, one by one.

    Groups that leave a node at the same time share its bandwidth.
    """
    members = np.concatenate([np.asarray(group) for group in groups])
    sizes = np.array([len(group) for group in groups])
    group = np.empty(len(members), dtype=np.int64)
    group[members] = np.repeat(np.arange(len(groups)), sizes)
    node = np.arange(len(members)) // cluster.gpus_per_node
    pairs = np.unique(np.stack([group, node]), axis=1)  # each group with each of its nodes
    nodes = np.bincount(pairs[0])
    leaving = np.bincount(pairs[1], weights=nodes[pairs[0]] > 1).astype(int)  # groups, by node
    flows = np.ones(len(groups), dtype=np.int64)
    np.maximum.at(flows, pairs[0], leaving[pairs[1]])
    kinds, kind = np.unique(np.stack([sizes, nodes, flows]), axis=1, return_inverse=True)
    seconds = [
        sum(all_reduce_seconds(message, Span(*of_kind), cluster) for message in messages)
        for of_kind in kinds.T.tolist()
    ]
    return Round(group, np.array(seconds)[kind.ravel()][group])
