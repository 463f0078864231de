"""The [data] section of a recipe."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from trainyard.data.decode.crops import CentralCrop, Fit, FittedCrop, Interpolation, Pixel
from trainyard.data.decode.rendering import (
    BACKGROUND,
    MAX_PIXELS,
    Range,
    Ranges,
    Rendering,
    by_channel,
)
from trainyard.data.index.fold import read_fold
from trainyard.data.storage.location import take_secrets
from trainyard.errors import RecipeError
from trainyard.image_size import ImageSize, as_size, height_width
from trainyard.section import Section, refused


def _one_size(value: object, check: ValidatorFunctionWrapHandler) -> ImageSize:
    try:
        return as_size(*height_width(check(tuple(value) if isinstance(value, list) else value)))
    except ValidationError:
        raise ValueError(
            "write a side in pixels, or height and width: 224, say, or [128, 256]"
        ) from None


Pixels = Annotated[int, Field(ge=1)]
Size = Annotated[Pixels | tuple[Pixels, Pixels], WrapValidator(_one_size)]
Byte = Annotated[int, Field(ge=0, le=255)]
Positive = Annotated[float, Field(gt=0)]
Location = Annotated[str, AfterValidator(take_secrets)]
Locations = Location | Annotated[tuple[Location, ...], Field(min_length=1)]


class DataConfig(Section):
    NEEDS = (
        ("stage_gb", "stage"),
        ("val_seed", "val_share", "val_fold"),
        ("group", "val_share", "val_fold"),
    )

    train: Locations | None = None
    """Location of the training data: a folder, shards or a brace list. `--data` sets this key and
    `val`. A list of locations is one data set: classes with the same name are united. With `order`
    join: WebDataset shards as files, URLs or "pipe:COMMAND" for the output of a shell command."""
    val: Locations | None = None
    """Location of the validation data, or a list of locations. Precedence: `val`, `val_fold`,
    `val_share`; a key of an option or a later recipe goes before all three of a recipe below."""
    val_share: float | None = Field(None, gt=0, lt=1)
    """Share of the images of each class in `train` that is for validation, such as 0.1, if `val` is
    not set. An image's side depends on its path in `train` and on `val_seed` alone, so it stays the
    same as images are added; a class of two images or more has one on each side."""
    val_fold: str | None = None
    """Fold of the images of each class that is for validation, in place of `val_share`: "2/5" is
    the second of five, which are disjoint and together all images."""
    val_seed: int = Field(0, ge=0, lt=2**31)
    """Seed of `val_share` and `val_fold`. It is not `run.seed`, so that runs with other seeds are
    validated on the same images."""
    group: str | None = None
    """A column of a list, or a regular expression for the path in `train`, that names the group of
    an image, such as a patient: "(patient\\d+)". The name is the parts in parentheses, or all that
    matches. `val_share` and `val_fold` keep the images of a group on one side."""
    corrections: str | None = None
    """A CSV of images, in `train` and `val`, whose label is wrong: `file`, its right `class` or
    nothing to leave the image out, and maybe `offset`. The page of `trainyard suspects` saves
    one. No image changes between training and validation by it."""
    order: Literal["exact", "resample", "join"] = "exact"
    """exact: every sample once per epoch. resample: short runs of samples from shards drawn with
    replacement. join: data without an index; each rank reads its own shards once per pass, and
    ranks that finish early wait for the others."""
    samples: int | None = Field(None, ge=1)
    """Approximate number of samples per pass; required for `order` join, and only there."""
    locality: int = Field(0, ge=0)
    """Number of samples that are shuffled at a time, from blocks of neighbours, for storage where
    random access is slow. Only for `order` exact; 0 shuffles all samples."""
    weights: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    """Number of times per epoch for the samples of each location in `train`, such as [2, 0.5]; all
    once by default."""
    balance: float = Field(0.0, ge=0, le=1)
    """Weight of a class of n samples: each sample is drawn in proportion to n^-balance. 0: every
    sample once per epoch; 1: every class equally often. The number of images per epoch stays the
    same. Only for `order` exact, without `locality` and `weights`."""
    repeats: int = Field(1, ge=1)
    """Number of times in a row that each sample is used, each time with another crop (repeated
    augmentation). The number of images per epoch stays the same."""
    image_size: Size = 224
    """Side of a training image in pixels, or its height and width: [128, 256]. Crops keep the
    shapes of `augment.ratio`, and are stretched to this one; see `fit`."""
    eval_size: Size | None = None
    """Side of an evaluation image in pixels, or its height and width; `image_size` by default."""
    fit: Fit = "crop"
    """How an image gets the shape of `image_size`. crop: training sees random crops of the shapes
    of `augment.ratio`, evaluation the central crop. squash: it is stretched. pad: it keeps its
    shape, and `mean` fills the rest. With squash and pad, evaluation sees the whole image, and
    `augment.ratio` is relative to its shape: a crop with an `augment.scale` of [1, 1] is all of
    it."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """Share of the short side that the central evaluation crop covers. For a height and width: the
    image is resized to the smallest size of its own shape that covers both over `crop_pct`. With
    `fit` squash it is the share of both sides, with pad that of the long side; both 1 by default.
    A recipe's share goes where an option, a recipe that extends it, or initial weights bring
    another `fit`."""
    channels: int = Field(3, ge=1)
    """Channels of an image. 3: RGB. 1: luminance, the Y of a JPEG. Other numbers: multispectral
    images as .npy files, [height, width, channels], as TIFFs (extra tiff), or of two or four
    channels as PNG; images with another number are bad samples."""
    bands: Annotated[tuple[Pixels, ...], Field(min_length=1)] | None = None
    """Bands of a TIFF or a .npy array that are the channels, counted from 1, such as [4, 3, 2]; by
    default all in their order. With it, TIFFs are read by tifffile, and other images are bad
    samples."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Mean of each channel, on a scale of 0 to 1; by default ImageNet's, for one channel the mean
    of these, and 0.5 for multispectral images. Initial weights bring theirs, here and in `std`,
    `interpolation` and `crop_pct`, if the recipe sets none. A recipe's mean and std go where an
    option, or a recipe that extends it, brings another number of channels."""
    std: tuple[Positive, ...] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, on a scale of 0 to 1; by default ImageNet's, for one
    channel the mean of these, and 0.5 for multispectral images."""
    interpolation: Interpolation = "bilinear"
    """Filter for resizing; always antialiased."""
    exif: bool = False
    """true: turns each image upright, by the orientation that its camera noted in EXIF, as Pillow's
    `exif_transpose` does. Photographs of phones need it. torchvision's ImageFolder and timm ignore
    the orientation, so published accuracies are without it."""
    range: Literal["auto", "window"] | Range | Ranges | None = None
    """The values that become 0 and 255 in images of more than 8 bits a channel, such as [0, 4095],
    or for each channel of arrays; linear between them, clipped beyond, halves to the even number.
    auto: percentiles 0.1 and 99.9 of a seeded sample of the training images, or of each channel of
    multispectral ones, measured once and kept in the run's recipe, or those that initial weights
    bring. window: the window that each DICOM file has as its own; a file without one is a bad
    sample. Images of 8 bits are not changed."""
    background: tuple[Byte, Byte, Byte] = BACKGROUND
    """Colour behind transparent pixels, red, green and blue from 0 to 255; ImageNet's mean by
    default. Initial weights bring theirs."""
    max_pixels: int = Field(MAX_PIXELS, ge=1)
    """Largest number of pixels of an image, width times height; a larger one is a bad sample. A
    pixel takes 3 bytes, more while it is read."""
    max_bad: float = Field(0.01, ge=0, le=1)
    """Largest share of unreadable samples, rounded up to whole samples; more end the run."""
    decode: Literal["cpu", "gpu"] = "cpu"
    """Device that decodes JPEGs. gpu helps with few cores, on GPUs with a JPEG engine."""
    threads: int | None = Field(None, ge=1)
    """Loader threads per rank; by default the rank's share of the machine's cores."""
    stage: str | None = None
    """Folder on each node's own disk for copies of shards, such as $SLURM_TMPDIR. Each node copies
    once, while it trains; later runs use the copies again."""
    stage_gb: float | None = Field(None, gt=0)
    """Largest total size of the copies in `stage`, in GB; what exceeds it is read at its source."""

    @field_validator("range")
    @classmethod
    def _is_ascending(cls, values: Any, others: ValidationInfo) -> Any:
        if isinstance(values, tuple):
            ranges = by_channel(values)
            if any(not low < high for low, high in ranges or (values,)):
                raise ValueError("write the lower value first: [0, 4095], say")
            if ranges and len(ranges) != others.data.get("channels"):
                raise ValueError("write one range, or one for each channel")
        return values

    @property
    def rendering(self) -> Rendering:
        """How images become 8 bits a channel. RecipeError for a range that is not measured."""
        if self.range == "auto":
            raise RecipeError(
                "recipe.range-not-measured",
                "data.range = 'auto' is measured by training alone: give two values",
            )
        bands = self.bands or ()
        return Rendering(self.exif, self.range, self.background, self.max_pixels, bands)

    @field_validator("bands")
    @classmethod
    def _is_a_band_per_channel(
        cls, bands: tuple[int, ...] | None, others: ValidationInfo
    ) -> tuple[int, ...] | None:
        if bands is not None and len(bands) != (channels := others.data.get("channels")):
            raise ValueError(f"write one band for each channel, as data.channels = {channels}")
        return bands

    @field_validator("val_fold")
    @classmethod
    def _is_fold(cls, text: str | None) -> str | None:
        if text is not None:
            read_fold(text)
        return text

    @field_validator("group")
    @classmethod
    def _is_expression(cls, text: str | None) -> str | None:
        try:
            re.compile(text or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return text

    @property
    def val_part(self) -> float | str | None:
        """The part of `train` that is for validation, if `val` is not set."""
        return self.val_fold or self.val_share

    @field_validator("mean", "std")
    @classmethod
    def _is_per_channel(
        cls, values: tuple[float, ...], others: ValidationInfo
    ) -> tuple[float, ...]:
        channels = others.data.get("channels", len(values))
        if len(values) != channels and values != cls.model_fields[str(others.field_name)].default:
            raise ValueError(f"write one number for each channel, as data.channels = {channels}")
        return values

    @property
    def padding(self) -> Pixel | None:
        """The pixel beside images of `fit` pad: normalised, it is almost 0."""
        return tuple(round(255 * mean) for mean in self.mean) if self.fit == "pad" else None

    def evaluation_crop(self, size: ImageSize) -> CentralCrop | FittedCrop:
        """The part of an image that an evaluation sees, at this size."""
        if self.fit == "crop":
            return CentralCrop(size, self.crop_pct)
        return FittedCrop(size, self.crop_pct, self.padding)

    @model_validator(mode="after")
    def _sees_the_whole(self) -> Self:
        if self.fit != "crop" and "crop_pct" not in self.model_fields_set:
            self.__dict__["crop_pct"] = 1.0  # the section is frozen
        return self

    @model_validator(mode="after")
    def _has_statistics(self) -> Self:
        """Replaces the defaults of RGB, written out or not, by those of other channels."""
        if self.channels != 3:
            mean, std = (0.449, 0.226) if self.channels == 1 else (0.5, 0.5)
            for key, value in (("mean", mean), ("std", std)):
                if getattr(self, key) == type(self).model_fields[key].default:
                    self.__dict__[key] = (value,) * self.channels  # the section is frozen
        return self

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        decode = f"data.decode = {self.decode!r}"
        if self.order == "join":
            yield from self._conflicts_of_join(recipe)
        elif self.samples is not None:
            yield RecipeError(
                "recipe.samples-without-join",
                "{key} is for data.order = 'join' only: data with an index has been counted",
                key="data.samples",
            )
        if self.balance:
            settings = {
                f"data.order = {self.order!r}": self.order != "exact",
                f"data.locality = {self.locality}": self.locality > 0,
                "data.weights": self.weights is not None,
                "loss.class_weights = 'balanced', which does the same in the loss,": (
                    recipe.loss.class_weights == "balanced"
                ),
            }
            yield from refused(settings, f"data.balance = {self.balance}", "leave one of them out")
        if self.decode != "cpu" and self.channels != 3:
            yield RecipeError("recipe.needs-rgb", setting=decode, channels=self.channels)
        if self.fit == "pad":
            yield from refused({decode: self.decode == "gpu"}, "data.fit = 'pad'")
        if self.bands:
            yield from refused({decode: self.decode == "gpu"}, "data.bands")

    def _conflicts_of_join(self, recipe: Any) -> Iterator[RecipeError]:
        average, length, schedule = recipe.average, recipe.run.length, recipe.schedule
        settings = {
            f"average.name = {average.name!r}": average.name != "allreduce",
            "average.batch_norm = 'sync'": average.batch_norm == "sync",
            "data.range = 'auto'": self.range == "auto",
            "data.corrections": self.corrections is not None,
            "stages of schedule.batch_size or schedule.image_size": bool(
                schedule.batch_size or schedule.image_size
            ),
            f"data.decode = {self.decode!r}": self.decode != "cpu",
            f"run.bn_samples = {recipe.run.bn_samples}": recipe.run.bn_samples > 0,
            f"run.length = {length!r}, as a pass is whole or none,": (
                "epoch" in length and float(length.partition("e")[0]) % 1 > 0
            ),
        }
        yield from refused(settings, "data.order = 'join'")
