"""Steps against closed forms and against plain Python."""

import numpy as np
import pytest

from trainyard.averaging.topology import rounds
from trainyard.estimate.jitter import Floats, Jitter
from trainyard.estimate.job import Bucket, Job, build_job
from trainyard.estimate.network import (
    Cluster,
    Link,
    Round,
    Span,
    all_reduce_seconds,
    build_round,
    gather_seconds,
)
from trainyard.estimate.steps import all_reduced, exchanged, sharded

LINK = Link(1e-3, 1e8)
FLAT = Cluster(1, LINK, LINK, algorithms=("ring",))
TWO = Job((Bucket(1e6, 0.25), Bucket(4e6, 1.0)))


def even(seconds: float, ranks: int = 4, steps: int = 12) -> Floats:
    return np.full((steps, ranks), seconds)


def test_the_last_bucket_is_what_cannot_be_hidden() -> None:
    first, last = (all_reduce_seconds(b.num_bytes, Span(4, 4), FLAT) for b in TWO.buckets)
    long = all_reduced(even(10.0), TWO, FLAT)
    assert long == pytest.approx(10 + last)
    short = all_reduced(even(0.003), TWO, FLAT)  # the first is there after half of it
    assert short == pytest.approx(0.0015 + first + last)


def test_all_reduce_waits_for_the_slowest_of_each_step() -> None:
    compute = Jitter(0.3).compute(10.0, steps=20, ranks=4, seed=1)
    last = all_reduce_seconds(TWO.buckets[1].num_bytes, Span(4, 4), FLAT)
    assert all_reduced(compute, TWO, FLAT) == pytest.approx(compute.max(1) + last)


def test_sharded_hides_all_but_its_ends_or_all_of_its_compute() -> None:
    first, last = (gather_seconds(b.num_bytes, Span(4, 4), FLAT) for b in TWO.buckets)
    # The forward pass begins with the last bucket, the backward pass with the first.
    long = sharded(even(10.0), TWO, FLAT)
    assert long == pytest.approx(last + 10 + first + last)
    nothing = sharded(even(0.0), TWO, FLAT)
    assert nothing == pytest.approx(3 * (first + last))


def everyone(ranks: int, seconds: float) -> Round:
    return Round(np.zeros(ranks, dtype=np.int64), np.full(ranks, seconds))


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
    compute = Jitter(0.3, 0.02, 5.0).compute(1.0, steps=17, ranks=8, seed=3)
    turns = [[list(group) for group in turn] for turn in rounds(topology, 8)]
    seconds = [0.9 + 0.2 * number for number in range(len(turns))]
    found = exchanged(
        compute,
        [
            build_round(turn, [0.0], FLAT)._replace(seconds=np.full(8, each))
            for turn, each in zip(turns, seconds, strict=True)
        ],
        overlap=overlap,
    )
    assert found == pytest.approx(plainly(compute, turns, seconds, overlap), rel=1e-12)


def test_compute_times_are_drawn_alike_and_average_to_what_they_should() -> None:
    drawn = Jitter(0.2).compute(0.1, steps=50, ranks=16, seed=5)
    assert drawn.shape == (50, 16)
    assert (drawn == Jitter(0.2).compute(0.1, steps=50, ranks=16, seed=5)).all()
    assert (drawn != Jitter(0.2).compute(0.1, steps=50, ranks=16, seed=6)).any()
    assert drawn.mean() == pytest.approx(0.1)
    assert np.log(drawn).std() == pytest.approx(0.2, rel=0.1)
    stalled = Jitter(0.2, 0.1, 3.0).compute(0.1, steps=50, ranks=16, seed=5) - drawn
    assert set(stalled.round(9).ravel()) == {0, 3}
    assert (stalled > 1).mean() == pytest.approx(0.1, abs=0.05)


def test_buckets_are_filled_from_the_last_parameter_as_torch_does() -> None:
    mega = 1 << 20
    job = build_job([4 * mega, 3 * mega, 2 * mega, 5 * mega, mega // 8, mega // 8])
    sizes = [bucket.num_bytes / mega for bucket in job.buckets]
    assert sizes == [1.0, 28.0, 28.0]  # MiB: a first one of 1, then of at least 25
    assert [bucket.ready for bucket in job.buckets] == pytest.approx([2 / 6, 4 / 6, 1])
    assert job.num_bytes == 57 * mega
    assert job.scaled(0.25).num_bytes == job.num_bytes / 4
