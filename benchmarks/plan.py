"""How long the order of samples takes, and what it weighs beside a shuffled list.

python benchmarks/plan.py
"""

import resource
import statistics
import time

import numpy as np

from trainyard.data.plan import ShuffledPlan

BATCH = 4096
ROUNDS = 15


def microseconds_per_id(plan: ShuffledPlan) -> list[float]:
    """Time of one batch at random steps, per id."""
    times = []
    for step in np.random.default_rng(0).integers(0, 10**6, ROUNDS):
        started = time.perf_counter()
        plan.batch(int(step))
        times.append((time.perf_counter() - started) / BATCH * 1e6)
    return times


def shuffle_seconds(num_samples: int) -> float:
    """Time of shuffling a whole epoch as one array, which every rank of other trainers holds."""
    started = time.perf_counter()
    np.random.default_rng(0).permutation(num_samples)
    return time.perf_counter() - started


def main() -> None:
    print(f"{'samples':>12} {'us per id: min, median, max':>32} {'shuffled list':>24}")
    for num_samples in (1_281_167, 14_197_122):
        times = microseconds_per_id(ShuffledPlan(num_samples, BATCH, seed=0))
        spread = f"{min(times):.3f}  {statistics.median(times):.3f}  {max(times):.3f}"
        listed = f"{shuffle_seconds(num_samples):.2f} s, {num_samples * 8 / 1e6:.0f} MB"
        print(f"{num_samples:>12,} {spread:>32} {listed:>24}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process, lists included: {peak:.0f} MB")


if __name__ == "__main__":
    main()
