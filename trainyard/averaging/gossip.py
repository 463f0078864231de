"""Gossip: each step mixes a replica's weights with those of a few peers, during the next step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from trainyard.averaging.config import DEFAULT_TOPOLOGY, AverageConfig
from trainyard.averaging.flat import split_into_buckets
from trainyard.averaging.topology import Group, Round, rounds
from trainyard.averaging.weight_averager import WeightAverager
from trainyard.errors import RecipeError
from trainyard.world import World, gather, new_group, together

_FIRST_BUCKET_BYTES = 2**20  # small, so that the first message leaves early
_MAX_BF16_GROUP = 4  # replicas; in a larger group, all-reduce of float32 sends less


class Gossip(WeightAverager):
    """Decentralized training with periodic mixing (Wang et al. 2024, arXiv 2410.11998).

    The weights x_i of replica i change in step t by

        x_i(t + 1) = mean_j(x_j(t)) - lr d(x_i(t))

    where j runs over the group of i in round t of the topology, and d is the optimizer's update of
    the replica's own gradient at x_i(t). The gradient is clipped, and skipped if it is not finite,
    as a whole, as in a single process.

    The exchange of x(t) starts once step t - 1 has updated the weights, and has the forward and
    backward pass of step t. Without overlap, step t mixes x(t) - lr d(x(t)) at its end.
    """

    def __init__(
        self, config: AverageConfig, world: World, *, bucket_bytes: int = 25 * 2**20
    ) -> None:
        """`bucket_bytes`: bytes of weights in a message."""
        super().__init__(config, world)
        self._overlaps, self._bucket_bytes = config.overlap is not False, bucket_bytes
        self._bf16 = config.compress == "bf16"
        topology = config.topology or DEFAULT_TOPOLOGY
        self._peers = _peers_per_round(topology, world, bf16=self._bf16)
        self._buckets: list[_Bucket] = []
        self._pending: _Peers | None = None  # the peers of an exchange that is not mixed yet

    def prepare(self, parameters: list[nn.Parameter]) -> None:
        # The last layers come first, as their gradients do.
        buckets = split_into_buckets(parameters[::-1], self._bucket_bytes, _FIRST_BUCKET_BYTES)
        self._buckets = [_Bucket(bucket, bf16=self._bf16) for bucket in buckets]

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        """One bucket at a time if `divisible`: the network is busy while others are updated."""
        if self._overlaps and self._pending is None:  # first step of a process or after a rollback
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
            bucket.mix(peers.size)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._wait()
        with super().consensus():
            yield

    def _wait(self) -> None:
        """Waits for the pending exchange; its result is kept for the step that uses it."""
        for bucket in self._buckets:
            bucket.wait()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, which has no pending exchange: a resumed run repeats it."""
        self._wait()
        self._pending = None
        super().load_state_dict(state)


class _Peers(NamedTuple):
    """The replicas that this one mixes with in a round; alone, it rests."""

    group: dist.ProcessGroup | None
    size: int


class _Bucket:
    """Parameters of one dtype and a flat copy of them, which is sent."""

    def __init__(self, parameters: list[nn.Parameter], *, bf16: bool) -> None:
        """`bf16`: messages are rounded to bfloat16."""
        self.parameters = tuple(parameters)
        self._bf16 = bf16
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = parameters[0].new_zeros(sum(sizes))
        parts = torch.split(self._flat, sizes)
        # The views have the strides of the parameters, channels last for instance.
        self._views = [
            part.as_strided(parameter.shape, torch.empty_like(parameter).stride())
            for part, parameter in zip(parts, parameters, strict=True)
        ]
        self._work: Any = None

    @torch.no_grad()
    def send(self, peers: _Peers) -> None:
        """Starts the exchange of the current weights."""
        torch._foreach_copy_(self._views, self.parameters)
        if self._bf16:
            self._sent = self._flat.to(torch.bfloat16)
            self._received = self._sent.new_empty(peers.size * len(self._sent))
            self._work = dist.all_gather_into_tensor(
                self._received, self._sent, group=peers.group, async_op=True
            )
        else:
            self._work = dist.all_reduce(self._flat, group=peers.group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    @torch.no_grad()
    def mix(self, size: int) -> None:
        """Moves the weights to the mean of `size` replicas; call `wait` first."""
        if self._bf16:
            # The rounding error of a replica's weights stays with the replica, so the mean of the
            # weights does not change.
            received = self._received.view(size, -1).to(self._flat.dtype)
            self._flat += received.mean(dim=0) - self._sent
        else:
            self._flat.div_(size)
        torch._foreach_copy_(self.parameters, self._views)


# --- process groups ---


def check_bf16_groups(planned: list[Round], *, bf16: bool) -> None:
    """RecipeError where messages in bf16 would be larger than an all-reduce of whole weights."""
    largest = max(len(group) for groups in planned for group in groups)
    if bf16 and largest > _MAX_BF16_GROUP:
        raise RecipeError(
            "recipe.bf16-group-too-large",
            "average.compress = 'bf16' sends weights to each peer by itself, which is for groups "
            "of up to {limit}; this topology's have up to {size}: leave it out, or take "
            "average.topology = 'one-peer-exponential' or 'ring'",
            limit=_MAX_BF16_GROUP,
            size=largest,
        )


def _peers_per_round(topology: str, world: World, *, bf16: bool) -> list[_Peers]:
    """This rank's peers in each round."""
    with together(world):
        planned = rounds(topology, world.size, world.local_size)
        check_bf16_groups(planned, bf16=bf16)
    _check_same(topology, planned, world)
    made = _make_groups(planned, world)
    mine = (next(group for group in groups if world.rank in group) for groups in planned)
    return [made[group] for group in mine]


def _make_groups(planned: list[Round], world: World) -> dict[Group, _Peers]:
    """The process groups of this rank, each made once and by its members alone.

    Members make their groups in the order of the rounds, so no circle of ranks waits for each
    other. Torch's name of a group contains a count of the groups that the process has made. The
    count must be equal on all members, so a rank without a group in a round makes one of itself.
    """
    alone: Group = (world.rank,)
    made = {alone: _Peers(None, 1)}
    known: set[Group] = set()
    for groups in planned:
        new = {group for group in groups if len(group) > 1} - known
        known |= new
        mine = next((group for group in new if world.rank in group), alone)
        if new:
            made.setdefault(mine, _Peers(new_group(mine), len(mine)))
    return made


def _check_same(topology: str, planned: list[Round], world: World) -> None:
    digests = gather(world, sha256(repr(planned).encode()).digest())
    with together(world):
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RecipeError(
                    "recipe.topology-differs-by-rank",
                    "average.topology = {value!r} gives rank {rank} other rounds than rank 0: it "
                    "must depend on its arguments only, on nodes with the same number of ranks",
                    value=topology,
                    rank=rank,
                )
