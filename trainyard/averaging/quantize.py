"""Means over ranks by compressed messages: bf16, or int8 with a scale for each block."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

BLOCK = 1024  # values that share a scale
_SCALE_BYTES = 4  # float32, sent in front of a block's values


class Codec(NamedTuple):
    """The encoding of a message. A value that is not finite stays so, alone or with its block."""

    encode: Callable[[Tensor], Tensor]  # float32[R, W] to message[R, …]; W is a multiple of it
    decode: Callable[[Tensor], Tensor]  # message[R, …] to float32[R, W]
    multiple: int


def to_int8(values_RW: Tensor) -> Tensor:
    """float32[R, W] to int8[R, W / BLOCK, 4 + BLOCK]: the bytes of a scale and multiples of it.

    The scale is a block's largest absolute value over 127 (Dettmers et al. 2022, arXiv
    2110.02861, section 2.1, with equal steps), so no error exceeds half a scale.
    """
    blocks = values_RW.view(len(values_RW), -1, BLOCK)
    scales = blocks.abs().amax(dim=2, keepdim=True) / 127
    # The scale is 0 for a block of zeros or of tiny numbers.
    multiples = torch.where(scales > 0, blocks / scales, 0).round().clamp(-127, 127)
    return torch.cat([scales.view(torch.int8), multiples.to(torch.int8)], dim=2)


def from_int8(message: Tensor) -> Tensor:
    """The values of a compressed tensor, as float32."""
    scales = message[..., :_SCALE_BYTES].contiguous().view(torch.float32)
    return (message[..., _SCALE_BYTES:] * scales).flatten(1)


CODECS = {
    "bf16": Codec(lambda values: values.to(torch.bfloat16), lambda message: message.float(), 1),
    "int8": Codec(to_int8, from_int8, BLOCK),
}


def compressed_mean(codec: Codec, values_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of float32[N] over the ranks of a group, equal bit by bit on all.

    Each rank sums a share of the values in float32 and sends the mean to all. Rounding happens
    twice, for each replica's values and for their mean, whatever the number of replicas. The
    rounding error is dropped: error feedback (Seide et al. 2014) changed no result in trials with
    these scales, and takes memory and space in checkpoints.
    """
    size = group.size()
    width = -(-len(values_N) // (size * codec.multiple)) * codec.multiple
    shares = values_N.new_zeros(size, width, dtype=torch.float32)
    shares.view(-1)[: len(values_N)] = values_N
    sent = codec.encode(shares)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = codec.decode(received).sum(dim=0, keepdim=True) / size
    dist.all_gather_into_tensor(sent, codec.encode(mean), group=group)
    return codec.decode(sent).view(-1)[: len(values_N)]
