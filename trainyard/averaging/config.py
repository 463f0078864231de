"""The [average] section of a recipe."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from trainyard.section import Section

# Defaults of keys that are not set.
DEFAULT_EVERY = 64  # steps
DEFAULT_TOPOLOGY = "one-peer-exponential"

_Name = Literal["allreduce", "gossip", "periodic", "sharded"]
# The averagers that take a key.
_KEYS_OF: dict[str, tuple[_Name, ...]] = {
    "compress": ("allreduce", "gossip", "periodic"),
    "batch_norm": ("allreduce",),
    "accumulate": ("sharded",),
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
    accumulate: Literal["whole", "parts"] | None = None
    """How a sharded model adds up gradients of micro-batches. whole (if not set): on each device, 4
    bytes more for each weight, and summed over ranks once a step. parts: each rank keeps its part,
    and gradients are sent after every micro-batch."""
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
