"""Compressed gradient messages, by DDP's communication hooks: bf16, fp16, PowerSGD."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from trainyard.averaging.flat import flatten, unflatten_into

RANK = 2  # of PowerSGD's matrices
START = 1000  # steps before PowerSGD begins, as torch has it: early gradients suffer most from it
# Negligible beside a gradient, and a direction for a gradient of zero. Without it, a matrix whose
# gradient was zero once (behind a layer initialised to zeros, say) would never be sent again.
_NOISE = 1e-12
_MIN_NORM = 1e-20  # keeps a column of zeros from a division by zero


def register_16_bit_hook(ddp: DistributedDataParallel, kind: str) -> None:
    """Sends gradients as bf16 or fp16; values too large for fp16 arrive as infinity."""
    hook = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[kind]

    # Torch refuses its bf16 hook, by name, in builds without CUDA.
    def send(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        return hook(group, bucket)

    ddp.register_comm_hook(dist.group.WORLD, send)


class PowerSgd:
    """Sends a gradient matrix as the product P Q' of two slim ones (Vogels et al. 2019, "PowerSGD",
    algorithms 1 and 2).

    The error of the product on a rank's own gradient is added to its next gradient. Q, equal on all
    ranks, starts the next product. Torch's own hook is not used: it continues in the thread where a
    message ends, so that equal runs end differently, and its error keeps a gradient that was not
    finite for ever.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._parameters = [p for p in ddp.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._step = 0
        # For each bucket, by its index: a tensor for each matrix in it.
        self._start: dict[int, list[Tensor]] = {}
        self._error: dict[int, list[Tensor]] = {}
        self._q: dict[int, list[Tensor]] = {}
        self._next: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # error and Q, uncommitted
        ddp.register_comm_hook(dist.group.WORLD, self._send)

    def _send(self, group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        if self._step < START:
            return allreduce_hook(group, bucket)
        gradients = bucket.gradients()
        matrices = [x.flatten(1) for x in gradients if _is_compressible(x)]
        others = [x for x in gradients if not _is_compressible(x)]
        self._average(bucket.index(), matrices, others, group)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    def _average(
        self, index: int, matrices: list[Tensor], others: list[Tensor], group: ProcessGroup
    ) -> None:
        """Averages in place; leaves the new error and Q in `_next`."""
        if index not in self._start:
            generator = torch.Generator().manual_seed(index)
            self._start[index] = [_random_q(x.shape[1], generator).to(x) for x in matrices]
        start = self._start[index]
        error = self._error.setdefault(index, [torch.zeros_like(x) for x in matrices])
        q = self._q.setdefault(index, start)
        own = [x + rest for x, rest in zip(matrices, error, strict=True)]
        begin = [_orthonormal(x + _NOISE * y) for x, y in zip(q, start, strict=True)]
        p = [x @ y for x, y in zip(own, begin, strict=True)]
        _all_reduce_mean([*p, *others], group)
        p = [_orthonormal(x) for x in p]
        q = [x.T @ y for x, y in zip(own, p, strict=True)]
        _all_reduce_mean(q, group)
        for matrix, x, y in zip(matrices, p, q, strict=True):
            torch.mm(x, y.T, out=matrix)
        self._next[index] = [x - y for x, y in zip(own, matrices, strict=True)], q

    @torch.no_grad()
    def commit(self, step: int) -> None:
        """Keeps the error and Q of a step's gradients, unless a gradient is not finite."""
        self._step = step + 1
        if not self._next:
            return
        grads = [p.grad for p in self._parameters if p.grad is not None]
        finite = get_total_norm(grads).isfinite()
        for index, (error, q) in self._next.items():
            self._error[index] = _where(finite, error, self._error[index])
            self._q[index] = _where(finite, q, self._q[index])
        self._next = {}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "left_out": dict(self._error), "q": dict(self._q)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """An empty state has no error."""
        self._step = state.get("step", 0)
        self._error, self._q = (
            {index: [x.to(self._device) for x in of] for index, of in state.get(key, {}).items()}
            for key in ("left_out", "q")
        )
        self._next = {}


def _is_compressible(gradient: Tensor) -> bool:
    """True if P and Q have less than half of the values."""
    rows = len(gradient) if gradient.dim() > 1 else 1
    return 2 * RANK * (rows + gradient.numel() // rows) < gradient.numel()


def _random_q(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, RANK, generator=generator)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Gram-Schmidt; columns of zeros stay.

    Two passes: for a gradient of lower rank, the first pass leaves only rounding errors.
    """
    columns: list[Tensor] = []
    for column in matrix.unbind(1):
        for _ in range(2):
            for other in columns:
                column = column - (column @ other) * other
            column = column / (column.norm() + _MIN_NORM)
        columns.append(column)
    return torch.stack(columns, dim=1)


def _all_reduce_mean(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Puts the mean over a group into the tensors, by one message."""
    if not tensors:
        return
    flat = flatten(tensors)
    dist.all_reduce(flat, group=group)
    unflatten_into(tensors, flat / group.size())


def _where(condition: Tensor, some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [torch.where(condition, x, y) for x, y in zip(some, others, strict=True)]
