"""How the pixels of an image file become 8 bits a channel: the keys of a recipe, and the mapping.

Both sides of a loader process import this module: pydantic and torch stay out.
"""

import io
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile

Range = tuple[float, float]
"""The values that become 0 and 255."""
Colour = tuple[int, int, int]
BACKGROUND: Colour = (124, 116, 104)  # ImageNet's mean
MAX_PIXELS = 178_956_970  # Pillow's own limit; larger images are taken for decompression bombs

# The order of bytes whose upper one is the other's lower one; N is that of this machine.
_SWAPPED = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
_BITS, _PLANES = 258, 284  # tags of a TIFF


class Rendering(NamedTuple):
    """As in DataConfig; plain data."""

    exif: bool = False
    range: Range | None = None
    background: Colour = BACKGROUND
    max_pixels: int = MAX_PIXELS


PLAIN = Rendering()


def written(limits: Range) -> str:
    """A range as in a recipe: "[0, 4095]"."""
    return f"[{limits[0]:g}, {limits[1]:g}]"


def mapped(values: NDArray[Any], limits: Range) -> NDArray[np.uint8]:
    """`values` of any shape from [low, high] to 0 to 255, linearly.

    Values outside are clipped, halves go to the even number, and NaN is 0.
    """
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        found: NDArray[np.uint8] = _table(limits)[values]
        return found
    return _mapped(values, limits)


@lru_cache(maxsize=4)
def _table(limits: Range) -> NDArray[np.uint8]:
    return _mapped(np.arange(1 << 16), limits)


def _mapped(values: NDArray[Any], limits: Range) -> NDArray[np.uint8]:
    low, high = limits
    scaled = (np.clip(values.astype(np.float64), low, high) - low) * (255 / (high - low))
    return np.rint(np.nan_to_num(scaled)).astype(np.uint8)


def is_deep(image: Image.Image) -> bool:
    """True for more than 8 bits a channel, of an image that is opened and not loaded."""
    if image.mode.startswith(("I", "F")):
        return True
    tags: dict[int, Any] = getattr(image, "tag_v2", {})
    if max(tags.get(_BITS, (8,))) > 8:
        return True
    return any(
        ";16" in _raw_mode(arguments) or (codec == "ppm" and arguments[-1] > 255)
        for codec, _, _, arguments in getattr(image, "tile", ())
    )


def deep_values(image: Image.Image) -> tuple[NDArray[Any], NDArray[np.uint8] | None] | None:
    """The values of a deep image, [height, width] or [height, width, 3], and its opacity in 8 bits.

    None if Pillow has no more than 8 bits of it.
    """
    if image.mode.startswith(("I", "F")):
        return np.asarray(image), None
    if not isinstance(image, ImageFile) or not image.tile:
        return None
    mode = _raw_mode(image.tile[0][3])
    base, _, order = mode.partition(";16")
    is_in_planes = getattr(image, "tag_v2", {}).get(_PLANES, 1) != 1
    if base not in ("RGB", "RGBA", "LA") or order not in _SWAPPED or is_in_planes:
        return None
    assert image.fp is not None  # until it is loaded
    image.fp.seek(0)
    content = image.fp.read()
    if base == "LA":  # the bytes of both channels, upper and lower
        pixels = _raw_pixels(content, image.format, "RGBA").astype(np.uint16)
        upper, lower = (0, 1) if order == "B" else (1, 0)
        return pixels[..., upper] << 8 | pixels[..., lower], pixels[..., 2 + upper].astype(np.uint8)
    high = _raw_pixels(content, image.format, mode)
    low = _raw_pixels(content, image.format, f"{base};16{_SWAPPED[order]}")
    values = high[..., :3].astype(np.uint16) << 8 | low[..., :3]
    return values, high[..., 3] if base == "RGBA" else None


def _raw_pixels(content: bytes, kind: str | None, raw_mode: str) -> NDArray[np.uint8]:
    """The pixels of a file whose bytes Pillow takes for those of `raw_mode`."""
    image = Image.open(io.BytesIO(content), formats=[str(kind)])
    tiles: Any = [
        (*where, (raw_mode, *arguments[1:]) if isinstance(arguments, tuple) else raw_mode)
        for *where, arguments in image.tile
    ]
    image.tile = tiles
    return np.asarray(image)


def _raw_mode(arguments: Any) -> str:
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""
