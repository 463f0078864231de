"""Means by messages of fewer bits, beside a plain calculation of what arrives."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from tests.spawn import spawn
from trainyard.averaging.quantize import BLOCK, CODECS, compressed_mean
from trainyard.world import World

Array = np.ndarray[Any, np.dtype[np.float32]]
LENGTHS = [1, 1000, 4 * BLOCK, 4 * BLOCK + 1, 30_000]


def normal(length: int, rank: int) -> Array:
    return np.random.default_rng([length, rank]).standard_normal(length).astype(np.float32)


def of_all_sizes(length: int, rank: int) -> Array:
    """From the smallest to the largest of float32, in one block."""
    exponents = np.random.default_rng([length, rank, 1]).uniform(-44, 38, length)
    return (np.sign(normal(length, rank)) * 10**exponents).astype(np.float32)


def of_one_replica(length: int, rank: int) -> Array:
    return normal(length, 0) * np.float32(rank == 1)


KINDS: dict[str, Callable[[int, int], Array]] = {
    "normal": normal,
    "of all sizes": of_all_sizes,
    "of one replica": of_one_replica,
    "zeros": lambda length, rank: np.zeros(length, np.float32),
    "tiny": lambda length, rank: normal(length, rank) * np.float32(1e-41),
    "huge": lambda length, rank: normal(length, rank).clip(-1, 1) * np.float32(3e38 / 4),
}


# --- the plain calculation ---


def through_bf16(values: Array) -> Array:
    """To the nearest number with 16 bits less, to the even one of two that are as near."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def through_int8(values: Array) -> Array:
    arrived = np.zeros_like(values)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = np.abs(block).max() / np.float32(127)
        if scale > 0:
            steps = np.round(block / scale).clip(-127, 127)
            arrived[start : start + BLOCK] = steps * scale
    return arrived


THROUGH = {"bf16": through_bf16, "int8": through_int8}


def plain_mean(name: str, replicas: list[Array]) -> Array:
    arrived = [THROUGH[name](values) for values in replicas]
    total = arrived[0]
    for values in arrived[1:]:
        total = total + values
    return THROUGH[name](total / np.float32(len(replicas)))


# --- and ours ---


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def take_means(world: World) -> dict[tuple[str, str, int], Array]:
    torch.set_num_threads(1)
    return {
        (name, kind, length): compressed_mean(
            coding, torch.from_numpy(make(length, world.rank)), everyone()
        ).numpy()
        for name, coding in CODECS.items()
        for kind, make in KINDS.items()
        for length in LENGTHS
    }


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_is_that_of_what_arrives(size: int) -> None:
    ranks = spawn(take_means, size)
    for (name, kind, length), mean in ranks[0].items():
        replicas = [KINDS[kind](length, rank) for rank in range(size)]
        np.testing.assert_array_equal(mean, plain_mean(name, replicas), f"{name}, {kind}, {length}")
        for other in ranks[1:]:
            np.testing.assert_array_equal(other[name, kind, length], mean)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tiny"])
@pytest.mark.parametrize("name", CODECS)
def test_nothing_is_wrong_by_more_than_half_a_step(name: str, kind: str) -> None:
    values = KINDS[kind](30 * BLOCK, 0)
    coding = CODECS[name]
    arrived = coding.decode(coding.encode(torch.from_numpy(values[None]))).numpy()[0]
    np.testing.assert_array_equal(arrived, THROUGH[name](values))
    blocks, errors = values.reshape(30, BLOCK), np.abs(arrived - values).reshape(30, BLOCK)
    if name == "int8":
        assert (errors <= np.abs(blocks).max(axis=1, keepdims=True) / 127 * 0.50001).all()
    else:
        assert (errors <= np.abs(blocks) * 2.0**-8 + 1e-40).all()


# --- what is not finite ---


def spoil(world: World, bad: float) -> dict[str, Array]:
    torch.set_num_threads(1)
    values = torch.from_numpy(normal(5 * BLOCK, world.rank))
    values[2 * BLOCK + 7] = bad if world.rank == 1 else 1.0
    return {
        name: compressed_mean(coding, values, everyone()).numpy() for name, coding in CODECS.items()
    }


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_such_everywhere(bad: float) -> None:
    ranks = spawn(spoil, 2, bad)
    for mean in ranks:
        spoilt = ~np.isfinite(mean["bf16"])
        assert spoilt.nonzero()[0].tolist() == [2 * BLOCK + 7]
        spoilt = ~np.isfinite(mean["int8"])
        assert spoilt.nonzero()[0].tolist() == list(range(2 * BLOCK, 3 * BLOCK))


# --- how much is sent ---


def count_bytes(world: World, length: int) -> dict[str, float]:
    """What a rank sends to others, of what it hands to torch."""
    torch.set_num_threads(1)
    sent: list[int] = []
    to_all, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def counted(function: Any, copies: float, received: Any, message: Any, **options: Any) -> Any:
        sent.append(round(message.nbytes * copies))
        return function(received, message, **options)

    dist.all_to_all_single = partial(counted, to_all, (world.size - 1) / world.size)
    dist.all_gather_into_tensor = partial(counted, gather, world.size - 1)
    ring = 2 * (world.size - 1) / world.size * 4 * length
    found = {}
    for name, coding in CODECS.items():
        sent.clear()
        compressed_mean(coding, torch.zeros(length), everyone())
        found[name] = sum(sent) / ring
    return found


def test_bytes_beside_an_all_reduce_of_float32() -> None:
    for found in spawn(count_bytes, 3, 3_000_000):
        print(found)
        assert found["bf16"] == pytest.approx(0.5, rel=1e-4)
        assert found["int8"] == pytest.approx((1 + 4 / BLOCK) / 4, rel=1e-3)
