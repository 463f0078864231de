"""Gradients in fewer bits on their way between ranks, by DDP's communication hooks."""

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
# Nothing beside a gradient, and a direction where there is none: a matrix whose gradient was zero
# once, as that of a layer behind one that begins with zeros, would never be sent again.
_NOISE, _LEAST = 1e-12, 1e-20


def send_halves(parallel: DistributedDataParallel, kind: str) -> None:
    """Send 16 bits a number, of bf16 or fp16; what is too large for fp16 arrives as infinity."""
    hook = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[kind]

    # By its own name, torch refuses bf16 where it was built without CUDA.
    def send(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        return hook(group, bucket)

    parallel.register_comm_hook(dist.group.WORLD, send)


class PowerSgd:
    """A matrix of gradients goes as the product P Q' of two slim ones (Vogels et al. 2019,
    "PowerSGD", algorithms 1 and 2).

    What that leaves out of a rank's own gradient is kept, and added to the next one. Q, which is
    equal on all ranks, is kept too, for the next product to begin with. torch's hook goes on in
    whichever thread a message ends, so that the same run has two ends; and never forgets a
    gradient that was not finite.
    """

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self._parameters = [p for p in parallel.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._step = 0
        # Of each bucket, by its number, and of each matrix in it.
        self._start: dict[int, list[Tensor]] = {}
        self._left_out: dict[int, list[Tensor]] = {}
        self._q: dict[int, list[Tensor]] = {}
        self._next: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # of both
        parallel.register_comm_hook(dist.group.WORLD, self._send)

    def _send(self, group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        if self._step < START:
            return allreduce_hook(group, bucket)
        gradients = bucket.gradients()
        matrices = [x.flatten(1) for x in gradients if _is_worth_it(x)]
        self._average(
            bucket.index(), matrices, [x for x in gradients if not _is_worth_it(x)], group
        )
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    def _average(
        self, number: int, matrices: list[Tensor], others: list[Tensor], group: ProcessGroup
    ) -> None:
        """In place, and leave in `_next` what is to be kept if the step is made."""
        if number not in self._start:
            generator = torch.Generator().manual_seed(number)
            self._start[number] = [_normal(x.shape[1], generator).to(x) for x in matrices]
        start = self._start[number]
        left_out = self._left_out.setdefault(number, [torch.zeros_like(x) for x in matrices])
        q = self._q.setdefault(number, start)
        own = [x + rest for x, rest in zip(matrices, left_out, strict=True)]
        begin = [_orthonormal(x + _NOISE * y) for x, y in zip(q, start, strict=True)]
        p = [x @ y for x, y in zip(own, begin, strict=True)]
        _put_mean([*p, *others], group)
        p = [_orthonormal(x) for x in p]
        q = [x.T @ y for x, y in zip(own, p, strict=True)]
        _put_mean(q, group)
        for matrix, x, y in zip(matrices, p, q, strict=True):
            torch.mm(x, y.T, out=matrix)
        self._next[number] = [x - y for x, y in zip(own, matrices, strict=True)], q

    @torch.no_grad()
    def settle(self, step: int) -> None:
        """After the gradients of a step have come: those that are not finite leave no trace."""
        self._step = step + 1
        if not self._next:
            return
        grads = [p.grad for p in self._parameters if p.grad is not None]
        finite = get_total_norm(grads).isfinite()
        for number, (left_out, q) in self._next.items():
            self._left_out[number] = _where(finite, left_out, self._left_out[number])
            self._q[number] = _where(finite, q, self._q[number])
        self._next = {}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "left_out": dict(self._left_out), "q": dict(self._q)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """An empty one: nothing was left out yet."""
        self._step = state.get("step", 0)
        self._left_out, self._q = (
            {number: [x.to(self._device) for x in of] for number, of in state.get(key, {}).items()}
            for key in ("left_out", "q")
        )
        self._next = {}


def _is_worth_it(gradient: Tensor) -> bool:
    """Whether P and Q are less than half of it."""
    rows = len(gradient) if gradient.dim() > 1 else 1
    return 2 * RANK * (rows + gradient.numel() // rows) < gradient.numel()


def _normal(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, RANK, generator=generator)


def _orthonormal(matrix: Tensor) -> Tensor:
    """By Gram and Schmidt; columns of zeros stay.

    Twice: of a gradient of a lower rank, the first time leaves nothing but what was rounded.
    """
    columns: list[Tensor] = []
    for column in matrix.unbind(1):
        for _ in range(2):
            for other in columns:
                column = column - (column @ other) * other
            column = column / (column.norm() + _LEAST)
        columns.append(column)
    return torch.stack(columns, dim=1)


def _put_mean(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """In one message."""
    if not tensors:
        return
    flat = flatten(tensors)
    dist.all_reduce(flat, group=group)
    unflatten_into(tensors, flat / group.size())


def _where(condition: Tensor, some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [torch.where(condition, x, y) for x, y in zip(some, others, strict=True)]
