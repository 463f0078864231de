import itertools

import numpy as np
import pytest

from trainyard.data.rng import UInt64s, fold_in, permute, splitmix64, uniforms

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys_of(seed: int, epoch: int, count: int) -> UInt64s:
    return fold_in(seed, np.full(count, epoch, np.int64))


def order(seed: int, epoch: int, size: int) -> list[int]:
    ids: list[int] = permute(np.arange(size), keys_of(seed, epoch, size), size).tolist()
    return ids


def chi_square(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    states = np.arange(1, 4, dtype=np.uint64) * GOLDEN
    # The published outputs of splitmix64 seeded with 0.
    assert splitmix64(states).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def unmix(x: UInt64s) -> UInt64s:
    """`mix` undone: shifts until nothing is left to shift, and the multipliers' inverses."""
    first: int = pow(0xBF58476D1CE4E5B9, -1, 2**64)
    second: int = pow(0x94D049BB133111EB, -1, 2**64)
    x = x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))
    x = x * np.uint64(second)
    x = x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x = x * np.uint64(first)
    undone: UInt64s = x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))
    return undone


def test_mix_is_one_to_one() -> None:
    words = np.random.default_rng(0).integers(0, 2**64, 100_000, np.uint64)
    words = np.concatenate([words, np.arange(1000, dtype=np.uint64)])
    assert np.array_equal(unmix(splitmix64(words)), words)


def test_fold_depends_on_the_seed_and_on_every_column_and_their_order() -> None:
    a, b = np.array([1, 2, 3]), np.array([4, 5, 6])
    variants = [
        fold_in(0, a),
        fold_in(1, a),
        fold_in(0, b),
        fold_in(0, a, b),
        fold_in(0, b, a),
        fold_in(-1, a),
    ]
    keys = np.concatenate(variants).tolist()
    assert len(set(keys)) == len(keys)


def test_fold_gives_one_element_the_key_it_has_among_others() -> None:
    epochs, samples = np.array([0, 0, 7]), np.array([5, 9, 2**40])
    together = fold_in(3, epochs, samples)
    assert together[2:].tolist() == fold_in(3, epochs[2:], samples[2:]).tolist()


def test_permute_is_a_bijection_for_every_small_size() -> None:
    for size in range(1, 301):
        assert sorted(order(size, 0, size)) == list(range(size)), size


@pytest.mark.parametrize("size", [511, 512, 513, 65_536, 65_537, 99_991, 262_143, 300_001])
def test_permute_is_a_bijection_around_powers_of_two(size: int) -> None:
    assert np.array_equal(np.sort(order(5, 2, size)), np.arange(size))


def test_permute_depends_on_each_position_and_its_own_key_alone() -> None:
    size, positions = 1000, np.array([0, 999, 1, 1])
    keys = fold_in(0, np.array([4, 4, 4, 5]))
    moved = permute(positions, keys, size).tolist()
    fourth, fifth = order(0, 4, size), order(0, 5, size)
    assert moved == [fourth[0], fourth[999], fourth[1], fifth[1]]


# 1 in 1000 uniform generators exceeds these (chi-square with size! - 1 degrees of freedom).
@pytest.mark.parametrize(("size", "limit"), [(3, 20.5), (4, 49.7)])
def test_every_permutation_is_equally_likely(size: int, limit: float) -> None:
    epochs = 24_000
    keys = fold_in(0, np.repeat(np.arange(epochs), size))
    orders = permute(np.tile(np.arange(size), epochs), keys, size).reshape(epochs, size)
    seen = {tuple(p): 0 for p in itertools.permutations(range(size))}
    for row in orders.tolist():
        seen[tuple(row)] += 1
    assert chi_square(np.array(list(seen.values()))) < limit


def test_no_two_seeds_share_an_epoch() -> None:
    orders = [tuple(order(seed, epoch, 1000)) for seed in range(6) for epoch in range(6)]
    assert len(set(orders)) == len(orders)


def test_a_shuffled_epoch_keeps_no_trace_of_the_stored_order() -> None:
    # 2**17 and its double are where the network has no walking to help it.
    for size in (100_000, 2**17, 2**18):
        ids = np.array(order(0, 0, size))
        assert abs(np.corrcoef(ids, np.arange(size))[0, 1]) < 4 / size**0.5
        assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 4 / size**0.5
        assert np.count_nonzero(np.diff(ids) == 1) < 10  # one on average
        assert np.count_nonzero(ids == np.arange(size)) < 10  # likewise


def test_uniforms_fill_the_interval_evenly() -> None:
    numbers = uniforms(np.arange(50_000, dtype=np.uint64), 3)  # the least random keys there are
    assert numbers.shape == (50_000, 3)
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        tenths = np.bincount((column * 10).astype(np.int64), minlength=10)
        assert chi_square(tenths) < 27.9  # 1 in 1000 uniform generators exceeds this
    neighbours = np.hstack([numbers[:-1], numbers[1:]])
    between = np.asarray(np.corrcoef(neighbours, rowvar=False))[np.triu_indices(6, 1)]
    assert np.abs(between).max() < 4 / 50_000**0.5


def test_uniforms_reach_zero_and_never_one() -> None:
    extremes = np.array([0, 2**64 - 1], np.uint64)
    keys = unmix(unmix(extremes)) - GOLDEN  # whose first numbers come from these words
    assert uniforms(keys, 1).tolist() == [[0.0], [1 - 2.0**-53]]


def test_uniforms_are_a_function_of_the_key() -> None:
    keys = fold_in(0, np.arange(100))
    numbers = uniforms(keys, 4)
    assert np.array_equal(uniforms(keys[50:], 4), numbers[50:])
    assert np.array_equal(uniforms(keys, 2), numbers[:, :2])  # asking for more changes none
    assert len(np.unique(numbers)) == numbers.size
