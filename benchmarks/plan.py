"""How long each order of samples takes, and what it weighs beside a shuffled list.

python -m benchmarks.plan
"""

import resource
import statistics
import time

import numpy as np

from trainyard.data.sampler.plan import EndlessPlan, ResampledPlan, ShuffledPlan, WeightedPlan

BATCH = 4096
ROUNDS = 51
SHARD = 1000  # samples


def plans(num_samples: int) -> dict[str, EndlessPlan]:
    """Each order over a data set of so many samples."""
    half = num_samples // 2
    halves, uneven = (half, num_samples - half), (half * 2, (num_samples - half) // 2)
    shards = np.array([*range(0, num_samples, SHARD), num_samples])
    return {
        "exact": ShuffledPlan(num_samples, BATCH, seed=0),
        "exact, locality 10,000": ShuffledPlan(num_samples, BATCH, seed=0, locality=10_000),
        "exact, weights 2 and 0.5": WeightedPlan(halves, uneven, BATCH, seed=0),
        "resample": ResampledPlan((num_samples,), (num_samples,), shards, 64, BATCH, seed=0),
    }


def milliseconds(plan: EndlessPlan) -> list[float]:
    """Time of one batch and its visit numbers at random steps."""
    times = []
    for step in np.random.default_rng(0).integers(0, 10**6, ROUNDS):
        started = time.perf_counter()
        plan.batch(int(step))
        plan.epochs(int(step))
        times.append((time.perf_counter() - started) * 1e3)
    return times


def shuffle_seconds(num_samples: int) -> float:
    """Time of shuffling a whole epoch as one array, which every rank of other trainers holds."""
    started = time.perf_counter()
    np.random.default_rng(0).permutation(num_samples)
    return time.perf_counter() - started


def main() -> None:
    print(f"{'samples':>12}  {'order':<26} {f'ms per batch of {BATCH}: min, median, max':>40}")
    for num_samples in (1_281_167, 14_197_122):
        for name, plan in plans(num_samples).items():
            times = milliseconds(plan)
            spread = f"{min(times):.2f}  {statistics.median(times):.2f}  {max(times):.2f}"
            print(f"{num_samples:>12,}  {name:<26} {spread:>40}")
        listed = f"{shuffle_seconds(num_samples):.2f} s, {num_samples * 8 / 1e6:.0f} MB an epoch"
        print(f"{num_samples:>12,}  {'a shuffled list':<26} {listed:>40}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process, lists included: {peak:.0f} MB")


if __name__ == "__main__":
    main()
