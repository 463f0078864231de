"""A rank's place among the others, and how all of them decide something together.

A World is a plain value that is passed along. The functions below talk to the other ranks, and
return at once, without torch.distributed, in a world of one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trainyard.errors import InputError, PeerError, TrainyardError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# torch raises plain RuntimeErrors; these are its words for a peer that has ended.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
)


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def cores_per_rank(world: World) -> int:
    """A rank's share of the cores that this machine lets us use."""
    return max(1, len(os.sched_getaffinity(0)) // world.local_size)


def pick_device(world: World) -> "torch.device":
    """This rank's GPU; without one the CPU, whose cores the ranks of a machine share."""
    import torch

    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(cores_per_rank(world))
    return torch.device("cpu")


def check_devices(world: World, device: "torch.device") -> None:
    """InputError, on all ranks, if two of them have the same GPU, with which NCCL does not work."""
    if device.type == "cpu" or world.size == 1:
        return
    import torch

    gpus = gather(world, str(torch.cuda.get_device_properties(device).uuid))
    if len(set(gpus)) < world.size:
        error = InputError("several ranks share one GPU: start as many ranks as there are GPUs")
        error.is_shared = True
        raise error


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is torch's for a rank that is gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)


def gather(world: World, value: T) -> list[T]:
    """Every rank's value, on every rank. Values are small plain objects."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def total(world: World, tensor: "torch.Tensor") -> "torch.Tensor":
    """The sum of a tensor over all ranks, as a new tensor."""
    tensor = tensor.clone()
    if world.size > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


@contextmanager
def together(world: World) -> Iterator[None]:
    """A block that succeeds on all ranks or fails on all, so that none waits for a failed one."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    code = getattr(error, "exit_code", 1)
    failures = gather(world, None if error is None else (code, f"{error}"))
    if isinstance(error, TrainyardError):
        error.is_shared = True
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            peer_error = PeerError(f"rank {rank}: {failure[1]}")
            peer_error.exit_code, peer_error.is_shared = failure[0], True
            raise peer_error


def in_turns(world: World, work: Callable[[], T]) -> T:
    """Each rank's result of `work`: the first rank's turn, then one rank per node, then the rest.

    For work that leaves something done for those who come after: a file or a cache is filled.
    """
    my_turn = 0 if world.is_first else 1 if world.local_rank == 0 else 2
    results = []
    for turn in range(3 if world.size > 1 else 1):
        with together(world):
            if turn == my_turn:
                results.append(work())
    return results[0]
