"""The interface of averagers. The training loop does not know which averager it runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from trainyard.averaging.config import AverageConfig
from trainyard.world import World, total


class Replica(NamedTuple):
    """The number of a rank among those that save a state of their own."""

    number: int = 0
    total: int = 1  # 1 if all ranks have the same state

    @property
    def differs(self) -> bool:
        """True if weights and moments differ between ranks."""
        return self.total > 1


class Averager(ABC):
    """Averages gradients, weights or both over ranks."""

    moves_model = False
    """True if `wrap` moves the model to the device itself, in pieces: it may not fit as a whole."""
    waits_in_forward: str | None = None
    """The recipe's setting by which ranks wait for each other in a forward pass; None without one.
    All ranks must then make equally many forward passes."""
    replica = Replica()
    weight: Tensor
    """Total weight of the samples that the buffers have seen in this step: of all ranks if the
    averager averages buffers in each step, else of this rank. Valid after the divisor was read."""

    def __init__(self, config: AverageConfig, world: World) -> None:
        self._config, self._world = config, world

    @classmethod
    def build(
        cls,
        config: AverageConfig,
        world: World,
        device: torch.device,
        precision: torch.dtype | None,
    ) -> Self:
        """The averager of a run on a device. `precision`: the dtype of autocast, None without."""
        return cls(config, world)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the module to call in training. All replicas start with the same weights."""

    @abstractmethod
    def register_emas(self, emas: Mapping[str, nn.Module]) -> None:
        """Registers the moving averages of the weights by name: `consensus` averages them too."""

    @abstractmethod
    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """Returns the divisor of a replica's summed loss, given the total weight of its samples.

        With this divisor the averaged gradient is the exact mean over the samples of all averaged
        ranks. The divisor comes by a message: call the returned function as late as possible.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Context without gradient exchange, for all micro-steps but the last."""
        return nullcontext()

    @abstractmethod
    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        """Yields the trained parameters, in one group or several, each ready for its update.

        The caller runs the backward pass of `step` (counted from 0) first, updates each group
        before it asks for the next one, and exhausts the iterator. Averagers that exchange weights
        mix a group before they yield it, and send it once it is updated. Without `divisible` there
        is a single group, for optimizers that update all parameters at once.
        """

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Context in which every replica holds the mean, for evaluation, checkpoints and export.

        No exchange is pending inside.
        """

    @abstractmethod
    def all_reduce_max(self, value: Tensor) -> Tensor:
        """The maximum of `value` over the replicas, where replicas differ; else `value`."""

    def add_up(self, sums_NK: Tensor) -> Tensor:
        """Sums [N] over all ranks, of those [N, K] of this rank's K turns in a step."""
        return total(self._world, sums_NK.sum(1))

    def metrics(self) -> dict[str, float]:
        """Metrics of the replicas, measured when `consensus` was last entered."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state for an exact resume; called inside `consensus`.

        Where replicas differ, the state includes a replica's own weights and moving average.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state after the mean was loaded into the modules.

        With an empty state, training resumes from the mean.
        """


class EqualReplicas(Averager):
    """The part of an averager whose replicas have equal weights and buffers after every step."""

    def register_emas(self, emas: Mapping[str, nn.Module]) -> None:
        """Averages of equal models are equal on all ranks."""

    def consensus(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce_max(self, value: Tensor) -> Tensor:
        return value

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is stored."""
