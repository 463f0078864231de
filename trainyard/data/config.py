"""The [data] section of a recipe."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trainyard.data.decode.decode import Interpolation
from trainyard.data.storage.location import take_secrets
from trainyard.section import Section

Positive = Annotated[float, Field(gt=0)]
Location = Annotated[str, AfterValidator(take_secrets)]
Locations = Location | Annotated[tuple[Location, ...], Field(min_length=1)]


class DataConfig(Section):
    train: Locations | None = None
    """Location of the training data: a folder, shards, a brace list; --data sets it and `val`.
    Of a list of several the samples are merged, and the classes by their names. With `order` join,
    shards of WebDataset: files, URLs, or "pipe:COMMAND" for what a shell command writes."""
    val: Locations | None = None
    """Location of the validation data, or a list of several."""
    order: Literal["exact", "resample", "join"] = "exact"
    """exact: every sample once an epoch; resample: runs of samples of shards drawn with
    replacement; join: for data without an index, each rank reads shards of its own to their end,
    and those that are done wait for the others: every sample once a pass."""
    samples: int | None = Field(None, ge=1)
    """How many samples a pass has, as far as one knows; needed for `order` join, and only there.
    """
    locality: int = Field(0, ge=0)
    """For storage where random access is slow: samples that are shuffled at a time, out of blocks
    of neighbours, in the exact order; 0 shuffles all."""
    weights: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    """How often an epoch has each sample of each location in `train`, [2, 0.5] say; once if not
    given."""
    repeats: int = Field(1, ge=1)
    """How often a sample comes in a row, with another crop each time (repeated augmentation); an
    epoch stays as long."""
    image_size: int = Field(224, ge=1)
    """Side of a training image in pixels."""
    eval_size: int | None = Field(None, ge=1)
    """Side of an evaluation image in pixels; as `image_size` if not given."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """Share of the short side that the central evaluation crop covers."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of each colour channel, on a scale of 0 to 1."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each colour channel, on a scale of 0 to 1."""
    interpolation: Interpolation = "bilinear"
    """How images are resized; always antialiased."""
    max_bad: float = Field(0.01, ge=0, le=1)
    """Share of samples that may be unreadable before the run stops."""
    decode: Literal["cpu", "gpu"] = "cpu"
    """Where JPEGs are decoded: on a GPU with the extra `nvimgcodec`, if there are too few cores."""
    threads: int | None = Field(None, ge=1)
    """Loader threads per rank; by default the rank's share of the machine's cores."""
    stage: str | None = None
    """Folder on each node's own disk for copies of the data, $SLURM_TMPDIR say; made while
    training goes on, once per node, and used again by later runs."""
    stage_gb: float | None = Field(None, gt=0)
    """GB that all copies in that folder may take; the least recently used make room."""
