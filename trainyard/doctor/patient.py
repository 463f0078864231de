"""Who is examined: the ranks, where they are, and what they are to train."""

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
    """What the user wants to know; the same on every rank."""

    config: "RunConfig"
    run: Path
    has_recipe: bool
    """Whether a recipe was named: its model then tells how large a checkpoint is."""
    seconds: float
    """For each measurement of speed."""
    import_seconds: float
    """That this process took to import torch."""


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One rank's view of all ranks."""

    question: Question
    world: World
    device: "torch.device"
    has_own_gpus: bool
    """Whether each rank has a GPU that no other one has: NCCL works with nothing else."""
    names: tuple[str, ...]
    """Of ranks: rank 3 (host)."""
    nodes: tuple[int, ...]
    """Of each rank the first rank on its machine."""
    node_names: dict[int, str]
    """Of machines, by their first ranks: the host's name, with the rank where two have the same."""
    say: Callable[[str], None]
    """Tells what is under way."""

    @property
    def leaders(self) -> list[int]:
        """The first rank on each machine."""
        return sorted(self.node_names)

    @property
    def leads(self) -> bool:
        return self.world.rank in self.node_names


def meet(
    question: Question, world: World, device: "torch.device", say: Callable[[str], None]
) -> Patient:
    """All ranks call it."""
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
