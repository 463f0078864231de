"""The [average] section of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from trainyard.errors import RecipeError
from trainyard.own_code import is_own
from trainyard.section import Section, refused

# Defaults of keys that are not set.
DEFAULT_EVERY = 64  # steps
DEFAULT_TOPOLOGY = "one-peer-exponential"

AVERAGERS = {
    "allreduce": "allreduce:AllReduce",
    "gossip": "gossip:Gossip",
    "periodic": "periodic:Periodic",
    "sharded": "sharded:Sharded",
}
"""Averagers by name: a module of this folder and its class, whose import loads torch."""


def _checked_name(name: str) -> str:
    if name in AVERAGERS or is_own(name):
        return name
    names = ", ".join(map(repr, AVERAGERS))
    expected = f'{names} or a class of your own as "module:Class"'
    raise PydanticCustomError("literal_error", "{expected}", {"expected": expected})


class AverageConfig(Section):
    TAKEN_BY: ClassVar = {
        "compress": ("allreduce", "gossip"),
        "batch_norm": ("allreduce",),
        "accumulate": ("sharded",),
        "topology": ("gossip",),
        "overlap": ("gossip",),
        "every": ("periodic",),
        "outer_lr": ("periodic",),
        "outer_momentum": ("periodic",),
    }

    name: Annotated[str, AfterValidator(_checked_name)] = "allreduce"
    """allreduce: averages gradients in every step. gossip: averages weights with a few peers in
    every step. periodic: averages weights of all replicas every few steps. sharded: all-reduce for
    models that do not fit on one device; each rank keeps a part of the weights (FSDP2).
    Or a class of your own as "module:Class", on more than one rank."""
    compress: Literal["bf16", "fp16"] | None = None
    """Type in which allreduce sends gradients, and gossip (bf16 only) weights; fp32 if not set."""
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
    overlap: bool | None = None
    """gossip: exchange during the next step; true if not set. false: after the update."""
    every: int | None = Field(None, ge=1)
    """Steps between the exchanges of periodic; 64 by default."""
    outer_lr: float | None = Field(None, gt=0)
    """periodic: learning rate of the outer SGD, whose gradient is the mean of the replicas'
    updates; 1 by default."""
    outer_momentum: float | None = Field(None, ge=0, lt=1)
    """periodic: Nesterov momentum of the outer SGD; 0 by default. DiLoCo uses 0.9 with `outer_lr`
    0.7."""

    @field_validator("compress")
    @classmethod
    def _has_the_range(cls, compress: str | None, others: ValidationInfo) -> str | None:
        if compress == "fp16" and others.data.get("name") == "gossip":
            raise ValueError("average.name = 'gossip' takes bf16: weights can exceed fp16's range")
        return compress

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """A sharded model excludes other keys."""
        if self.name != "sharded":
            return
        mode, clip_agc = recipe.model.compile, recipe.optim.clip_agc
        settings = {
            # They need weights at fixed addresses.
            f"model.compile = {mode!r}": mode in ("reduce-overhead", "max-autotune"),
            "model.ema_cpu = true": recipe.model.ema_cpu,  # the average is where the weights are
            "optim.compile = true": recipe.optim.compile,
            f"optim.clip_agc = {clip_agc}": clip_agc is not None,
        }
        yield from refused(settings, "average.name = 'sharded'", "leave it out")
