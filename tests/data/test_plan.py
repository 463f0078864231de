import dataclasses
import pickle
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from trainyard.data.sampler.plan import (
    EndlessPlan,
    Ids,
    OnePassPlan,
    Plan,
    PlanSlice,
    RepeatedPlan,
    ResampledPlan,
    ShuffledPlan,
    WeightedPlan,
    balanced_plan,
)

IMAGENET_1K, IMAGENET_21K = 1_281_167, 14_197_122

SHARDS = np.array([0, 300, 310, 600, 700, 1000])  # the last two are a part of their own
# Classes of 700, 200, 7, 0 and 93 samples, not together.
LABELS = np.repeat(np.array([0, 1, 2, 4], np.int32), [700, 200, 7, 93])[np.arange(1000) * 7 % 1000]
ENDLESS: dict[str, EndlessPlan] = {
    "shuffled": ShuffledPlan(1000, 48, seed=0),
    "local": ShuffledPlan(1000, 48, seed=0, locality=100),
    "weighted": WeightedPlan((600, 400), (1200, 100), 48, seed=0),
    "weighted and local": WeightedPlan((600, 400), (1200, 100), 48, seed=0, locality=100),
    "balanced": balanced_plan(LABELS, 0.7, global_batch=48, seed=0),
    "resampled": ResampledPlan((600, 400), (1200, 100), SHARDS, 10, 48, seed=0),
}
DERIVED: dict[str, EndlessPlan] = {
    "repeated": RepeatedPlan(ENDLESS["shuffled"], repeats=3, global_batch=48),
    "repeated and resampled": RepeatedPlan(ENDLESS["resampled"], repeats=2, global_batch=48),
    "excerpt": PlanSlice(ENDLESS["weighted"], first=777, global_batch=48),
    "excerpt of a repeated one": PlanSlice(
        RepeatedPlan(ENDLESS["local"], repeats=3, global_batch=7), first=100, global_batch=48
    ),
}
STREAMS = ENDLESS | DERIVED


def stream(plan: EndlessPlan, count: int, start: int = 0) -> tuple[Ids, Ids]:
    """The ids and the visits at positions of the stream."""
    whole = dataclasses.replace(plan, global_batch=start + count)  # type: ignore[type-var]
    return whole.batch(0)[start:], whole.epochs(0)[start:]


@pytest.mark.parametrize(
    ("num_samples", "global_batch", "epochs"),
    [
        *[(1, 4, 2), (7, 3, 2), (1000, 64, 2), (IMAGENET_1K, 65_536, 1)],
        pytest.param(IMAGENET_21K, 65_536, 1, marks=pytest.mark.night),
    ],
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


def test_batches_run_across_epoch_borders() -> None:
    """A batch may span many epochs."""
    plan = ShuffledPlan(num_samples=3, global_batch=8, seed=0)
    assert plan.epochs(0).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert plan.epochs(1).tolist() == [2, 3, 3, 3, 4, 4, 4, 5]
    plan = ShuffledPlan(num_samples=1000, global_batch=500, seed=0)
    assert plan.epochs(200_000_001).tolist() == [100_000_000] * 500
    orders = [plan.batch(step).tolist() for step in range(4)]
    assert orders[:2] != orders[2:]


@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_can_be_cut_anywhere(name: str) -> None:
    """Any step of any batch size is found by itself: that is what makes a resumption exact."""
    ids, visits = stream(STREAMS[name], 4200)
    for global_batch in (1, 7, 60, 4200):
        plan = dataclasses.replace(STREAMS[name], global_batch=global_batch)  # type: ignore[type-var]
        for step in {0, 1, 4200 // global_batch // 2, 4200 // global_batch - 1}:
            place = slice(step * global_batch, (step + 1) * global_batch)
            if place.stop <= 4200:
                assert np.array_equal(plan.batch(step), ids[place])
                assert np.array_equal(plan.epochs(step), visits[place])


@pytest.mark.parametrize("name", STREAMS)
def test_no_two_visits_to_a_sample_are_alike(name: str) -> None:
    ids, visits = stream(STREAMS[name], 10_000)
    pairs = Counter(zip(ids.tolist(), visits.tolist(), strict=True))
    assert len(ids) > len(set(ids.tolist()))
    assert max(pairs.values()) == 1


@pytest.mark.parametrize("name", ENDLESS)
def test_seeds_differ(name: str) -> None:
    ids = [
        stream(dataclasses.replace(ENDLESS[name], seed=seed), 3000)[0]  # type: ignore[type-var]
        for seed in (0, 1)
    ]
    assert np.mean(ids[0] == ids[1]) < 0.01


@pytest.mark.parametrize("name", STREAMS)
def test_plans_travel_to_the_loader_process(name: str) -> None:
    plan = pickle.loads(pickle.dumps(STREAMS[name]))
    assert np.array_equal(plan.batch(7), STREAMS[name].batch(7))


@pytest.mark.parametrize(
    ("size", "global_batch", "step"), [(1, 48, 0), (2, 48, 20), (3, 50, 20), (8, 50, 10**9)]
)
def test_ranks_see_slices_of_the_global_batch(size: int, global_batch: int, step: int) -> None:
    plans: list[Plan] = [
        dataclasses.replace(plan, global_batch=global_batch)  # type: ignore[type-var]
        for plan in STREAMS.values()
    ]
    for plan in [*plans, OnePassPlan(1000, global_batch)]:
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


def test_the_other_orders_never_change() -> None:
    assert {name: plan.batch(30)[:6].tolist() for name, plan in ENDLESS.items()} == {
        "shuffled": [399, 388, 652, 224, 79, 484],
        "local": [663, 39, 44, 928, 409, 125],
        "weighted": [360, 729, 378, 327, 383, 127],
        "weighted and local": [582, 595, 514, 243, 218, 118],
        "balanced": [447, 212, 391, 429, 184, 113],
        "resampled": [384, 916, 275, 267, 119, 186],
    }


def test_one_pass_keeps_the_stored_order_and_ends_short() -> None:
    plan = OnePassPlan(num_samples=7, global_batch=3)
    assert plan.num_steps == 3
    assert [plan.batch(step).tolist() for step in range(4)] == [[0, 1, 2], [3, 4, 5], [6], []]
    assert plan.epochs(1).tolist() == [0, 0, 0]
    assert plan.batch(2, rank=1, size=2).tolist() == []  # a rank may have nothing left


# --- locality ---


def block_of(locality: int) -> int:
    return max(1, locality // 16)


def window_of(locality: int) -> int:
    return locality // block_of(locality) * block_of(locality)


def num_runs(ids: Ids, num_samples: int) -> int:
    """How many stretches of neighbours a set of ids is, the last id being next to the first."""
    present = np.zeros(num_samples, bool)
    present[ids] = True
    return int(np.sum(present & ~np.roll(present, 1)))


@settings(deadline=None, max_examples=80)
@given(
    num_samples=st.integers(1, 20_000),
    locality=st.integers(1, 30_000),
    seed=st.integers(0, 2**31 - 1),
    first=st.integers(0, 10**6),
)
def test_any_local_epoch_reads_every_sample_once_and_in_blocks(
    num_samples: int, locality: int, seed: int, first: int
) -> None:
    plan = ShuffledPlan(num_samples, num_samples, seed, locality)
    ids = plan.batch(first)
    assert np.array_equal(np.sort(ids), np.arange(num_samples))
    block, window = block_of(locality), window_of(locality)
    for start in range(0, num_samples, max(window, num_samples // 20 // window * window)):
        read = ids[start : start + window]
        assert len(read) <= locality
        assert num_runs(read, num_samples) <= -(-len(read) // block) + 1


def test_a_window_of_imagenet_reads_few_places() -> None:
    """16 blocks, one more where the ring of ids is cut: not 10,000 places."""
    ids, _ = stream(ShuffledPlan(IMAGENET_1K, 1, seed=0, locality=10_000), IMAGENET_1K)
    assert np.array_equal(np.sort(ids), np.arange(IMAGENET_1K))
    runs = [num_runs(ids[start : start + 10_000], IMAGENET_1K) for start in range(0, 10**5, 10_000)]
    assert max(runs) <= 17
    assert min(runs) > 10  # and not one place either: windows are of many blocks


def test_neighbours_are_separated() -> None:
    """The mean distance of two that are shuffled in a window is a third of it."""
    ids, _ = stream(ShuffledPlan(100_000, 1, seed=0, locality=1600), 100_000)
    place = np.empty(100_000, int)
    place[ids] = np.arange(100_000)
    distance = np.abs(np.diff(place))
    same_window = distance < 1600
    assert np.mean(same_window) > 0.95
    assert np.mean(distance[same_window]) == pytest.approx(1600 / 3, rel=0.03)
    # Two neighbours meet in a batch of 64 as rarely as any two samples of a window do.
    assert np.mean(np.diff(place // 64) == 0) == pytest.approx(64 / 1600, rel=0.1)


@pytest.mark.parametrize("locality", [1, 7, 48, 200, 1000])
def test_no_sample_has_a_place_of_its_own(locality: int) -> None:
    """Over epochs the first and last draws, and the places of three ids, are uniform."""
    num_samples, epochs = 203, 1500
    ids, _ = stream(ShuffledPlan(num_samples, 1, 5, locality), num_samples * epochs)
    table = ids.reshape(epochs, num_samples)
    place = np.argsort(table, axis=1)
    for column in (table[:, 0], table[:, 101], table[:, -1], place[:, 0], place[:, 202]):
        assert chisquare(np.bincount(column, minlength=num_samples)).pvalue > 1e-4


def test_blocks_meet_others_in_every_epoch() -> None:
    """Of the samples that share a window with sample 0, few do so again in the next epoch."""
    plan = ShuffledPlan(16_000, 16_000, seed=0, locality=800)
    company = []
    for epoch in range(2):
        ids = plan.batch(epoch)
        start = int(np.flatnonzero(ids == 0)[0]) // 800 * 800
        company.append(set(ids[start : start + 800].tolist()))
    assert len(company[0] & company[1]) < 250  # two blocks of 50 by itself, the rest by chance


# --- weights ---


@pytest.mark.parametrize("locality", [0, 40])
@pytest.mark.parametrize(
    ("sizes", "draws"),
    [((100,), (100,)), ((100, 7, 33), (200, 4, 50)), ((1, 60), (90, 30)), ((50, 50), (25, 100))],
)
def test_each_part_is_seen_pass_by_pass(
    sizes: tuple[int, ...], draws: tuple[int, ...], locality: int
) -> None:
    total, epochs = sum(draws), 12
    plan = WeightedPlan(sizes, draws, total, 0, locality)
    assert plan.epoch_samples == total
    ids, visits = stream(plan, total * epochs)
    part = np.searchsorted(np.cumsum(sizes), ids, side="right")
    for epoch in range(epochs):
        inside = part[epoch * total : (epoch + 1) * total]
        assert np.bincount(inside, minlength=len(sizes)).tolist() == list(draws)
    first = 0
    for number, (size, count) in enumerate(zip(sizes, draws, strict=True)):
        seen = Counter(visits[part == number].tolist())
        whole, rest = divmod(count * epochs, size)
        assert [seen[visit] for visit in range(whole)] == [size] * whole
        assert seen[whole] == rest
        for visit in range(whole):
            of_pass = ids[(part == number) & (visits == visit)]
            assert sorted(of_pass.tolist()) == list(range(first, first + size))
        first += size


def test_parts_are_mixed() -> None:
    """A quarter of every stretch of 200: 50, give or take five standard deviations."""
    ids, _ = stream(WeightedPlan((500, 500), (500, 1500), 2000, seed=0), 2000)
    of_first_part = (ids < 500).reshape(10, 200).sum(axis=1)
    assert np.all(np.abs(of_first_part - 50) < 5 * 6.1)


def test_weights_of_one_part_keep_neighbours_together() -> None:
    """With a locality a window of a weighted order too reads few places."""
    plan = WeightedPlan((20_000, 30_000), (20_000, 15_000), 1, seed=0, locality=1600)
    ids, _ = stream(plan, 35_000)
    for start in range(0, 35_000, 1600):
        # 16 blocks of draws, each of up to two blocks of 100 samples, or three at a border.
        assert num_runs(ids[start : start + 1600], 50_000) <= 3 * 16


# --- resampling ---


def test_every_sample_is_drawn_alike() -> None:
    """Also where shards are of unequal length, 10 to 300, and in shares of the parts."""
    count = 1_300_000
    ids, _ = stream(ENDLESS["resampled"], count)
    share = np.bincount(ids, minlength=1000) / count
    assert share[:600].sum() == pytest.approx(12 / 13, rel=0.01)
    # Draws come in runs of 10, so their number scatters as that of runs does.
    for part in (slice(0, 600), slice(600, 1000)):
        runs = np.bincount(ids, minlength=1000)[part] / 10
        z = (runs - runs.mean()) / np.sqrt(runs.mean())
        assert np.abs(z).max() < 5
        assert np.mean(z**2) < 1.5


def test_draws_are_with_replacement() -> None:
    """In an epoch of single draws a share of 1/e of the samples is missed."""
    plan = ResampledPlan((20_000,), (20_000,), np.array([0, 20_000]), 1, 20_000, seed=0)
    counts = np.bincount(plan.batch(0), minlength=20_000)
    assert np.mean(counts == 0) == pytest.approx(np.exp(-1), rel=0.03)
    assert np.mean(counts == 2) == pytest.approx(np.exp(-1) / 2, rel=0.05)
    assert counts.tolist() != np.bincount(plan.batch(1), minlength=20_000).tolist()


def test_a_window_is_runs_of_neighbours_inside_shards() -> None:
    shards = np.array([0, 100, 900, 1700, 10**6])
    plan = ResampledPlan((10**6,), (10**6,), shards, 64, 5120, seed=0)
    for window in range(20):
        ids = plan.batch(window)
        assert num_runs(ids, 10**6) <= 80 + 3  # a run may go on at its shard's beginning
        shard = np.searchsorted(shards, ids, side="right")
        assert all(count % 64 == 0 for count in np.bincount(shard))
        assert np.mean(np.abs(np.diff(ids)) == 1) < 0.02  # shuffled


def test_a_shard_is_drawn_in_proportion_to_its_samples() -> None:
    shards = np.array([0, 100, 1000, 2000])
    plan = ResampledPlan((2000,), (2000,), shards, 100, 5100, seed=0)
    ids = np.concatenate([plan.batch(step) for step in range(400)])
    runs = np.bincount(np.searchsorted(shards, ids, side="right") - 1) / 100
    expected = np.diff(shards) / 2000 * runs.sum()
    assert chisquare(runs, expected).pvalue > 1e-3


@pytest.mark.parametrize(
    "plan",
    [
        ShuffledPlan(IMAGENET_21K, 4096, seed=0),
        ShuffledPlan(IMAGENET_21K, 4096, seed=0, locality=100_000),
        WeightedPlan((IMAGENET_21K, IMAGENET_1K), (IMAGENET_21K, 10**7), 4096, seed=0),
        ResampledPlan(
            (IMAGENET_21K,),
            (IMAGENET_21K,),
            np.linspace(0, IMAGENET_21K, 14_198, dtype=int),
            64,
            global_batch=4096,
            seed=0,
        ),
    ],
)
def test_no_order_allocates_anything_of_the_size_of_the_data_set(plan: EndlessPlan) -> None:
    tracemalloc.start()
    try:
        plan.batch(123_456_789)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000  # one bit per sample is 1.8 MB, one byte 14 MB; a batch is 33 kB


# --- balanced classes ---


@pytest.mark.parametrize("balance", [0.001, 0.5, 1.0])
def test_classes_get_their_shares_and_samples_take_turns(balance: float) -> None:
    """The definition, written out: over any number of epochs the shares are exact to one draw."""
    plan = balanced_plan(LABELS, balance, global_batch=1000, seed=3)
    assert plan.epoch_samples == 1000
    sizes = np.array([700, 200, 7, 0, 93])
    parts = np.array([n ** (1 - balance) if n else 0.0 for n in sizes.tolist()])
    drawn = np.zeros(1000, int)
    for epoch in range(30):
        drawn += np.bincount(plan.batch(epoch), minlength=1000)
        found = np.bincount(LABELS, weights=drawn)
        expected = (epoch + 1) * 1000 * parts / parts.sum()
        assert np.abs(found - expected).max() < 1.01
        for label in (0, 1, 2, 4):
            assert np.ptp(drawn[label == LABELS]) <= 1  # no sample twice before another is once


def test_more_classes_than_draws_of_one() -> None:
    """Shares of 1.5 draws are 1 and 2 by turns, not always the same for a class."""
    labels = np.repeat(np.arange(40, dtype=np.int32), [1, 2] * 20)
    plan = balanced_plan(labels, 1.0, global_batch=60, seed=0)
    found = np.bincount(labels[np.concatenate([plan.batch(epoch) for epoch in range(10)])])
    assert found.tolist() == [15] * 40


# --- repeated augmentation ---


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("name", ENDLESS)
def test_every_sample_comes_several_times_running(name: str, repeats: int) -> None:
    plain = ENDLESS[name]
    repeated = RepeatedPlan(plain, repeats, global_batch=48)
    ids, visits = stream(repeated, 700 * repeats)
    expected_ids, expected_visits = stream(plain, 700)
    assert ids.tolist() == np.repeat(expected_ids, repeats).tolist()
    # Each time another visit, and so another crop; in the order of the plain ones.
    assert (visits // repeats).tolist() == np.repeat(expected_visits, repeats).tolist()
    assert (visits % repeats).tolist() == list(range(repeats)) * 700


def test_an_epoch_of_repeats_is_as_long_as_before_and_shows_a_part() -> None:
    repeated = RepeatedPlan(ShuffledPlan(999, 48, seed=0), 3, global_batch=48)
    assert repeated.epoch_samples == 999
    ids, _ = stream(repeated, 3 * 999)
    epochs = [set(ids[start : start + 999].tolist()) for start in (0, 999, 1998)]
    assert [len(epoch) for epoch in epochs] == [333] * 3
    assert set.union(*epochs) == set(range(999))  # three epochs show each sample, thrice


def test_ranks_share_the_repeats_of_a_sample() -> None:
    """Where there are as many ranks as repeats, each sees another crop of the same samples."""
    repeated = RepeatedPlan(ShuffledPlan(1000, 48, seed=0), 3, global_batch=48)
    ids = [repeated.batch(5, rank, 3).tolist() for rank in range(3)]
    assert ids[0] == ids[1] == ids[2]
    assert [set(repeated.epochs(5, rank, 3) % 3) for rank in range(3)] == [{0}, {1}, {2}]


# --- excerpts ---


@settings(deadline=None, max_examples=50)
@given(
    name=st.sampled_from(sorted(ENDLESS)),
    first=st.integers(0, 3000),
    global_batch=st.integers(1, 100),
    step=st.integers(0, 10),
)
def test_an_excerpt_is_the_stream_from_a_place_on(
    name: str, first: int, global_batch: int, step: int
) -> None:
    excerpt = PlanSlice(ENDLESS[name], first, global_batch)
    ids, visits = stream(ENDLESS[name], global_batch, start=first + step * global_batch)
    assert excerpt.batch(step).tolist() == ids.tolist()
    assert excerpt.epochs(step).tolist() == visits.tolist()
    assert excerpt.epoch_samples == ENDLESS[name].epoch_samples
