"""All-reduce whose sums are the same bits on any number of ranks.

A fixed number of virtual ranks, a power of two, shares each global batch, whatever the number of
ranks. Rank r of n works for the virtual ranks r, r + n, r + 2 n … in turn, and gradients are added
in one binary tree over all virtual ranks: halves of the list are added, then halves of the result,
and so on. On n ranks the first levels of the tree lie within ranks and the others between them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from trainyard.averaging.allreduce import wrap_in_ddp
from trainyard.averaging.base import EqualReplicas
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.averaging.statistics import batch_norm_statistics
from trainyard.world import World


class VirtualRanks(EqualReplicas):
    """Parameters and batch norm statistics are equal on all ranks, and on any number of them."""

    def __init__(self, total: int, world: World) -> None:
        """`total` virtual ranks, a power of two that is a multiple of the number of ranks."""
        super().__init__(AverageConfig(), world)
        self.total = total
        self._gradients, self._statistics = _PartialSums(), _PartialSums()
        self._ddp: DistributedDataParallel | None = None

    @property
    def own(self) -> Sequence[int]:
        """The virtual ranks of this rank, in the order of their samples in a batch."""
        return range(self._world.rank, self.total, self._world.size)

    def wrap(self, model: nn.Module) -> nn.Module:
        self._buffers = batch_norm_statistics(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._rows = {id(parameter): row for row, parameter in enumerate(self._parameters)}
        self._exchange = _Exchange(self._world, self._parameters[0].device)
        if self._world.size == 1:
            return model
        self._ddp = wrap_in_ddp(model)
        self._ddp.register_comm_hook(None, self._on_bucket)
        return self._ddp

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the global batch, or 1: whole numbers have one sum in any order."""
        self.weight = weight.clone()
        work: Any = None
        if self._world.size > 1:
            work = dist.all_reduce(self.weight, async_op=True)

        def value() -> Tensor:
            if work is not None:
                work.wait()
            return self.weight.clamp(min=1)

        return value

    def accumulating(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync() if self._ddp else nullcontext()

    @contextmanager
    def passes_of(self, turn: int, weight: Tensor) -> Iterator[None]:
        """Context of the passes for one virtual rank, whose samples have this total weight.

        `turn` counts up from 0; see `turns` for whose it is. After the last one the parameters have
        the gradient of the global batch, and the buffers its statistics.
        """
        is_last = turn == len(self.own) - 1
        with self.accumulating() if not is_last else nullcontext():
            yield
        self._add_statistics(weight)
        if not is_last:
            self._gradients.add(self._own_gradients())
            for parameter in self._parameters:
                parameter.grad = None
            return
        if self._ddp is None:
            self._gradients.add_to(self._own_gradients())
        self._exchange.finish()
        self._gradients.clear()
        self._put_statistics()

    def _own_gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _on_bucket(self, _: None, bucket: GradBucket) -> Future[Tensor]:
        """Starts the exchange of the sums of a bucket, which `passes_of` ends after the pass."""
        rows = [self._rows[id(parameter)] for parameter in bucket.parameters()]
        with self._exchange.stream():
            self._gradients.add_to(_gradients_of(bucket), rows)
            self._exchange.start(bucket.buffer())
        device = bucket.buffer().device
        done: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        done.set_result(bucket.buffer())
        return done

    def _add_statistics(self, weight: Tensor) -> None:
        if self._buffers:
            # In float64 the mean of equal values, such as those of frozen layers, is that value.
            flat = flatten([buffer.double() for buffer in self._buffers])
            weight = weight.detach().view(1).to(flat)
            self._statistics.add([torch.cat([flat * weight, weight])])

    def _put_statistics(self) -> None:
        """The weighted mean over virtual ranks; 0 without any good sample."""
        if self._buffers:
            (sums,) = self._statistics.take()
            if self._world.size > 1:
                self._exchange.start(sums)
                self._exchange.finish()
            weight = sums[-1].clamp(min=1)
            unflatten_into(self._buffers, sums[:-1] / weight)

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        yield self._parameters

    def add_up(self, sums_NK: Tensor) -> Tensor:
        """Sums [N] over all virtual ranks, of those [N, K] of this rank's K, in their order."""
        if self._world.size == 1:
            return tree_sum(sums_NK.T)
        flat = sums_NK.new_empty(self._world.size * sums_NK.numel())
        dist.all_gather_into_tensor(flat, sums_NK.flatten())
        return tree_sum(flat.view(-1, *sums_NK.shape).permute(2, 0, 1).flatten(0, 1))


def _gradients_of(bucket: GradBucket) -> list[Tensor]:
    """Views of a bucket, in the memory order of the parameters; bucket.gradients() ignores it."""
    parameters = bucket.parameters()
    pieces = torch.split(bucket.buffer(), [parameter.numel() for parameter in parameters])
    return [
        piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset())
        for piece, parameter in zip(pieces, parameters, strict=True)
    ]


def tree_sum(parts: Tensor) -> Tensor:
    """The sum of parts[n, ...], n a power of two, by halves."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = parts[:half] + parts[half:]
    return parts[0]


def turns(count: int) -> list[int]:
    """The order to go through `count` parts, a power of two, with the fewest sums in memory.

    It is that of reversed bits: parts that `tree_sum` adds first are neighbours.
    """
    order = [0]
    while len(order) < count:
        order = [2 * part for part in order] + [2 * part + 1 for part in order]
    return order


class _PartialSums:
    """Sums of a list of tensors over parts that come in the order of `turns`.

    They are those of `tree_sum`, with as many lists in memory as the tree has levels.
    """

    def __init__(self) -> None:
        self._lists: list[tuple[int, list[Tensor]]] = []  # with their levels in the tree

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor]) -> None:
        """Adds a part, whose tensors now belong to the sum."""
        level, newest = 0, list(tensors)
        while self._lists and self._lists[-1][0] == level:
            _, before = self._lists.pop()
            torch._foreach_add_(newest, before)
            level += 1
        self._lists.append((level, newest))

    @torch.no_grad()
    def add_to(self, tensors: Sequence[Tensor], rows: Sequence[int] | None = None) -> None:
        """Adds all parts so far to the last one, in place; `rows` are its tensors in the lists."""
        for _, before in reversed(self._lists):
            torch._foreach_add_(
                [*tensors], before if rows is None else [before[row] for row in rows]
            )

    def take(self) -> list[Tensor]:
        """The sum of all parts."""
        ((_, sums),) = self._lists
        self.clear()
        return sums

    def clear(self) -> None:
        self._lists.clear()


class _Sent(NamedTuple):
    """A buffer, of which each rank's piece is under way."""

    buffer: Tensor
    pieces: Tensor  # [ranks x piece]: the buffer or, if its length is uneven, a longer copy
    kept: Tensor  # until the work is done: bytes for a piece of every rank; then their sum
    work: Any


class _Exchange:
    """Puts the tree's sum over ranks into buffers, while a backward pass goes on.

    Each rank adds a piece of every buffer: as many bytes as those of a ring. All ranks start the
    same buffers in one order. A buffer is gathered when the next one has started, so that its
    pieces had the time to arrive; on a GPU nobody waits but a stream of its own.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._size, self._device = world.size, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scattered: list[_Sent] = []
        self._gathered: list[_Sent] = []
        self._spare: list[Tensor] = []  # fresh memory costs as much as the sums

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Context of the exchange's own stream, after all that was queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    @torch.no_grad()
    def start(self, buffer: Tensor) -> None:
        rest = -len(buffer) % self._size
        pieces = F.pad(buffer, (0, rest)) if rest else buffer
        memory = self._memory(pieces.nbytes)
        work = dist.all_to_all_single(_as(pieces, memory), pieces, async_op=True)
        self._scattered.append(_Sent(buffer, pieces, memory, work))
        if len(self._scattered) > 1:
            self._gather_next()

    def _memory(self, size: int) -> Tensor:
        """Bytes that no exchange uses, at least `size`."""
        spare = self._spare.pop() if self._spare else None
        if spare is not None and len(spare) >= size:
            return spare
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def _gather_next(self) -> None:
        buffer, pieces, memory, work = self._scattered.pop(0)
        work.wait()
        piece = tree_sum(_as(pieces, memory).view(self._size, -1))
        self._spare.append(memory)
        work = dist.all_gather_into_tensor(pieces, piece, async_op=True)
        self._gathered.append(_Sent(buffer, pieces, piece, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Ends every exchange; what is queued next sees the sums."""
        with self.stream():
            while self._scattered:
                self._gather_next()
            for buffer, pieces, _, work in self._gathered:
                work.wait()
                if pieces is not buffer:
                    buffer.copy_(pieces[: len(buffer)])
            self._gathered.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _as(like: Tensor, memory: Tensor) -> Tensor:
    """Bytes as a tensor of the size and dtype of another."""
    return memory[: like.nbytes].view(like.dtype)
