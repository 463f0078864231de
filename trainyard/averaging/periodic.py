"""Periodic averaging: replicas train by themselves, and agree every so many steps."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from trainyard.averaging.base import DEFAULT_EVERY, AverageConfig
from trainyard.averaging.differing import Differing
from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.averaging.nodes import Slices, counterparts
from trainyard.averaging.quantize import CODINGS, mean_by
from trainyard.world import World, new_group

_MESSAGE_BYTES = 25 * 2**20  # of weights; compressed, the message has fewer


class Periodic(Differing):
    """Local SGD (Stich 2019, arXiv 1805.09767; Lin et al. 2020, arXiv 1808.07217) and DiLoCo
    (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    In a period of `every` steps each replica moves by itself from where all began, the anchor. The
    mean of what they moved is the gradient of an outer SGD with Nesterov momentum, torch's, which
    moves the anchor, and there all begin again. With its rate of 1 and no momentum that is the mean
    of the weights, but for rounding. Inner optimizers keep what they have.

    With overlap, the mean of a period travels while the next one is trained, and moves the anchor
    at its end. A replica does not wait: it goes on from the anchor plus what it has itself moved
    and has sent. Eager updates (Kale et al. 2025, arXiv 2502.12996) are alike, but pass one's own
    part through the outer optimizer too; here everyone's moves enter the anchor exactly once.

    The consensus is the mean of the replicas: the anchor lacks all that was trained since, and
    with overlap what is under way.

    Weights of a replica that are not finite make, in the next exchange, everyone's so: all skip
    their updates then, and go back to a checkpoint together.
    """

    def __init__(self, config: AverageConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = config
        self._every = config.every or DEFAULT_EVERY
        self._coding = CODINGS[config.compress] if config.compress else None
        # Groups of their own: others' messages are sent while theirs are under way.
        if self._node is None:
            self._peers = new_group(range(world.size))
            self._slices = Slices()
        else:
            self._peers = counterparts(world, self._node)
            self._slices = Slices(new_group(dist.get_process_group_ranks(self._node)))
        self._thread = ThreadPoolExecutor(1, "averaging")
        self._under_way: Callable[[], Tensor] | None = None  # the mean of the period before

    def _prepare(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._start = self._anchor = flatten(parameters)
        momentum = self._config.outer_momentum or 0.0
        self._outer = torch.optim.SGD(
            [self._anchor], self._config.outer_lr or 1.0, momentum, nesterov=momentum > 0
        )
        if self._anchor.is_cuda:
            self._stream = torch.cuda.Stream(self._anchor.device)  # type: ignore[no-untyped-call]

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        yield self._parameters
        if (step + 1) % self._every == 0:
            self._end_period()

    @torch.no_grad()
    def _end_period(self) -> None:
        moved = self._start - flatten(self._parameters)
        if not self._config.overlap:
            self._move_anchor(self._mean(moved))
            self._begin_at(self._anchor)
            return
        if self._under_way is not None:
            self._move_anchor(self._under_way())
        self._begin_at(self._anchor - moved)
        self._under_way = self._send(moved)

    def _move_anchor(self, mean: Tensor) -> None:
        self._anchor.grad = mean
        self._outer.step()
        self._anchor.grad = None

    def _begin_at(self, start: Tensor) -> None:
        self._start = start
        unflatten_into(self._parameters, start)

    # --- the exchange ---

    def _mean(self, moved: Tensor) -> Tensor:
        """The mean over the replicas, bit by bit the same on all ranks."""
        mean = self._slices.padded(moved)
        for part in torch.split(self._slices.own(mean), _MESSAGE_BYTES // mean.itemsize):
            if self._coding is None:
                dist.all_reduce(part, group=self._peers)
                part.div_(self._peers.size())
            else:
                part.copy_(mean_by(self._coding, part, self._peers))
        self._slices.gather(mean)
        return mean[: len(moved)]

    def _send(self, moved: Tensor) -> Callable[[], Tensor]:
        """The mean, to be asked for later; no step waits for it."""
        if moved.is_cuda:
            return self._send_beside(moved)
        return self._thread.submit(self._mean, moved).result  # gloo keeps its caller waiting

    def _send_beside(self, moved: Tensor) -> Callable[[], Tensor]:
        """On a stream of its own. NCCL keeps nobody waiting, so this thread begins the messages.

        Those of all groups thus begin in one order, the same on all ranks: in another order on
        another rank, two messages of NCCL may wait for each other for ever.
        """
        self._stream.wait_stream(torch.cuda.current_stream(moved.device))
        with torch.cuda.stream(self._stream):
            mean = self._mean(moved)

        def arrived() -> Tensor:
            torch.cuda.current_stream(moved.device).wait_stream(self._stream)
            return mean

        return arrived

    def _settle(self) -> None:
        if self._under_way is not None:
            self._under_way()

    # --- what others see ---

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"own": self._consensus.own(), "anchor": self._anchor}
        if self._config.outer_momentum:
            state["momentum"] = self._outer.state[self._anchor].get("momentum_buffer")
        if self._config.overlap:
            state["start"] = self._start
            state["mean"] = self._under_way() if self._under_way else None
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state of another way to average is as good as none: to go on from the mean."""
        self._settle()
        self._under_way = None
        self._outer.state.clear()
        if state.keys() != self.state_dict().keys():
            self._anchor.copy_(flatten(self._parameters))
            self._start = self._anchor
            return
        self._consensus.put_own(state["own"])
        self._anchor.copy_(state["anchor"])
        more = {
            name: state[name].to(self._anchor.device)
            for name in ("momentum", "start", "mean")
            if state.get(name) is not None  # before the first exchange there is none of some
        }
        self._start = more.get("start", self._anchor)
        if "momentum" in more:
            self._outer.state[self._anchor]["momentum_buffer"] = more["momentum"]
        if "mean" in more:
            self._under_way = lambda: more["mean"]
