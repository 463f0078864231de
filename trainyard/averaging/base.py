"""The seam through which replicas agree; the loop does not know which averager it runs."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainyard.section import Section

if TYPE_CHECKING:
    from torch import Tensor, nn


class AverageConfig(Section):
    name: Literal["allreduce"] = "allreduce"
    """How replicas agree: allreduce averages gradients in every step."""


class Averager(Protocol):
    def wrap(self, model: "nn.Module") -> "nn.Module":
        """The module to call in training; the replicas start equal."""

    def follow(self, module: "nn.Module") -> None:
        """Average `module`, a moving average of the wrapped model, with it in `consensus`."""

    def divisor(self, weight: "Tensor") -> "Tensor":
        """What a replica's summed loss is divided by, given the `weight` of its samples.

        After the replicas have agreed, the gradient is then the exact mean over the samples.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside, gradients stay local: for all micro-steps but the last."""

    def before_update(self) -> None:
        """After it, gradients and parameters are what the optimizer may use."""

    def after_update(self, step: int) -> None:
        """Mixes parameters, or begins to."""

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, every replica holds the mean: for evaluation, checkpoints and export."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
