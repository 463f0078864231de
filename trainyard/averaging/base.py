"""The interface of averagers. The training loop does not know which averager it runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from pydantic import Field, ValidationInfo, field_validator

from trainyard.section import Section

if TYPE_CHECKING:
    from torch import Tensor, nn

# Defaults of keys that are not set.
DEFAULT_EVERY = 64  # steps
DEFAULT_TOPOLOGY = "one-peer-exponential"

_Name = Literal["allreduce", "gossip", "periodic", "sharded"]
# The averagers that take a key.
_KEYS_OF: dict[str, tuple[_Name, ...]] = {
    "compress": ("allreduce", "gossip", "periodic"),
    "batch_norm": ("allreduce",),
    "topology": ("gossip",),
    "mixing": ("gossip",),
    "overlap": ("gossip", "periodic"),
    "hierarchical": ("gossip", "periodic"),
    "every": ("periodic",),
    "outer_lr": ("periodic",),
    "outer_momentum": ("periodic",),
}
_COMPRESSIONS = {
    "allreduce": ("bf16", "fp16", "powersgd"),
    "gossip": ("bf16",),
    "periodic": ("bf16", "int8"),
}


class AverageConfig(Section):
    name: _Name = "allreduce"
    """allreduce: averages gradients in every step. gossip: averages weights with a few peers in
    every step. periodic: averages weights of all replicas every few steps. sharded: all-reduce for
    models that do not fit on one device; each rank keeps a part of the weights (FSDP2)."""
    compress: Literal["bf16", "fp16", "powersgd", "int8"] | None = None
    """Compression of what is sent. allreduce takes bf16, fp16 and powersgd (from step 1,000),
    periodic takes bf16 and int8. None by default."""
    batch_norm: Literal["local", "sync"] | None = None
    """Samples that batch norm normalises by: a replica's own (local) or those of all replicas
    (sync, on GPUs). With local, the statistics for evaluation are averaged over replicas."""
    topology: str | None = None
    """The groups that mix in gossip: complete, ring, one-peer-exponential (if not set),
    alternating-exponential-ring, or a function of your own as "module:function"."""
    mixing: float | None = Field(None, gt=0, le=1)
    """Weight of the peers' mean in a mix; 1 (the mean itself) by default."""
    overlap: bool | None = None
    """Exchange while computing. gossip: during the next step, on by default. periodic: during the
    next period, off by default."""
    hierarchical: bool | None = None
    """All-reduce gradients inside each node in every step, so that a node is one replica."""
    every: int | None = Field(None, ge=1)
    """Steps between the exchanges of periodic; 64 by default."""
    outer_lr: float | None = Field(None, gt=0)
    """periodic: learning rate of the outer SGD, whose gradient is the mean of the replicas'
    updates; 1 by default."""
    outer_momentum: float | None = Field(None, ge=0, lt=1)
    """periodic: Nesterov momentum of the outer SGD; 0 by default. DiLoCo uses 0.9 with `outer_lr`
    0.7."""

    @field_validator(*_KEYS_OF)
    @classmethod
    def _is_for_this_averager(cls, value: object, others: ValidationInfo) -> object:
        name, names = others.data.get("name"), _KEYS_OF[str(others.field_name)]
        if value is not None and name not in names:
            wanted = " or ".join(f"'{name}'" for name in names)
            raise ValueError(f"is for average.name = {wanted}, not {name!r}: leave it out")
        return value

    @field_validator("compress")
    @classmethod
    def _is_known_to_it(cls, compress: str | None, others: ValidationInfo) -> str | None:
        allowed = _COMPRESSIONS.get(str(others.data.get("name")), ())
        if compress is not None and allowed and compress not in allowed:
            raise ValueError(f"average.name = {others.data['name']!r} takes {' or '.join(allowed)}")
        return compress


class Replica(NamedTuple):
    """The number of a rank among those that save a state of their own."""

    number: int = 0
    total: int = 1  # 1 if all ranks have the same state
    weights_differ: bool = True

    @property
    def differs(self) -> bool:
        """Whether weights and moments differ between ranks."""
        return self.total > 1 and self.weights_differ


class Averager(Protocol):
    @property
    def replica(self) -> Replica: ...

    def wrap(self, model: "nn.Module") -> "nn.Module":
        """Returns the module to call in training. All replicas start with the same weights."""

    def register_ema(self, module: "nn.Module") -> None:
        """Registers the moving average of the weights: `consensus` averages it too."""

    def divisor(self, weight: "Tensor") -> Callable[[], "Tensor"]:
        """Returns the divisor of a replica's summed loss, given the total weight of its samples.

        With this divisor the averaged gradient is the exact mean over the samples of all averaged
        ranks. The divisor comes by a message: call the returned function as late as possible.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Context without gradient exchange, for all micro-steps but the last."""

    def ready_parameters(self, step: int, divisible: bool) -> "Iterator[Sequence[nn.Parameter]]":
        """Yields the trained parameters, in one group or several, each ready for its update.

        The caller runs the backward pass of `step` (counted from 0) first, updates each group
        before it asks for the next one, and exhausts the iterator. Averagers that exchange weights
        mix a group before they yield it, and send it once it is updated. Without `divisible` there
        is a single group, for optimizers that update all parameters at once.
        """

    def consensus(self) -> AbstractContextManager[None]:
        """Context in which every replica holds the mean, for evaluation, checkpoints and export.

        No exchange is pending inside.
        """

    def all_reduce_max(self, value: "Tensor") -> "Tensor":
        """The maximum of `value` over the replicas, where replicas differ; else `value`."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the replicas, measured when `consensus` was last entered."""

    def state_dict(self) -> dict[str, Any]:
        """The state for an exact resume; called inside `consensus`.

        Where replicas differ, the state includes a replica's own weights and moving average.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state after the mean was loaded into the modules.

        With an empty state, training resumes from the mean.
        """
