"""Step times of averagers on a cluster: cost of messages, and ranks that wait for each other.

Compute times are drawn for each rank and step, since a rank that takes longer makes others wait;
the steps are then played through with the messages of an averager. `compute` is [steps, ranks] in
seconds throughout.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from statistics import mean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.averaging.config import DEFAULT_EVERY, DEFAULT_TOPOLOGY, AverageConfig
from trainyard.averaging.topology import rounds
from trainyard.errors import InputError

Floats = NDArray[np.float64]
Algorithm = Literal["ring", "tree"]

_SHARES = {None: 1.0, "bf16": 1 / 2, "fp16": 1 / 2}  # size of messages relative to fp32
_MODELLED = ("allreduce", "gossip", "periodic", "sharded")  # averagers that step_time knows
_STEPS = 192  # simulated steps; whole periods of periodic averaging, at least two
_FIRST_BYTES, _BYTES = 1 << 20, 25 << 20  # size of torch DDP's first bucket, and of the others
_FORWARD = 1 / 3  # share of a step's compute; a backward pass takes about two forward passes


# --- nodes and links ---


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


@dataclass(frozen=True)
class Jitter:
    """Variation of compute times, drawn independently for each rank and step."""

    sigma: float = 0.05
    """Standard deviation of the logarithm of a step's compute time."""
    stall_rate: float = 0.0
    """Stalls per rank and step: page faults, slow reads, garbage collection."""
    stall_seconds: float = 0.0

    def draw(self, seconds: float, *, steps: int, ranks: int, seed: int = 0) -> Floats:
        """Times[steps, ranks] with a mean of `seconds`, before stalls."""
        draws = np.random.default_rng(seed)
        times = np.exp(self.sigma * draws.standard_normal((steps, ranks)))
        times *= seconds / times.mean()
        if self.stall_rate:
            times += self.stall_seconds * (draws.random((steps, ranks)) < self.stall_rate)
        return times


class Span(NamedTuple):
    """Ranks that average, and the nodes that they lie on."""

    ranks: int
    nodes: int
    flows: int = 1  # groups that average at once and share the links of their nodes


@dataclass(frozen=True)
class Network:
    """Equal nodes. `between` is the whole bandwidth out of a node, shared by its GPUs."""

    gpus_per_node: int = 8
    inside: Link = LINKS["nvlink3"]
    between: Link = LINKS["100gb-ib"]
    jitter: Jitter = field(default_factory=Jitter)
    algorithms: tuple[Algorithm, ...] = ("ring", "tree")  # NCCL picks the faster; gloo has a ring

    def span(self, ranks: int) -> Span:
        """The span of `ranks` ranks. InputError if they do not fill whole nodes."""
        if ranks <= self.gpus_per_node:
            return Span(ranks, 1)
        if ranks % self.gpus_per_node:
            raise InputError(
                f"{ranks} GPUs are no whole number of nodes of {self.gpus_per_node}: "
                "set --gpus-per-node"
            )
        return Span(ranks, ranks // self.gpus_per_node)

    def slowed(self, factor: float) -> "Network":
        """The network with a fraction of its bandwidth."""
        inside, between = (
            link._replace(bandwidth=link.bandwidth / factor) for link in (self.inside, self.between)
        )
        return replace(self, inside=inside, between=between)


# --- messages ---


class Bucket(NamedTuple):
    """Gradients sent as one message."""

    num_bytes: float
    ready: float  # share of the backward pass after which the bucket is complete


Buckets = tuple[Bucket, ...]
"""The messages of a step, in the order of the backward pass."""


def build_buckets(sizes: Sequence[int]) -> Buckets:
    """Buckets from the number of weights of each parameter, in the order of the model.

    Buckets are filled like those of torch DDP, from the last parameter to the first. The backward
    pass is assumed to take equally long for each parameter: layers of a model take about equally
    long, while their sizes differ by a factor of a hundred.
    """
    buckets: list[Bucket] = []
    filled = 0
    for number, size in enumerate(reversed(sizes), start=1):
        filled += 4 * size
        if filled >= (_BYTES if buckets else _FIRST_BYTES) or number == len(sizes):
            buckets.append(Bucket(filled, number / len(sizes)))
            filled = 0
    return tuple(buckets)


def scaled(buckets: Buckets, factor: float) -> Buckets:
    """Buckets of another size, such as compressed ones."""
    return tuple(Bucket(bucket.num_bytes * factor, bucket.ready) for bucket in buckets)


def total_bytes(buckets: Buckets) -> float:
    """Bytes of all gradient buckets."""
    return sum(bucket.num_bytes for bucket in buckets)


def all_reduce_seconds(num_bytes: float, span: Span, network: Network) -> float:
    """Seconds of an all-reduce. Constants are those of NCCL's model, src/graph/tuning.cc."""
    ranks, nodes, flows = span
    if ranks == 1:
        return 0.0
    inside, between = network.inside, network.between
    leaving = between.bandwidth / flows
    slowest = inside.bandwidth if nodes == 1 else min(inside.bandwidth, leaving)
    ring = _ring(ranks) * num_bytes / slowest
    ring += 2 * (ranks - nodes) * inside.latency + 2 * (nodes - 1) * between.latency
    if "tree" not in network.algorithms:
        return ring
    # Two binary trees over the nodes, each for half of the bytes, and a chain inside a node. Two
    # nodes send to each other at once; with more, inner ones forward the data of two.
    tree = {1: 0, 2: 1}.get(nodes, 2) * num_bytes / leaving
    if ranks > nodes:
        tree = max(tree, 2 * num_bytes / inside.bandwidth)
    tree += 2 * (ranks / nodes - 1) * inside.latency + 2 * math.log2(nodes) * between.latency
    return min(ring, tree)


def gather_seconds(num_bytes: float, span: Span, network: Network) -> float:
    """Seconds of an all-gather to `num_bytes`, or a reduce-scatter: half a ring all-reduce."""
    return all_reduce_seconds(num_bytes, span, replace(network, algorithms=("ring",))) / 2


def _ring(ranks: int) -> float:
    """Share of the bytes that each rank sends in a ring all-reduce; a gather sends half of it."""
    return 2 * (ranks - 1) / ranks


class Exchange(NamedTuple):
    """One round of a topology."""

    group: NDArray[np.int64]  # by rank
    seconds: Floats  # by rank


def build_exchange(
    groups: Sequence[Sequence[int]], messages: Sequence[float], network: Network
) -> Exchange:
    """A round in which each group averages `messages`, in bytes, one by one.

    Groups that leave a node at the same time share its bandwidth.
    """

    @cache
    def seconds(span: Span) -> float:
        return sum(all_reduce_seconds(message, span, network) for message in messages)

    num_ranks = sum(map(len, groups))
    exchange = Exchange(np.empty(num_ranks, dtype=np.int64), np.empty(num_ranks))
    nodes = [{rank // network.gpus_per_node for rank in group} for group in groups]
    leaving = Counter(node for own in nodes if len(own) > 1 for node in own)  # groups, by node
    for number, (group, own) in enumerate(zip(groups, nodes, strict=True)):
        flows = max(1, *(leaving[node] for node in own))
        exchange.group[list(group)] = number
        exchange.seconds[list(group)] = seconds(Span(len(group), len(own), flows))
    return exchange


# --- steps ---


def all_reduced(compute: Floats, buckets: Buckets, network: Network) -> Floats:
    """Times[...] of steps[..., ranks] with all-reduced gradients, as in torch DDP.

    A bucket is sent once the slowest rank has it and the previous bucket is done.
    """
    span = network.span(compute.shape[-1])
    slowest: Floats = compute.max(-1)
    done = np.zeros_like(slowest)
    for bucket in buckets:
        ready = slowest * (_FORWARD + (1 - _FORWARD) * bucket.ready)
        done = np.maximum(ready, done) + all_reduce_seconds(bucket.num_bytes, span, network)
    return done


def sharded(compute: Floats, buckets: Buckets, network: Network) -> Floats:
    """Times[steps] of sharded models: weights are gathered ahead of both passes, block by block.

    Gradients are scattered. Blocks are the buckets. Gathers and scatters share the network, each
    in its own order.
    """
    span = network.span(compute.shape[-1])
    slowest: Floats = compute.max(-1)
    bounds = [0.0, *(bucket.ready for bucket in buckets)]
    work = [stop - start for start, stop in pairwise(bounds)]
    messages = [gather_seconds(bucket.num_bytes, span, network) for bucket in buckets]
    done = np.zeros_like(slowest)
    gathered = 0.0
    for message, part in zip(reversed(messages), reversed(work), strict=True):
        gathered += message
        done = np.maximum(done, gathered) + slowest * _FORWARD * part
    all_sent = done + 2 * sum(messages)  # earliest end of all messages
    ahead, scattered = done.copy(), done.copy()
    for message, part in zip(messages, work, strict=True):
        ahead += message
        done = np.maximum(done, ahead) + slowest * (1 - _FORWARD) * part
        scattered = np.maximum(done, scattered) + message
    ended: Floats = np.maximum(scattered, all_sent)
    return ended


def exchanged(compute: Floats, exchanges: Sequence[Exchange], *, overlap: bool) -> float:
    """Mean seconds of a step; each step averages weights with the group of its round.

    With overlap, the exchange of step k begins when the last rank of a group begins the step, and
    a rank ends the step when both the exchange and its own compute are done.
    """
    clock = np.zeros(compute.shape[1])
    for step, own in enumerate(compute):
        group, seconds = exchanges[step % len(exchanges)]
        computed = clock + own
        last = np.zeros(len(clock))  # by group
        np.maximum.at(last, group, clock if overlap else computed)
        done = last[group] + seconds
        clock = np.maximum(computed, done) if overlap else done
    return float(clock.mean()) / len(compute)


# --- averagers ---


class StepTime(NamedTuple):
    """Mean seconds of a step, by part."""

    compute: float
    network: float  # not hidden behind compute
    waiting: float  # for ranks that take longer
    data: float = 0.0  # waiting for data

    @property
    def total(self) -> float:
        return sum(self)


def step_time(
    average: AverageConfig, buckets: Buckets, network: Network, *, ranks: int, compute: float
) -> StepTime:
    """The step time on `ranks` GPUs with a mean compute time of `compute` seconds.

    InputError if nodes would not be full or the averager's traffic is not modelled here,
    RecipeError if the topology needs another number.
    """
    if average.name not in _MODELLED:
        raise InputError(
            f"average.name = {average.name!r}: its traffic is not modelled: give one of "
            f"{', '.join(_MODELLED)}, or extend trainyard/estimate/network.py"
        )
    period = (average.every or DEFAULT_EVERY) if average.name == "periodic" else 1
    steps = max(_STEPS // period, 2) * period
    sent = scaled(buckets, _SHARES[average.compress])
    exchanges = _exchanges(average, sent, network, ranks)

    def total(jitter: Jitter) -> float:
        times = jitter.draw(compute, steps=steps, ranks=ranks)
        if average.name == "allreduce":
            return float(all_reduced(times, sent, network).mean())
        if average.name == "sharded":
            return float(sharded(times, sent, network).mean())
        periods = times.reshape(-1, period, ranks).sum(1)
        overlap = average.name == "gossip" and average.overlap is not False
        return exchanged(periods, exchanges, overlap=overlap) / period

    even = total(Jitter(sigma=0))
    # Rounding errors must not make it negative.
    return StepTime(compute, max(even - compute, 0.0), max(total(network.jitter) - even, 0.0))


def _exchanges(
    average: AverageConfig, buckets: Buckets, network: Network, ranks: int
) -> list[Exchange]:
    """The rounds of weight exchange, in order; empty for averagers of gradients."""
    if average.name not in ("gossip", "periodic"):
        return []
    local = ranks // network.span(ranks).nodes
    topology = "complete" if average.name == "periodic" else average.topology or DEFAULT_TOPOLOGY
    messages = [bucket.num_bytes for bucket in buckets]
    return [build_exchange(groups, messages, network) for groups in rounds(topology, ranks, local)]


def sent_bytes(average: AverageConfig, num_bytes: float, span: Span) -> float:
    """Mean bytes that a GPU sends per step, for `num_bytes` of float32 weights.

    Collectives are counted as rings; trees send about as much in all.
    """
    ranks, nodes, _ = span
    sent = _SHARES[average.compress] * num_bytes
    if average.name == "allreduce":
        return _ring(ranks) * sent
    if average.name == "sharded":  # weights are gathered for both passes, gradients scattered
        return 1.5 * _ring(ranks) * sent
    if average.name == "periodic":
        return _ring(ranks) * sent / (average.every or DEFAULT_EVERY)
    turns = rounds(average.topology or DEFAULT_TOPOLOGY, ranks, ranks // nodes)
    # bf16 messages go to each peer.
    share = (lambda size: size - 1) if average.compress == "bf16" else _ring
    mixed = mean(sum(len(group) * share(len(group)) for group in turn) for turn in turns)
    return mixed * sent / ranks


def describe(average: AverageConfig) -> str:
    """A short description of an averager; gossip goes by its topology."""
    words: list[str] = [average.name]
    if average.name == "gossip":
        words = [average.topology or DEFAULT_TOPOLOGY]
    if average.every:
        words.append(f"every {average.every}")
    if average.overlap is not None:
        words.append("overlapped" if average.overlap else "not overlapped")
    words += [average.compress] if average.compress else []
    return ", ".join(words)
