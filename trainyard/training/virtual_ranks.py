"""The step of a rank that works for several virtual ranks, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from trainyard.averaging.virtual_ranks import VirtualRanks, turns
from trainyard.data.batch import Batch
from trainyard.errors import RecipeError
from trainyard.training.step import (
    Divisor,
    TrainStep,
)
from trainyard.world import World

_NOT_DETERMINISTIC = "does not have a deterministic implementation"  # in torch's error


@dataclass(kw_only=True)
class VirtualRanksStep(TrainStep):
    """A step whose result is the same bits on any number of ranks.

    Each virtual rank starts from the same buffers, with random numbers of its own, and computes
    what a rank of its number would.
    """

    averager: VirtualRanks

    def __post_init__(self) -> None:
        worlds = [World(rank=one, size=self.averager.total) for one in self.averager.own]
        self._passes = [replace(self.passes, world=world) for world in worlds]

    def _counts(self, batch: Batch) -> Tensor:
        return batch.weights.view(len(self._passes), -1).sum(1)

    def _sums(self, batch: Batch, counts: Tensor, step: int, divisor: Divisor) -> Tensor:
        """The sums of Passes, [2, K]. The gradient and statistics are of the global batch."""
        parts = batch.split(len(self._passes))
        sums_2K = counts.new_zeros(2, len(parts))
        for turn, number in enumerate(turns(len(parts))):
            if turn > 0:
                self.buffers.restore()
            part = parts[number].aligned() if len(parts) > 1 else batch
            with self._explained(), self.averager.passes_of(turn, counts[number]):
                sums_2K[:, number] = self._passes[number](
                    part, step, micro=self.micro, divisor=divisor, scale=self.update.loss_scale
                )
        return sums_2K

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Inside, the error of an operation that cannot repeat its bits is one of the recipe."""
        try:
            yield
        except RuntimeError as error:
            if _NOT_DETERMINISTIC not in str(error):
                raise
            raise RecipeError(
                "model.not-deterministic",
                "batch.virtual_ranks = {value}: this model needs an operation that gives other "
                "bits each time: {reason}",
                value=self.averager.total,
                reason=str(error).partition(".")[0],
            ) from None
