"""Gradients that DDP sends in 16 bits, by torch's communication hooks."""

from typing import Literal

from torch import Tensor
from torch import distributed as dist
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def compress(ddp: DistributedDataParallel, kind: Literal["bf16", "fp16"]) -> None:
    """Sends gradients in this type; values too large for fp16 arrive as infinity."""
    hook = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[kind]

    # Torch refuses its bf16 hook, by name, in builds without CUDA.
    def send(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        return hook(group, bucket)

    ddp.register_comm_hook(dist.group.WORLD, send)
