"""Context of the checks: the ranks, their machines, and the settings of the doctor."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.distributed.process_info import ProcessInfo
from trainyard.world import World, gather, gpu_of

if TYPE_CHECKING:
    import torch

    from trainyard.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of the doctor, the same on every rank."""

    config: "RunConfig"
    run: Path
    has_recipe: bool
    """True if a recipe was given: its model then sets the size of a checkpoint."""
    seconds: float
    """Seconds per measurement of speed."""
    import_seconds: float
    """Seconds that this process took to import torch."""


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One rank's view of all ranks."""

    question: Question
    world: World
    device: "torch.device"
    has_own_gpus: bool
    """True if each rank has a GPU of its own, as NCCL requires."""
    names: tuple[str, ...]
    """Names of ranks: rank 3 (host)."""
    nodes: tuple[int, ...]
    """For each rank, the first rank on its machine."""
    node_names: dict[int, str]
    """Host name by a machine's first rank, with the rank if several machines have the same name."""
    say: Callable[[str], None]
    """Shows the current check."""

    @property
    def leaders(self) -> list[int]:
        """The first rank of each machine."""
        return sorted(self.node_names)

    @property
    def leads(self) -> bool:
        return self.world.rank in self.node_names


def meet(
    question: Question, world: World, device: "torch.device", say: Callable[[str], None]
) -> Patient:
    """Collect the context; all ranks call it."""
    gpus = gather(world, gpu_of(device))
    found = gather(world, (ProcessInfo.current().host, world.node))
    hosts = [host for host, _ in found]
    nodes = tuple(found.index(each) for each in found)
    leaders = sorted(set(nodes))
    of_leaders = [hosts[rank] for rank in leaders]
    return Patient(
        question=question,
        world=world,
        device=device,
        has_own_gpus=None not in gpus and len(set(gpus)) == world.size,
        names=tuple(f"rank {rank} ({host})" for rank, host in enumerate(hosts)),
        nodes=nodes,
        node_names={
            rank: host if of_leaders.count(host) == 1 else f"{host} (rank {rank})"
            for rank, host in zip(leaders, of_leaders, strict=True)
        },
        say=say,
    )
