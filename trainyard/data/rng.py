"""Random numbers as pure functions of a key: stateless, equal on every rank and machine."""

import numpy as np
from numpy.typing import NDArray

from trainyard.data.arrays import Floats, Ints

UInt64s = NDArray[np.uint64]

# Parts of keys, which keep uses of a seed independent of each other. Runs depend on these numbers.
CROPS, WINDOWS, PASSES, STARTS, POLICIES, JITTER, ERASING = range(1, 8)
MIXING, SHARDS, SHUFFLES, EXTRA, FLIPS, TRANSLATIONS = range(8, 14)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
_MASK64 = (1 << 64) - 1
_ROUNDS = np.arange(1, 7, dtype=np.uint64) * _GOLDEN


def splitmix64(x: UInt64s) -> UInt64s:
    """A bijective scramble of 64-bit words (splitmix64's finaliser, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold_in(seed: int, *parts: Ints) -> UInt64s:
    """One key per element from a seed and any number of integer columns of equal length."""
    # Mixed before use: with a bare seed, epoch 1 of seed 0 would be epoch 0 of seed 1.
    key = splitmix64(np.full(len(parts[0]), seed & _MASK64, np.uint64) + _GOLDEN)
    for part in parts:
        key = splitmix64((key ^ part.astype(np.uint64)) + _GOLDEN)
    return key


def uniforms(keys: UInt64s, count: int) -> Floats:
    """`count` independent uniform numbers in [0, 1) for each key: float64[len(keys), count]."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    words = splitmix64(splitmix64(keys[:, None] + counters))
    return (words >> np.uint64(11)) * np.float64(2.0**-53)


def between(limits: tuple[float, float], random: Floats) -> Floats:
    """Numbers in [0, 1) spread over [limits[0], limits[1])."""
    return limits[0] + (limits[1] - limits[0]) * random


def permute(positions: Ints, keys: UInt64s, size: int) -> Ints:
    """The images of positions under a keyed permutation of range(size); O(1) memory in `size`.

    A six-round Feistel network over the next power of two, repeated until the result lies in the
    range (cycle walking, Black and Rogaway 2002): under two passes on average.
    """
    # Below 8 bits a Feistel network reaches too few permutations; cycle walking is cheap there.
    bits = max(8, (size - 1).bit_length())
    round_keys = [splitmix64(keys + constant) for constant in _ROUNDS]
    out = _feistel(positions.astype(np.uint64), round_keys, bits)
    while (outside := np.flatnonzero(out >= np.uint64(size))).size:
        out[outside] = _feistel(out[outside], [key[outside] for key in round_keys], bits)
    return out.astype(np.int64)


def _feistel(x: UInt64s, round_keys: list[UInt64s], bits: int) -> UInt64s:
    low_bits = bits // 2
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    high, low = x >> np.uint64(low_bits), x & low_mask
    for even, odd in zip(round_keys[::2], round_keys[1::2], strict=True):
        high = high ^ (splitmix64(low + even) & high_mask)
        low = low ^ (splitmix64(high + odd) & low_mask)
    return (high << np.uint64(low_bits)) | low
