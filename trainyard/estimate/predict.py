"""Step times from the [average] section of a recipe."""

from typing import NamedTuple

import numpy as np

from trainyard.averaging.config import DEFAULT_EVERY, DEFAULT_TOPOLOGY, AverageConfig
from trainyard.averaging.topology import Round as Groups
from trainyard.averaging.topology import expand_nodes, rounds
from trainyard.estimate.jitter import EVEN, Floats, Jitter
from trainyard.estimate.job import Job
from trainyard.estimate.network import Cluster, Round, Span, build_round, gather_seconds
from trainyard.estimate.steps import all_reduced, exchanged, sharded

# Size of messages relative to fp32; PowerSGD, at rank 2, sends about a hundredth.
SHARES = {None: 1.0, "bf16": 1 / 2, "fp16": 1 / 2, "int8": 1 / 4, "powersgd": 1 / 100}
_STEPS = 192  # simulated steps; whole periods of periodic averaging, at least two


class StepTime(NamedTuple):
    """Mean seconds of a step, by part."""

    compute: float
    network: float  # not hidden behind compute
    waiting: float  # for ranks that take longer
    data: float = 0.0  # waiting for data

    @property
    def total(self) -> float:
        return sum(self)


def predict(
    average: AverageConfig,
    job: Job,
    cluster: Cluster,
    *,
    ranks: int,
    compute: float,
    seed: int = 0,
) -> StepTime:
    """The step time on `ranks` GPUs with a mean compute time of `compute` seconds.

    InputError if nodes would not be full, RecipeError if the topology needs another number.
    """
    period = (average.every or DEFAULT_EVERY) if average.name == "periodic" else 1
    steps = max(_STEPS // period, 2) * period
    sent = job.scaled(SHARES[average.compress])
    turns = _turns(average, sent, cluster, ranks)
    gather = _gather(job, cluster, ranks) if average.hierarchical else 0.0
    if average.name == "periodic":  # the gather ends the exchange, overlapped or not
        turns = [turn._replace(seconds=turn.seconds + gather) for turn in turns]

    def total(of: Jitter) -> float:
        times = of.compute(compute, steps=steps, ranks=ranks, seed=seed)
        if average.name == "allreduce":
            return float(all_reduced(times, sent, cluster).mean())
        if average.name == "sharded":
            return float(sharded(times, sent, cluster).mean())
        if average.hierarchical:
            times = _by_node(times, job, cluster)
        periods = times.reshape(-1, period, ranks).sum(1)
        if average.name == "periodic":
            return exchanged(periods, turns, overlap=bool(average.overlap)) / period
        return exchanged(periods, turns, overlap=average.overlap is not False) + gather

    even = total(EVEN)
    # Rounding errors must not make it negative.
    return StepTime(compute, max(even - compute, 0.0), max(total(cluster.jitter) - even, 0.0))


def describe(average: AverageConfig) -> str:
    """A short description of an averager; gossip goes by its topology."""
    words: list[str] = [average.name]
    if average.name == "gossip":
        words = [average.topology] if average.topology else []
    if average.hierarchical:
        words.append("hierarchical")
    words = words or [DEFAULT_TOPOLOGY]
    if average.every:
        words.append(f"every {average.every}")
    if average.overlap is not None:
        words.append("overlapped" if average.overlap else "not overlapped")
    words += [average.compress] if average.compress else []
    return ", ".join(words)


def _turns(average: AverageConfig, job: Job, cluster: Cluster, ranks: int) -> list[Round]:
    """The rounds of weight exchange, in order; empty for other averagers."""
    nodes = cluster.span(ranks).nodes
    local = ranks // nodes
    topology = "complete" if average.name == "periodic" else average.topology or DEFAULT_TOPOLOGY
    groups: list[Groups] = []
    if average.name in ("gossip", "periodic"):
        if average.hierarchical:  # each rank of a node sends a slice
            groups, job = expand_nodes(rounds(topology, nodes), local), job.scaled(1 / local)
        else:
            groups = rounds(topology, ranks, local)
    messages = [bucket.num_bytes for bucket in job.buckets]
    return [build_round(round_, messages, cluster) for round_ in groups]


def _gather(job: Job, cluster: Cluster, ranks: int) -> float:
    """Seconds in which the ranks of a node gather the means of their slices.

    Gossip gathers after its exchange and the gradients, so nothing hides it.
    """
    nodes = cluster.span(ranks).nodes
    if nodes == 1:
        return 0.0
    span = Span(ranks // nodes, 1)
    return sum(gather_seconds(bucket.num_bytes, span, cluster) for bucket in job.buckets)


def _by_node(compute: Floats, job: Job, cluster: Cluster) -> Floats:
    """Times[steps, ranks] after the ranks of each node have all-reduced their gradients."""
    steps, ranks = compute.shape
    local = ranks // cluster.span(ranks).nodes
    of_nodes = all_reduced(compute.reshape(steps, -1, local), job, cluster)
    return np.repeat(of_nodes, local, axis=1)
