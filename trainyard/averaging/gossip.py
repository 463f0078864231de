"""Gossip: weights are mixed with those of a few peers in every step, while it is computed."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from trainyard.averaging.base import DEFAULT_TOPOLOGY, AverageConfig
from trainyard.averaging.consensus import stretches
from trainyard.averaging.differing import Differing
from trainyard.averaging.nodes import Slices
from trainyard.averaging.topology import Group, Round, lifted, rounds
from trainyard.errors import RecipeError
from trainyard.world import World, gather, new_group, together

_BUCKET_BYTES = 25 * 2**20
_FIRST_BYTES = 2**20  # for the network to rest as short as may be
_MOST_IN_HALVES = 4  # replicas: to send whole weights by all-reduce then takes as much


class Gossip(Differing):
    """Decentralized training with periodic mixing (Wang et al. 2024, arXiv 2410.11998).

    Replica i's weights x in step t, with d the update that its optimizer makes of its own gradient
    at x_i(t), whole: clipped, and skipped if it is not finite, as that of a single process.

        x_i(t + 1) = (1 - mixing) x_i(t) + mixing mean_j(x_j(t)) - lr d(x_i(t))

    The mean is over the group of i in round t of the topology. It is begun as soon as x(t) is
    there and awaited when the gradient is, so that the exchange has all of forward and backward.
    Without overlap, x(t) - lr d(x(t)) is mixed at once, at the end of step t.
    """

    def __init__(self, config: AverageConfig, world: World) -> None:
        super().__init__(config, world)
        self._mixing = 1.0 if config.mixing is None else config.mixing
        self._overlaps = config.overlap is not False
        self._sends_halves = config.compress == "bf16"
        self._peers = _peers(
            config.topology or DEFAULT_TOPOLOGY, world, self._node, halves=self._sends_halves
        )
        self._buckets: list[_Bucket] = []
        self._pending: _Peers | None = None  # of the last exchange, if it overlaps

    def _prepare(self, parameters: list[nn.Parameter]) -> None:
        # In the order in which gradients come: the model's last weights are waited for first.
        slices, halves = Slices(self._node), self._sends_halves
        self._buckets = [
            _Bucket(some, slices, halves=halves)
            for some in stretches(parameters[::-1], _BUCKET_BYTES, _FIRST_BYTES)
        ]

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        """Bucket by bucket where `divisible`: the network is busy while the rest is updated."""
        if self._overlaps and self._pending is None:  # first step of a process, or after a rollback
            self._send(self._buckets, self._peers_in(step))
        arriving, leaving = self._pending, self._peers_in(step + 1 if self._overlaps else step)
        for buckets in [[bucket] for bucket in self._buckets] if divisible else [self._buckets]:
            if arriving is not None:
                self._mix(buckets, arriving)
            yield [parameter for bucket in buckets for parameter in bucket.parameters]
            self._send(buckets, leaving)
        if not self._overlaps:
            self._mix(self._buckets, leaving)
            self._pending = None

    def _peers_in(self, step: int) -> "_Peers":
        return self._peers[step % len(self._peers)]

    def _send(self, buckets: Sequence["_Bucket"], peers: "_Peers") -> None:
        self._pending = peers
        for bucket in buckets if peers.size > 1 else ():
            bucket.send(peers)

    def _mix(self, buckets: Sequence["_Bucket"], peers: "_Peers") -> None:
        for bucket in buckets if peers.size > 1 else ():
            bucket.wait()
            bucket.mix(peers.size, self._mixing)

    def _settle(self) -> None:
        for bucket in self._buckets:
            bucket.wait()

    def state_dict(self) -> dict[str, Any]:
        """What is under way is not in it: it is begun anew, from the same weights."""
        return {"own": self._consensus.own()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of periodic, whose replicas have weights of their own as well, or as good as none."""
        self._settle()
        self._pending = None
        if "own" in state:
            self._consensus.put_own(state["own"])


class _Peers(NamedTuple):
    """With whom a replica mixes in a round: alone, it rests."""

    group: dist.ProcessGroup | None
    size: int


class _Bucket:
    """Parameters of one kind of number, and room for a flat copy, of which a slice is sent."""

    def __init__(self, parameters: list[nn.Parameter], slices: Slices, *, halves: bool) -> None:
        """`halves`: what is sent is rounded to bfloat16."""
        self.parameters = tuple(parameters)
        self._slices, self._halves = slices, halves
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = slices.padded(parameters[0].new_zeros(sum(sizes)))
        self._own = slices.own(self._flat)
        parts = torch.split(self._flat[: sum(sizes)], sizes)
        # Laid out in memory as the parameters are, channels last for instance.
        self._views = [
            part.as_strided(parameter.shape, torch.empty_like(parameter).stride())
            for part, parameter in zip(parts, parameters, strict=True)
        ]
        self._work: Any = None

    @torch.no_grad()
    def send(self, peers: _Peers) -> None:
        torch._foreach_copy_(self._views, self.parameters)
        if self._halves:
            self._sent = self._own.to(torch.bfloat16)
            self._received = self._sent.new_empty(peers.size * len(self._sent))
            self._work = dist.all_gather_into_tensor(
                self._received, self._sent, group=peers.group, async_op=True
            )
        else:
            self._work = dist.all_reduce(self._own, group=peers.group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    @torch.no_grad()
    def mix(self, size: int, mixing: float) -> None:
        """Move towards the mean of what `size` replicas have sent, which is there."""
        if self._halves:
            # What rounding took from a replica's own weights stays with it: nothing is lost, and
            # the mean of the weights is what it was.
            received = self._received.view(size, -1).to(self._own.dtype)
            self._own += received.mean(dim=0) - self._sent
        else:
            self._own.div_(size)
        self._slices.gather(self._flat)  # here, in one order with the node's other messages
        if mixing == 1:
            torch._foreach_copy_(self.parameters, self._views)
        else:
            torch._foreach_lerp_(self.parameters, self._views, mixing)


def check_halves(found: list[Round], *, halves: bool) -> None:
    """RecipeError where bf16 would send more than whole numbers do, and need room for as much."""
    largest = max(len(group) for groups in found for group in groups)
    if halves and largest > _MOST_IN_HALVES:
        raise RecipeError(
            f"average.compress = 'bf16' sends weights to each peer by itself, which is for groups "
            f"of up to {_MOST_IN_HALVES}; this topology's have up to {largest}: leave it out, or "
            "take average.topology = 'one-peer-exponential' or 'ring'"
        )


def _peers(
    topology: str, world: World, node: dist.ProcessGroup | None, *, halves: bool
) -> list[_Peers]:
    """This rank's peers in each round."""
    with together(world):
        if node is None:
            found = rounds(topology, world.size, world.local_size)
        else:
            found = lifted(rounds(topology, world.size // node.size()), node.size())
        check_halves(found, halves=halves)
    _check_same(topology, found, world)
    made = _meet(found, world)
    mine = (next(group for group in groups if world.rank in group) for groups in found)
    return [made[group] for group in mine]


def _meet(found: list[Round], world: World) -> dict[Group, _Peers]:
    """The groups that this rank is in, each made once, by its members alone.

    They are made in the order in which rounds have them, which is the same for all of their
    members: so nobody waits in a circle. Torch names such a group by its ranks and by how many
    groups a process has: all are to have made equally many, and who has none to make in a round
    makes one of itself.
    """
    alone: Group = (world.rank,)
    made = {alone: _Peers(None, 1)}
    known: set[Group] = set()
    for groups in found:
        new = {group for group in groups if len(group) > 1} - known
        known |= new
        mine = next((group for group in new if world.rank in group), alone)
        if new:
            made.setdefault(mine, _Peers(new_group(mine), len(mine)))
    return made


def _check_same(topology: str, found: list[Round], world: World) -> None:
    digests = gather(world, sha256(repr(found).encode()).digest())
    with together(world):
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RecipeError(
                    f"average.topology = {topology!r} gives rank {rank} other rounds than rank 0: "
                    "it must follow from its arguments alone, on nodes with equally many ranks"
                )
