"""What training does not see of images: a range that 8 bits lose, pages after the first one.

Nothing fails on them, so a few images of a data set are looked at, and it is told.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from trainyard.data.decode.array_file import is_array, pixels_of_array
from trainyard.data.decode.decode import MAX_PIXELS, as_rgb, open_lazily
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader, read_ahead
from trainyard.data.sampler.plan import Ids
from trainyard.errors import DataError

Code = Literal["dark", "negative", "frames"]
_NUM_LOOKS = 32  # images of a data set
_PATIENCE_S = 2.0
_DARK = 32  # of 255; no image has so little, and a mask of classes has no more
_DEEP_DARK = 1 << 15  # of 65,535
_PNG_DEPTH = 24  # the byte of a PNG with its bits a channel
_BITS, _WHITE_IS = 258, 262  # tags of a TIFF
_WHITE_IS_ZERO = 0


class Look(NamedTuple):
    """What an image holds beyond the pixels that training sees."""

    low: int
    high: int
    """The lowest and highest value, of 65,535 if it is deep, else of 255."""
    is_deep: bool
    """True for channels of more than 8 bits, of which training takes the upper 8."""
    is_negative: bool
    """True if white is stored as 0, and not read so."""
    frames: int

    def remarks(self) -> Iterator[tuple[Code, str]]:
        """What is to be told about this image, or about all images that it sums up."""
        if self.high < (_DEEP_DARK if self.is_deep else _DARK):
            yield "dark", f"{self.values}: nearly black"
        if self.is_negative:
            yield "negative", "a TIFF of 16 bits whose white is 0, which is read as a negative"
        if self.frames > 1:
            yield "frames", f"{self.frames:,} pages or frames, of which training sees the first"

    @property
    def values(self) -> str:
        """The range of the values, and what training makes of it."""
        if not self.is_deep:
            return f"values from {self.low} to {self.high} of 255"
        seen = f"training takes the upper 8 bits, {self.low >> 8} to {self.high >> 8} of 255"
        return f"values from {self.low:,} to {self.high:,} of 65,535; {seen}"


def look(content: bytes, *, only_deep: bool = False) -> Look:
    """Looks at an encoded image. Almost any error if it does not decode.

    `only_deep`: without the range of one of 8 bits, which costs decoding it.
    """
    if is_array(content):
        pixels = pixels_of_array(content)
        return Look(int(pixels.min()), int(pixels.max()), False, False, 1)
    image = open_lazily(content)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError("implausibly large")
    tags: dict[int, Any] = getattr(image, "tag_v2", {})
    bits = content[_PNG_DEPTH] if image.format == "PNG" else max(tags.get(_BITS, (8,)))
    is_deep = bits > 8 or image.mode.startswith("I")
    is_negative = image.mode.startswith("I;16") and tags.get(_WHITE_IS) == _WHITE_IS_ZERO
    # A second picture in a JPEG is a preview.
    frames = 1 if image.format in ("JPEG", "MPO") else getattr(image, "n_frames", 1)
    if only_deep and not is_deep:
        return Look(0, 255, False, is_negative, frames)
    image.draft("RGB", (image.width // 8, image.height // 8))  # a JPEG is decoded smaller
    low, high = _extrema(image)
    if is_deep and not image.mode.startswith("I"):  # Pillow has the upper 8 bits alone
        low, high = low << 8, high << 8 | 255
    return Look(low, high, is_deep, is_negative, frames)


def _extrema(image: Image.Image) -> tuple[int, int]:
    pixels = np.asarray(image if image.mode.startswith("I") else as_rgb(image))
    return int(pixels.min()), int(pixels.max())


def remarks(index: Index) -> list[tuple[Code, str]]:
    """Remarks about a few images of a data set, by code; none about what only some of them lack."""
    ids = np.unique(np.linspace(0, len(index) - 1, _NUM_LOOKS).astype(np.int64))
    looks, found = [*_looks(index, ids)], list[tuple[Code, str]]()
    for name, is_deep in (("8", False), ("16", True)):
        of_kind = [each for _, each in looks if each.is_deep == is_deep]
        if of_kind:
            low, high = min(of_kind).low, max(each.high for each in of_kind)
            of_all = Look(low, high, is_deep, False, 1)
            about = (
                f"{index.root}: {len(of_kind)} of {len(looks)} images looked at have {name} bits"
            )
            found += [(code, f"{about} and {text}") for code, text in of_all.remarks()]
    for code in ("negative", "frames"):
        named = [(n, what) for n, each in looks for kind, what in each.remarks() if kind == code]
        if named:
            sample, what = named[0]
            about = f"{len(named)} of {len(looks)} images looked at, such as"
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
