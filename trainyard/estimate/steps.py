"""Step times from compute times of ranks and costs of messages.

`compute` is [steps, ranks] in seconds throughout.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trainyard.estimate.jitter import Floats
from trainyard.estimate.job import Job
from trainyard.estimate.network import Cluster, Round, all_reduce_seconds, gather_seconds


def all_reduced(compute: Floats, job: Job, cluster: Cluster) -> Floats:
    """Times[...] of steps[..., ranks] with all-reduced gradients, as in torch DDP.

    A bucket is sent once the slowest rank has it and the previous bucket is done.
    """
    span = cluster.span(compute.shape[-1])
    slowest: Floats = compute.max(-1)
    through = np.zeros_like(slowest)
    for bucket in job.buckets:
        ready = slowest * (job.forward + (1 - job.forward) * bucket.ready)
        message = all_reduce_seconds(bucket.num_bytes, span, cluster)
        through = np.maximum(ready, through) + message
    return through


def sharded(compute: Floats, job: Job, cluster: Cluster) -> Floats:
    """Times[steps] of sharded models: weights are gathered ahead of both passes, block by block.

    Gradients are scattered. Blocks are the job's buckets. Gathers and scatters share the network,
    each in its own order.
    """
    span = cluster.span(compute.shape[-1])
    slowest: Floats = compute.max(-1)
    bounds = [0.0, *(bucket.ready for bucket in job.buckets)]
    work = [stop - start for start, stop in pairwise(bounds)]
    messages = [gather_seconds(b.num_bytes, span, cluster) for b in job.buckets]
    done = np.zeros_like(slowest)
    gathered = 0.0
    for message, part in zip(reversed(messages), reversed(work), strict=True):
        gathered += message
        done = np.maximum(done, gathered) + slowest * job.forward * part
    network = done + 2 * sum(messages)  # earliest end of all messages
    ahead, scattered = done.copy(), done.copy()
    for message, part in zip(messages, work, strict=True):
        ahead += message
        done = np.maximum(done, ahead) + slowest * (1 - job.forward) * part
        scattered = np.maximum(done, scattered) + message
    both: Floats = np.maximum(scattered, network)
    return both


def exchanged(compute: Floats, rounds: Sequence[Round], *, overlap: bool) -> float:
    """Mean seconds of a step; each step averages weights with the group of its round.

    With overlap, the exchange of step k begins when the last rank of a group begins the step, and
    a rank ends the step when both the exchange and its own compute are done.
    """
    orders = [np.argsort(turn.group, kind="stable") for turn in rounds]
    starts = [
        np.flatnonzero(np.diff(turn.group[order], prepend=-1))
        for turn, order in zip(rounds, orders, strict=True)
    ]
    clock = np.zeros(compute.shape[1])
    for step, own in enumerate(compute):
        number = step % len(rounds)
        turn = rounds[number]
        computed = clock + own
        begin = clock if overlap else computed
        last = np.maximum.reduceat(begin[orders[number]], starts[number])  # by group
        through = last[turn.group] + turn.seconds
        clock = np.maximum(computed, through) if overlap else through
    return float(clock.mean()) / len(compute)
