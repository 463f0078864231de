"""The batch record: one rank's share of a global batch, from the loader process to the step.

`Samples` declares the columns, one entry per sample. The loader's ring, the copies to a device and
the padding of streams follow this declaration. A new column is declared here and filled where
samples are planned (`loader/fill.py`, or `stream/process.py` for a stream).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Array = TypeVar("Array")
Other = TypeVar("Other")
HostArray = NDArray[Any]


class Column(NamedTuple):
    """The declaration of a column."""

    dtype: type[np.generic]
    default: float = 0  # the value of samples that are made without one
    on_device: bool = False  # True if a feed copies the column to its device


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples(Generic[Array]):
    """Columns [B] of a number of samples: NumPy arrays in a loader, tensors in a feed."""

    ids: Array = field(metadata={"column": Column(np.int64)})
    """Rows of the index. In a stream: shard and position; NO_SAMPLE for padding."""
    epochs: Array = field(metadata={"column": Column(np.int64)})
    """Epoch index of each sample; see Plan.epochs."""
    labels: Array = field(metadata={"column": Column(np.int64, on_device=True)})
    """Classes, as indices."""
    weights: Array = field(metadata={"column": Column(np.float32, default=1, on_device=True)})
    """0 for a bad sample and for padding, whose pixels are 0; else 1."""

    def columns(self) -> dict[str, Any]:
        """The columns by name, without copies."""
        return {name: getattr(self, name) for name in COLUMNS}

    def map(self, function: Callable[[Array], Other]) -> "Samples[Other]":
        """Applies a function to each column."""
        return Samples(**{name: function(column) for name, column in self.columns().items()})


COLUMNS: dict[str, Column] = {one.name: one.metadata["column"] for one in fields(Samples)}
"""The declarations of the columns by name, in the order of the ring."""


def samples_of(count: int, **given: HostArray | float) -> Samples[HostArray]:
    """`count` samples with the given columns or constants; the others have default values."""
    assert given.keys() <= COLUMNS.keys()
    columns = {name: np.empty(count, column.dtype) for name, column in COLUMNS.items()}
    for name, values in columns.items():
        values[:] = given.get(name, COLUMNS[name].default)
    return Samples(**columns)


class BadSample(NamedTuple):
    """A sample that could not be read or decoded."""

    id: int
    file: str
    offset: int  # bytes
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class PixelBatch(Samples[Array]):
    """A batch in a loader's ring, or on its way from there to a device.

    The arrays of a ring are valid until the next batch is fetched or, after a call of `acquire`,
    until the function that it returns is called. Tensors on a GPU are valid between these two only,
    and their pixels may be altered.
    """

    images_BHWC: Array
    """uint8: pixels, or encoded images for a GPU to decode; see loader/encoded_batch.py."""
    bad: list[BadSample] = field(default_factory=list)
    acquire: Callable[[], Callable[[], None]] = lambda: lambda: None
    capacity: float = 0.0
    """Images a second that the loader could make without waiting for the trainer, by the time its
    threads spent on this batch; 0 if unknown."""

    def part(self, rows: slice) -> "PixelBatch[Array]":
        """The images and columns of some samples, without copies."""
        some: Callable[[Any], Any] = itemgetter(rows)
        return PixelBatch(**self.map(some).columns(), images_BHWC=some(self.images_BHWC))


HostBatch = PixelBatch[HostArray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(Samples["Tensor"]):
    """A batch for the step. Its ids and epochs are on the host, all else on the device."""

    images_BCHW: "Tensor"
    """Normalised; float32, or the dtype of Normalise."""
    mixed_labels: "Tensor"
    """int64[B], of the samples mixed in; `labels` where none is."""
    lam: "Tensor"
    """float32[B], the share of `labels` in the target; 1 where none is mixed in."""
    bad: list[BadSample] = field(default_factory=list)
    capacity: float = 0.0
    """See PixelBatch."""

    def split(self, count: int) -> list["Batch"]:
        """Its samples in `count` parts, equal but for one sample, without copies."""
        columns = zip(*(getattr(self, name).tensor_split(count) for name in TENSORS), strict=True)
        return [Batch(**dict(zip(TENSORS, column, strict=True))) for column in columns]

    def aligned(self) -> "Batch":
        """A part with a copy of its images, which has the alignment of those of a whole batch.

        A kernel may depend on it.
        """
        return replace(self, images_BCHW=self.images_BCHW.clone())


TENSORS = [*COLUMNS, "images_BCHW", "mixed_labels", "lam"]
"""The names of all tensors of a Batch."""


class Keys(NamedTuple):
    """The keys of a batch's randomness, besides the run's seed; all on the host."""

    ids: NDArray[np.int64]  # [B]
    visits: NDArray[np.int64]  # [B], epoch indices of the samples
    position: int  # stream position of the global batch's first sample, equal on every rank
