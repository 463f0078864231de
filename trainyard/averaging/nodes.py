"""Nodes as replicas: gradients are all-reduced among a node's ranks, which share its messages."""

from collections import Counter

from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from trainyard.errors import RecipeError
from trainyard.world import World, gather, new_group, together


def node_group(world: World) -> dist.ProcessGroup:
    """The ranks of this node. RecipeError, on all ranks, if nodes are not all alike."""
    places = gather(world, (world.node, world.local_rank))
    sizes = Counter(node for node, _ in places)
    with together(world):
        wanted = [(node, rank) for node in range(len(sizes)) for rank in range(sizes[0])]
        if places != wanted:
            raise RecipeError(
                "average.hierarchical = true needs nodes with equally many ranks, that are counted "
                f"node by node; here the nodes have {', '.join(map(str, sizes.values()))} ranks"
            )
    return new_group(range(world.node * sizes[0], (world.node + 1) * sizes[0]))


def counterparts(world: World, node: dist.ProcessGroup) -> dist.ProcessGroup:
    """This rank and those of its number on the other nodes, given the ranks of its own."""
    return new_group(range(world.local_rank, world.size, node.size()))


class Slices:
    """What a node exchanges with others, an equal part by each of its ranks.

    A node's ranks hold the same: it is enough that each sends its slice to its counterparts, and
    gathers the others from inside the node. So a node's weights cross the network once, and are
    the same bit by bit on its ranks. Where no node is given, the only slice is all there is.
    """

    def __init__(self, node: dist.ProcessGroup | None = None) -> None:
        self._node = node
        self._count, self._number = (node.size(), node.rank()) if node else (1, 0)

    def padded(self, values_N: Tensor) -> Tensor:
        """With zeros at the end, if it takes them for slices of one length."""
        lacking = -len(values_N) % self._count
        return F.pad(values_N, (0, lacking)) if lacking else values_N

    def own(self, padded: Tensor) -> Tensor:
        """A view of this rank's slice."""
        return padded.view(self._count, -1)[self._number]

    def gather(self, padded: Tensor) -> None:
        """Put the other ranks' slices beside this rank's own."""
        if self._count > 1:
            dist.all_gather_into_tensor(padded, self.own(padded), group=self._node)
