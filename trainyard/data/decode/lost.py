"""What training does not see of images: a range that 8 bits lose, pages after the first one.

Nothing fails on them, so a few images of a data set are looked at, and it is told.
"""

import io
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from trainyard.data.decode.array_file import Bands
from trainyard.data.decode.decode import OF_PICTURES, as_rgb, has_alpha, num_channels, opened
from trainyard.data.decode.rendering import (
    MAX_PIXELS,
    Range,
    Ranges,
    deep_values,
    is_deep,
    written,
)
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader, read_ahead
from trainyard.data.sampler.plan import Ids
from trainyard.errors import DataError

Code = Literal["dark", "frames", "profile", "transparent"]
_NUM_LOOKS = 32  # images of a data set
_PATIENCE_S = 2.0
_NUM_MEASURED, _NUM_VALUES = 256, 1 << 14  # images of a data set, and values of each
_PERCENTILES = (0.1, 99.9)
_DARK = 32  # of 255; no image has so little, and a mask of classes has no more
_SMALL = (64, 64)  # pixels of an image whose profile is looked at
_GAMMA = 2.2  # about that of sRGB
_SHIFTED = 1.0  # grey levels: less is rounding, or another profile of sRGB


class Look(NamedTuple):
    """What an image holds beyond the pixels that training sees."""

    low: float
    high: float
    is_deep: bool
    """True for channels of more than 8 bits, which data.range maps to 8."""
    frames: int
    is_transparent: bool = False
    shift: float = 0
    """Mean difference, of 255, of the pixels to the colours in sRGB by its profile or gamma."""
    kind: str = "NPY"
    """Pillow's name of the format."""

    def remarks(self) -> Iterator[tuple[Code, str]]:
        """What is to be told about this image, or about all images that it sums up."""
        if self.high < _DARK and not self.is_deep:
            yield "dark", f"values from {self.low} to {self.high} of 255: nearly black"
        if self.frames > 1:
            yield "frames", f"{self.frames:,} pages or frames, of which training sees the first"
        if self.shift >= _SHIFTED:
            yield (
                "profile",
                "a colour profile or gamma that is not applied: in sRGB, colours differ by "
                f"{self.shift:.1f} of 255 in the mean",
            )
        if self.is_transparent:
            yield "transparent", "transparent pixels, which 1 or 3 channels show as data.background"


class Measured(NamedTuple):
    """Images of more than 8 bits, or of other channels than a recipe's, in a sample of a data set.

    They are as if a recipe had the number of channels that most images have.
    """

    location: str
    num_deep: int
    num_looks: int
    limits: Range | Ranges
    """Percentiles 0.1 and 99.9 of the values of deep images, or of each channel's; empty without
    such images."""
    channels: int | None = None
    """The channels of most images, if the recipe has another number."""

    def __str__(self) -> str:
        share, low_high = _PERCENTILES[1] - _PERCENTILES[0], written(self.limits)
        of_most = f", most have {self.channels} channels" * bool(self.channels)
        values = f"{self.num_deep} have more than 8 bits a channel; {share:g}% of their values lie"
        of_deep = f", {values} in {low_high}" * bool(self.limits)
        return f"{self.location}: of {self.num_looks} images looked at{of_most}{of_deep}"

    def options(self, wanted: int = 3) -> str:
        """The options that take such images into a run of `wanted` channels."""
        limits = f' --data.range "{written(self.limits)}"' * bool(self.limits)
        if not self.channels:
            return limits.strip()
        bands = [*range(1, wanted + 1)]
        may_choose = wanted in OF_PICTURES and wanted < self.channels  # else some are no arrays
        some = f', or --data.bands "{bands}"{limits} for some of them' * may_choose
        every = "; --data.range auto measures each of them" * bool(limits)
        return f"--data.channels {self.channels}{limits}{some}{every}"


def measured(index: Index, channels: int = 3, bands: tuple[int, ...] = ()) -> Measured | None:
    """The range of a seeded sample, or that of each channel: of `bands`, and of multispectral
    images.

    None if most of the first images have these channels, and none is deep.
    """
    count = min(len(index), _NUM_MEASURED)
    ids = np.random.default_rng(0).choice(len(index), count, replace=False)
    by_channel = bool(bands) or channels not in OF_PICTURES
    counts, found = Counter[int](), list[NDArray[Any]]()
    for some in (ids[:_NUM_LOOKS], ids[_NUM_LOOKS:]):
        if counts and not found:
            break
        for image, values in _opened(index, np.sort(some), bands):
            is_any = isinstance(image, Image.Image) and not by_channel
            counts[channels if is_any else num_channels(image)] += 1
            if values is not None:
                found.append(_sampled(values, by_channel=by_channel))
    usual = counts.most_common(1)[0][0] if counts else channels
    is_taken = usual == channels or {usual, channels} == {*OF_PICTURES}
    if is_taken and not found:
        return None
    if not is_taken:
        found, by_channel = [values.reshape(-1, 1) for values in found], False
    limits = _limits(found, index.root) if found else ()
    each = limits if by_channel or not limits else limits[0]
    return Measured(index.root, len(found), counts.total(), each, None if is_taken else usual)


def _opened(
    index: Index, ids: Ids, bands: tuple[int, ...]
) -> Iterator[tuple[Image.Image | Bands, NDArray[Any] | None]]:
    """The images that open, and the values of those of more than 8 bits a channel."""
    with suppress(DataError):  # training reports it, and what does not open
        for content in read_ahead(Reader(index), ids):
            with suppress(Exception):
                assert isinstance(content, bytes)
                image = opened(content, bands)
                deep = deep_values(image) if is_deep(image) else None
                yield image, deep and deep[0]


def _limits(found: list[NDArray[Any]], location: str) -> Ranges:
    """The range of each column of the first one, and of others with as many."""
    alike = [values for values in found if values.shape[1] == found[0].shape[1]]
    lows, highs = np.nanpercentile(np.concatenate(alike), _PERCENTILES, axis=0).tolist()
    if lows == highs:
        raise DataError(
            "data.range-empty",
            "{location}: images of more than 8 bits whose values are all {value}: set data.range",
            location=location,
            value=lows[0],
        )
    return tuple(
        (float(f"{low:.6g}"), float(f"{high if low < high else low + 1:.6g}"))
        for low, high in zip(lows, highs, strict=True)
    )


def _sampled(values: NDArray[Any], *, by_channel: bool) -> NDArray[np.float64]:
    """float64[n, channels], or [n, 1], a seeded sample; NaN for what is not finite."""
    flat = values.reshape(-1, values.shape[2] if by_channel and values.ndim == 3 else 1)
    if len(flat) > _NUM_VALUES:
        flat = flat[np.random.default_rng(0).integers(0, len(flat), _NUM_VALUES)]
    some: NDArray[np.float64] = np.where(np.isfinite(flat), flat, np.nan).astype(np.float64)
    return some


def look(content: bytes, *, only_deep: bool = False) -> Look:
    """Looks at an encoded image. Almost any error if it does not decode.

    `only_deep`: without the range of one of 8 bits, which costs decoding it.
    """
    image = opened(content)
    if isinstance(image, Bands):
        pixels = image.values()
        return Look(pixels.min().item(), pixels.max().item(), is_deep(image), 1)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError("implausibly large")
    kind, has_depth, frames = str(image.format), is_deep(image), getattr(image, "n_frames", 1)
    if only_deep and not has_depth:  # each photograph of a phone may have another one, a preview
        return Look(0, 255, False, 1 if kind == "MPO" else frames, kind=kind)
    image.draft("RGB", (image.width // 8, image.height // 8))  # a JPEG is decoded smaller
    deep = deep_values(image) if has_depth else None
    pixels = np.asarray(as_rgb(image)) if deep is None else deep[0]
    low, high = pixels.min().item(), pixels.max().item()
    opaque = np.asarray(image.convert("RGBA"))[..., 3].min() if has_alpha(image) else 255
    shift = 0.0 if deep else _shift(image, pixels)
    return Look(low, high, has_depth, frames, bool(opaque < 255), shift, kind)


def _shift(image: Image.Image, pixels_HWC: NDArray[np.uint8]) -> float:
    """See Look.shift; 0 without a profile and a gamma, and for a damaged profile."""
    about = image.info
    with suppress(Exception):  # Pillow has no one error for a profile
        if profile := about.get("icc_profile"):
            stored = image if image.mode in ("L", "CMYK") else Image.fromarray(pixels_HWC)
            small, srgb = stored.resize(_SMALL), ImageCms.createProfile("sRGB")
            own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            shown = ImageCms.profileToProfile(small, own, srgb, outputMode="RGB")
            difference = np.asarray(shown).astype(float) - np.asarray(small.convert("RGB"))
            return float(np.abs(difference).mean())
        if "gamma" in about and "srgb" not in about:
            shares = pixels_HWC / 255
            return float(255 * np.abs(shares ** (1 / (_GAMMA * about["gamma"])) - shares).mean())
    return 0.0


def remarks(index: Index) -> list[tuple[Code, str]]:
    """Remarks about a few images of a data set, by code; none about what only some of them lack."""
    ids = np.unique(np.linspace(0, len(index) - 1, _NUM_LOOKS).astype(np.int64))
    looks, found = [*_looks(index, ids)], list[tuple[Code, str]]()
    of_8_bits = [each for _, each in looks if not each.is_deep]
    if of_8_bits:
        low, high = min(of_8_bits).low, max(each.high for each in of_8_bits)
        of_all = Look(low, high, False, 1)
        about = f"{index.root}: {len(of_8_bits)} of {len(looks)} images looked at have 8 bits"
        found += [(code, f"{about} and {text}") for code, text in of_all.remarks()]
    for code in ("frames", "profile", "transparent"):
        named = [
            (n, each.kind, what) for n, each in looks for of, what in each.remarks() if of == code
        ]
        if named:
            sample, _, what = named[0]
            kinds = Counter(kind for _, kind, _ in named)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            about = f"{len(named)} of {len(looks)} images looked at ({counts}), such as"
            found.append((code, f"{about} {index.locate(sample)[0]}: {what}"))
    return found


def _looks(index: Index, ids: Ids) -> Iterator[tuple[int, Look]]:
    """The images that decode, as many as there is time for."""
    give_up_at = time.monotonic() + _PATIENCE_S
    try:
        for sample, content in zip(ids, read_ahead(Reader(index), ids), strict=True):
            if isinstance(content, bytes):
                with suppress(Exception):  # training and `data verify --deep` report it
                    yield int(sample), look(content)
            if time.monotonic() > give_up_at:
                return
    except DataError:  # training reports it
        return
