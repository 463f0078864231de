"""Means over ranks by messages of fewer bits: bf16, or int8 with a scale for each block."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

BLOCK = 1024  # values that share a scale
_SCALE_BYTES = 4  # float32, sent in front of a block's values


class Coding(NamedTuple):
    """How numbers travel: what is not finite stays so, by itself or with all of its block."""

    encode: Callable[[Tensor], Tensor]  # float32[R, W], W a multiple, to message[R, …]
    decode: Callable[[Tensor], Tensor]  # and back
    multiple: int


def to_int8(values_RW: Tensor) -> Tensor:
    """float32[R, W] to int8[R, W / BLOCK, 4 + BLOCK]: the bytes of a scale, and multiples of it.

    The scale is a block's largest absolute value over 127 (Dettmers et al. 2022, arXiv
    2110.02861, section 2.1, with equal steps), so no error is larger than half of it.
    """
    blocks = values_RW.view(len(values_RW), -1, BLOCK)
    scales = blocks.abs().amax(dim=2, keepdim=True) / 127
    # A block of zeros, or of numbers so small that their scale is 0, has no multiples.
    multiples = torch.where(scales > 0, blocks / scales, 0).round().clamp(-127, 127)
    return torch.cat([scales.view(torch.int8), multiples.to(torch.int8)], dim=2)


def from_int8(message: Tensor) -> Tensor:
    scales = message[..., :_SCALE_BYTES].contiguous().view(torch.float32)
    return (message[..., _SCALE_BYTES:] * scales).flatten(1)


CODINGS = {
    "bf16": Coding(lambda values: values.to(torch.bfloat16), lambda message: message.float(), 1),
    "int8": Coding(to_int8, from_int8, BLOCK),
}


def mean_by(coding: Coding, values_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of float32[N] over the ranks of a group, bit by bit the same on all.

    Each rank sums a share of the values in float32, and all get that as a message again: twice
    is rounded, once each replica's values and once their mean, whatever the number of replicas.
    What is rounded off is dropped: to keep it for the next message (error feedback, Seide et al.
    2014) changed no result in trials with these scales, and takes memory and a place in what is
    saved.
    """
    size = group.size()
    width = -(-len(values_N) // (size * coding.multiple)) * coding.multiple
    shares = values_N.new_zeros(size, width, dtype=torch.float32)
    shares.view(-1)[: len(values_N)] = values_N
    sent = coding.encode(shares)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = coding.decode(received).sum(dim=0, keepdim=True) / size
    dist.all_gather_into_tensor(sent, coding.encode(mean), group=group)
    return coding.decode(sent).view(-1)[: len(values_N)]
