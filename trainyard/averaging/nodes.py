"""Nodes as replicas: a node's ranks all-reduce their gradients and share its messages."""

from collections import Counter

from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from trainyard.errors import RecipeError
from trainyard.world import World, gather, new_group, together


def node_group(world: World) -> dist.ProcessGroup:
    """The group of this node's ranks. RecipeError, on all ranks, if nodes differ in size."""
    places = gather(world, (world.node, world.local_rank))
    sizes = Counter(node for node, _ in places)
    with together(world):
        wanted = [(node, rank) for node in range(len(sizes)) for rank in range(sizes[0])]
        if places != wanted:
            raise RecipeError(
                "average.hierarchical = true needs nodes with the same number of ranks, numbered "
                f"node by node; the nodes here have {', '.join(map(str, sizes.values()))} ranks"
            )
    return new_group(range(world.node * sizes[0], (world.node + 1) * sizes[0]))


def counterparts(world: World, node: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of the ranks with this local rank, one per node."""
    return new_group(range(world.local_rank, world.size, node.size()))


class Slices:
    """Equal slices of a flat tensor, one for each rank of a node.

    The ranks of a node hold equal values. Each rank exchanges its slice with its counterparts and
    gathers the other slices inside the node. The values thus cross the network once and stay equal
    bit by bit on the node's ranks. Without a node there is one slice, the whole tensor.
    """

    def __init__(self, node: dist.ProcessGroup | None = None) -> None:
        self._node = node
        self._count, self._number = (node.size(), node.rank()) if node else (1, 0)

    def pad(self, values_N: Tensor) -> Tensor:
        """Appends zeros where slices would otherwise differ in length."""
        lacking = -len(values_N) % self._count
        return F.pad(values_N, (0, lacking)) if lacking else values_N

    def local(self, padded: Tensor) -> Tensor:
        """A view of this rank's slice."""
        return padded.view(self._count, -1)[self._number]

    def gather(self, padded: Tensor) -> None:
        """Fills in the slices of the other ranks."""
        if self._count > 1:
            dist.all_gather_into_tensor(padded, self.local(padded), group=self._node)
