"""A rank's place among all ranks, and operations in which all ranks take part.

A World is a plain value that is passed along. The functions below communicate with the other
ranks; in a world of one they return at once, without torch.distributed.
"""

import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainyard.cgroups import cpu_quotas
from trainyard.errors import InputError, PeerError, TrainyardError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")

NO_LIMIT = timedelta(days=1)
"""Time limit of messages in every group: hangs are found by the watchdog."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""It is another one after each boot, and absent in some sandboxes."""


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    group: "ProcessGroup | None" = None
    """Group for the decisions of these ranks; None for the group of all ranks."""
    cores: int | None = None
    """Cores of this rank, as of `with_cores`."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def usable_cores() -> int:
    """Cores that this process may use: of its mask, and by the quotas of its control groups."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas().values()])))


def kernel(boot: Path = BOOT_ID) -> str:
    """A name of the running kernel: hosts may have one name, and a host's containers several."""
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def with_cores(world: World) -> World:
    """The world with the number of this rank's cores. All ranks call it.

    A rank shares each core that it may use with the ranks of its host that may use it too: some
    launchers divide a host's cores (Slurm's task affinity, mpirun's binding), others do not. The
    quota of a control group is shared by the ranks in it.
    """
    cores, quotas = os.sched_getaffinity(0), cpu_quotas()
    of_ranks = gather(world, (kernel(), cores, set(quotas)))
    on_host = [(mask, limited) for host, mask, limited in of_ranks if host == kernel()]
    ranks_on = Counter(core for mask, _ in on_host for core in mask)
    ranks_in = Counter(group for _, limited in on_host for group in limited)
    share = float(sum(Fraction(1, ranks_on[core]) for core in cores))
    shares = [share, *(quota / ranks_in[group] for group, quota in quotas.items())]
    return replace(world, cores=max(1, int(min(shares))))


def cores_per_rank(world: World) -> int:
    """This rank's cores; before `with_cores`, its share of those that this process may use."""
    return world.cores or max(1, usable_cores() // world.local_size)


def own_device(world: World) -> "torch.device":
    """This rank's GPU, made the current one; the CPU if this process sees no GPU.

    A rank takes the visible GPU with its local number. If each rank sees a single GPU, as set by
    some schedulers, it takes that one.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def gpu_of(device: "torch.device") -> str | None:
    """A unique id of a GPU; None for the CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def pick_device(world: World) -> "torch.device":
    """Like `own_device`; also gives torch a thread for each core of this rank.

    OMP_NUM_THREADS takes precedence, if the user has set it.
    """
    device = own_device(world)
    if not are_threads_set():
        import torch

        torch.set_num_threads(cores_per_rank(world))
    return device


def are_threads_set() -> bool:
    """True if the user has set OMP_NUM_THREADS, which torchrun sets to 1 unless they have."""
    number = os.environ.get("OMP_NUM_THREADS", "")
    is_by_torchrun = number == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return bool(number) and not (
        is_by_torchrun and "OMP_NUM_THREADS" not in began_with(os.getppid())
    )


def began_with(pid: int) -> Set[str]:
    """The environment variables with which a process was started; none if they cannot be read."""
    try:
        before = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return frozenset()
    return {os.fsdecode(variable.partition(b"=")[0]) for variable in before.split(b"\0")}


def seed_generators(seed: int, device: "torch.device") -> None:
    """Seed the global generators of Python, of NumPy, and of torch on the CPU and on a device.

    torch.manual_seed would also keep a call and its traceback for each kind of device that is not
    in use: 4 ms, and memory that grows with every call.
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def own_generators() -> Iterator[None]:
    """Inside, global generators of the CPU may be seeded; the caller's go on where they were."""
    import numpy as np
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def check_devices(world: World, device: "torch.device") -> None:
    """InputError, on all ranks, unless every rank has a GPU of its own, or none has one.

    NCCL needs one GPU per rank, and a CPU among GPUs slows all of them down.
    """
    devices = gather(world, (socket.gethostname(), gpu_of(device)))
    hosts, gpus = [host for host, _ in devices], [gpu for _, gpu in devices]
    first = {gpu: rank for rank, gpu in reversed([*enumerate(gpus)])}
    error: InputError | None = None
    if None in first and len(first) > 1:
        rank, other = first[None], min(rank for gpu, rank in first.items() if gpu is not None)
        error = InputError(
            "rank.no-gpu",
            "rank {rank} on {host} sees no GPU, and rank {other} on {other_host} does: start no "
            "more ranks on a host than it has GPUs, or hide the GPUs from all ranks "
            "(CUDA_VISIBLE_DEVICES=) to train on the CPU",
            rank=rank,
            host=hosts[rank],
            other=other,
            other_host=hosts[other],
        )
    elif None not in first and len(first) < world.size:
        other = next(rank for rank, gpu in enumerate(gpus) if first[gpu] != rank)
        rank = first[gpus[other]]
        error = InputError(
            "rank.shared-gpu",
            "rank {rank} on {host} and rank {other} on {other_host} have one GPU between them: "
            "start no more ranks on a host than it has GPUs, or hide the GPUs from all ranks "
            "(CUDA_VISIBLE_DEVICES=) to train on the CPU",
            rank=rank,
            host=hosts[rank],
            other=other,
            other_host=hosts[other],
        )
    if error is not None:
        error.is_shared = True
        raise error


def gather(world: World, value: T) -> list[T]:
    """Every rank's value, on every rank. Values are small plain objects."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value, group=world.group)
    return values  # type: ignore[return-value]


def broadcast(world: World, value: T) -> T:
    """The first rank's value, on every rank."""
    if world.size == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, group=world.group, group_src=0)
    return values[0]


def total(world: World, tensor: "torch.Tensor") -> "torch.Tensor":
    """The sum of a tensor over all ranks, as a new tensor."""
    tensor = tensor.clone()
    if world.size > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


@contextmanager
def together(world: World) -> Iterator[None]:
    """Runs a block on every rank. If it fails on one, it raises on all, so no rank waits for it."""
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
            peer_error = PeerError(
                "rank.failed", "rank {rank}: {reason}", rank=rank, reason=failure[1]
            )
            peer_error.exit_code, peer_error.is_shared = failure[0], True
            raise peer_error


def in_turns(world: World, work: Callable[[], T]) -> T:
    """Each rank's result of `work`: the first rank's turn, then one rank per node, then the rest.

    For work whose side effects help later ranks: a file or cache that it fills.
    """
    my_turn = 0 if world.is_first else 1 if world.local_rank == 0 else 2
    results = []
    for turn in range(3 if world.size > 1 else 1):
        with together(world):
            if turn == my_turn:
                results.append(work())
    return results[0]


def new_group(ranks: Iterable[int] | None = None, backend: str | None = None) -> "ProcessGroup":
    """A group of some ranks, or of all. Its members alone make it, all in the same order.

    It has the time limit of the group of all ranks, and its NCCL this rank's device.
    """
    import torch.distributed as dist

    everyone = dist.group.WORLD
    assert everyone is not None
    # If the group of all ranks is bound to a device, torch splits its NCCL communicator. This needs
    # a call on every rank: a group of some ranks connects anew instead.
    device, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        group = dist.new_group(
            None if ranks is None else [*ranks],
            timeout=NO_LIMIT,
            backend=backend,
            use_local_synchronization=ranks is not None,
            device_id=device if backend is None else None,
        )
    finally:
        everyone.bound_device_id = device
    assert isinstance(group, dist.ProcessGroup)
    return group
