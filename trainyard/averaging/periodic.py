"""Periodic averaging: replicas train by themselves and average every so many steps."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from trainyard.averaging.config import DEFAULT_EVERY, AverageConfig
from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.averaging.nodes import Slices, counterparts
from trainyard.averaging.quantize import CODECS, compressed_mean
from trainyard.averaging.weight_averager import WeightAverager
from trainyard.world import World, new_group

_MESSAGE_BYTES = 25 * 2**20  # before compression


class Periodic(WeightAverager):
    """Local SGD (Stich 2019, arXiv 1805.09767; Lin et al. 2020, arXiv 1808.07217) and DiLoCo
    (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    All replicas start a period of `every` steps at the same weights, the anchor. The mean of their
    moves in the period is the gradient of an outer SGD with Nesterov momentum (torch's), which
    steps the anchor. All replicas restart at the new anchor. An outer rate of 1 without momentum
    gives the mean of the weights, up to rounding. Inner optimizers keep their state.

    With overlap, the mean of a period is exchanged during the next period and steps the anchor at
    its end. A replica does not wait: it continues from the anchor plus its own move, which it has
    sent. Eager updates (Kale et al. 2025, arXiv 2502.12996) are similar, but pass a replica's own
    move through the outer optimizer too; here each move enters the anchor exactly once.

    The consensus is the mean of the replicas. The anchor would lack the steps since the last
    exchange and, with overlap, the pending exchange.

    Weights of one replica that are not finite make the weights of all replicas so in the next
    exchange. All replicas then skip their updates and return to a checkpoint together.
    """

    def __init__(self, config: AverageConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = config
        self._every = config.every or DEFAULT_EVERY
        self._codec = CODECS[config.compress] if config.compress else None
        # Groups of their own, because other messages are sent while theirs are pending.
        if self._node is None:
            self._peers = new_group(range(world.size))
            self._slices = Slices()
        else:
            self._peers = counterparts(world, self._node)
            self._slices = Slices(new_group(dist.get_process_group_ranks(self._node)))
        self._thread = ThreadPoolExecutor(1, "averaging")
        self._pending: Callable[[], Tensor] | None = None  # waits for the last period's mean

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
            self._step_anchor(self._mean(moved))
            self._restart_at(self._anchor)
            return
        if self._pending is not None:
            self._step_anchor(self._pending())
        self._restart_at(self._anchor - moved)
        self._pending = self._start_mean(moved)

    def _step_anchor(self, mean: Tensor) -> None:
        self._anchor.grad = mean
        self._outer.step()
        self._anchor.grad = None

    def _restart_at(self, start: Tensor) -> None:
        self._start = start
        unflatten_into(self._parameters, start)

    # --- the exchange ---

    def _mean(self, moved: Tensor) -> Tensor:
        """The mean over the replicas, equal bit by bit on all ranks."""
        mean = self._slices.pad(moved)
        for part in torch.split(self._slices.local(mean), _MESSAGE_BYTES // mean.itemsize):
            if self._codec is None:
                dist.all_reduce(part, group=self._peers)
                part.div_(self._peers.size())
            else:
                part.copy_(compressed_mean(self._codec, part, self._peers))
        self._slices.gather(mean)
        return mean[: len(moved)]

    def _start_mean(self, moved: Tensor) -> Callable[[], Tensor]:
        """Starts the exchange; the returned function waits for the mean."""
        if moved.is_cuda:
            return self._start_mean_on_stream(moved)
        return self._thread.submit(self._mean, moved).result  # gloo blocks its caller

    def _start_mean_on_stream(self, moved: Tensor) -> Callable[[], Tensor]:
        """Exchanges on a CUDA stream of its own. NCCL does not block the training thread.

        The training thread starts the messages of all groups, so their order is the same on all
        ranks: NCCL can deadlock if ranks start two messages in different orders.
        """
        self._stream.wait_stream(torch.cuda.current_stream(moved.device))
        with torch.cuda.stream(self._stream):
            mean = self._mean(moved)

        def arrived() -> Tensor:
            torch.cuda.current_stream(moved.device).wait_stream(self._stream)
            return mean

        return arrived

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending()

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"own": self._consensus.own, "anchor": self._anchor}
        if self._config.outer_momentum:
            state["momentum"] = self._outer.state[self._anchor].get("momentum_buffer")
        if self._config.overlap:
            state["start"] = self._start
            state["mean"] = self._pending() if self._pending else None
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A state saved with other options counts as empty: training resumes from the mean."""
        self._wait()
        self._pending = None
        self._outer.state.clear()
        if state.keys() != self.state_dict().keys():
            self._anchor.copy_(flatten(self._parameters))
            self._start = self._anchor
            return
        self._consensus.load_own(state["own"])
        self._anchor.copy_(state["anchor"])
        more = {
            name: state[name].to(self._anchor.device)
            for name in ("momentum", "start", "mean")
            if state.get(name) is not None  # some do not exist before the first exchange
        }
        self._start = more.get("start", self._anchor)
        if "momentum" in more:
            self._outer.state[self._anchor]["momentum_buffer"] = more["momentum"]
        if "mean" in more:
            self._pending = lambda: more["mean"]
