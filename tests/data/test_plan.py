import tracemalloc

import numpy as np
import pytest

from trainyard.data.plan import OnePassPlan, Plan, ShuffledPlan

IMAGENET_1K, IMAGENET_21K = 1_281_167, 14_197_122


@pytest.mark.parametrize(
    ("num_samples", "global_batch", "epochs"),
    [(1, 4, 2), (7, 3, 2), (1000, 64, 2), (IMAGENET_1K, 65_536, 1), (IMAGENET_21K, 65_536, 1)],
)
def test_every_epoch_is_a_permutation(num_samples: int, global_batch: int, epochs: int) -> None:
    plan = ShuffledPlan(num_samples, global_batch, seed=0)
    counts = np.zeros(num_samples * epochs, np.uint8)

    for step in range(-(-len(counts) // global_batch)):
        ids, epoch = plan.batch(step), plan.epochs(step)
        assert 0 <= ids.min() <= ids.max() < num_samples
        inside = epoch < epochs
        np.add.at(counts, ids[inside] + epoch[inside] * num_samples, 1)

    assert counts.min() == counts.max() == 1


def test_epochs_differ() -> None:
    plan = ShuffledPlan(num_samples=1000, global_batch=1000, seed=0)

    assert plan.batch(0).tolist() != plan.batch(1).tolist()


def test_batches_run_across_epoch_borders() -> None:
    plan = ShuffledPlan(num_samples=10, global_batch=4, seed=0)

    batches = [plan.batch(step) for step in range(5)]

    assert [len(batch) for batch in batches] == [4] * 5
    stream = np.concatenate(batches).tolist()
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))


def test_a_batch_may_span_many_epochs() -> None:
    plan = ShuffledPlan(num_samples=3, global_batch=8, seed=0)

    assert plan.epochs(0).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert plan.epochs(1).tolist() == [2, 3, 3, 3, 4, 4, 4, 5]


def test_epochs_change_at_the_border() -> None:
    plan = ShuffledPlan(num_samples=10, global_batch=5, seed=0)

    assert [plan.epochs(step).tolist() for step in range(4)] == [[0] * 5, [0] * 5, [1] * 5, [1] * 5]
    assert plan.epochs(200_000_001).tolist() == [100_000_000] * 5


def test_the_stream_does_not_depend_on_the_size_of_the_batch() -> None:
    small = ShuffledPlan(num_samples=100, global_batch=6, seed=0)
    large = ShuffledPlan(num_samples=100, global_batch=30, seed=0)

    assert np.concatenate([small.batch(step) for step in range(50)]).tolist() == (
        np.concatenate([large.batch(step) for step in range(10)]).tolist()
    )


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("global_batch", [48, 50])
@pytest.mark.parametrize("step", [0, 20, 10**9])
def test_ranks_see_slices_of_the_global_batch(size: int, global_batch: int, step: int) -> None:
    plans: list[Plan] = [
        ShuffledPlan(1000, global_batch, seed=0),
        OnePassPlan(1000, global_batch),
    ]
    for plan in plans:
        batch, epochs = plan.batch(step), plan.epochs(step)
        interleaved = np.full_like(batch, -1)
        for rank in range(size):
            interleaved[rank::size] = plan.batch(step, rank, size)
            assert np.array_equal(plan.epochs(step, rank, size), epochs[rank::size])
        assert np.array_equal(interleaved, batch)


# Pinned on purpose: runs resume and are compared by this order. If a change makes this test fail,
# every saved run changes its order with it; change the numbers only where that is meant.
@pytest.mark.parametrize(
    ("num_samples", "seed", "first"),
    [
        (1, 0, [0, 0, 0, 0, 0, 0, 0, 0]),
        (7, 0, [5, 0, 6, 4, 3, 2, 1, 2]),
        (1000, 0, [159, 73, 848, 440, 759, 484, 587, 237]),
        (1000, 1, [434, 166, 282, 965, 870, 199, 945, 773]),
        (1000, -1, [641, 907, 418, 196, 388, 713, 879, 664]),
        (50_000, 42, [31460, 26424, 3336, 23256, 20176, 26950, 19805, 23888]),
        (IMAGENET_1K, 0, [454744, 726715, 906022, 1176894, 1133173, 747271, 385367, 230324]),
        (
            IMAGENET_21K,
            2**63 + 5,
            [10049669, 4570877, 8835041, 4320089, 4278957, 10714319, 9014066, 13096797],
        ),
    ],
)
def test_the_order_never_changes(num_samples: int, seed: int, first: list[int]) -> None:
    assert ShuffledPlan(num_samples, global_batch=8, seed=seed).batch(0).tolist() == first


def test_a_batch_allocates_nothing_of_the_size_of_the_data_set() -> None:
    plan = ShuffledPlan(IMAGENET_21K, global_batch=4096, seed=0)
    tracemalloc.start()
    try:
        plan.batch(123_456_789)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4_000_000  # one bit per sample is 1.8 MB, one byte 14 MB; a batch is 33 kB


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_samples", "global_batch"), [(1, 4), (7, 3), (60, 30), (1000, 64)])
def test_one_pass_covers_every_sample_once(size: int, num_samples: int, global_batch: int) -> None:
    plan = OnePassPlan(num_samples, global_batch)

    seen = [plan.batch(step, rank, size) for step in range(plan.num_steps) for rank in range(size)]

    assert sorted(np.concatenate(seen).tolist()) == list(range(num_samples))


def test_one_pass_keeps_the_stored_order_and_ends_short() -> None:
    plan = OnePassPlan(num_samples=7, global_batch=3)

    assert plan.num_steps == 3
    assert [plan.batch(step).tolist() for step in range(4)] == [[0, 1, 2], [3, 4, 5], [6], []]
    assert plan.epochs(1).tolist() == [0, 0, 0]
    assert plan.batch(2, rank=1, size=2).tolist() == []  # a rank may have nothing left
