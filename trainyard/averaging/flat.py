"""Tensors in flat buckets, for one message or one copy."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One flat copy of tensors of one dtype, in their order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def unflatten_into(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copies values in the order of `flatten` into tensors of any dtype and device."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_([*tensors], views)


def split_into_buckets(
    tensors: Iterable[T], num_bytes: int, first_bytes: int | None = None
) -> Iterator[list[T]]:
    """Splits tensors, in their order, into buckets of one dtype and at most `num_bytes`.

    The first bucket has at most `first_bytes`, if given; the limit then grows fourfold per bucket.
    A tensor larger than the limit has a bucket of its own.
    """
    bucket: list[T] = []
    bucket_bytes, limit = 0, min(first_bytes or num_bytes, num_bytes)
    for tensor in tensors:
        is_full = bucket_bytes + tensor.nbytes > limit
        if bucket and (is_full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, bucket_bytes = [], 0
            limit = min(4 * limit, num_bytes)
        bucket.append(tensor)
        bucket_bytes += tensor.nbytes
    if bucket:
        yield bucket
