"""How the pixels of an image file become 8 bits a channel: the keys of a recipe, and the mapping.

Both sides of a loader process import this module: pydantic and torch stay out.
"""

import io
import sys
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile

from trainyard.data.decode.array_file import Bands

Range = tuple[float, float]
"""The values that become 0 and 255."""
Ranges = tuple[Range, ...]
"""A range for each channel."""
Limits = Range | Ranges | Literal["window"]
"""window: the range that each DICOM file has as its own, its window."""
Colour = tuple[int, int, int]
BACKGROUND: Colour = (124, 116, 104)  # ImageNet's mean
MAX_PIXELS = 178_956_970  # Pillow's own limit; larger images are taken for decompression bombs

# The order of bytes whose upper one is the other's lower one; N is that of this machine.
_SWAPPED = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
# Tags of a TIFF, and values of theirs.
_BITS, _WHITE_IS, _PLANES, _NUMBERS = 258, 262, 284, 339
_WHITE_IS_ZERO, _APART, _UNSIGNED, _SIGNED = 0, 2, 1, 2
_OF_5_BITS = "BGR;16"  # 16 bits are a pixel of a BMP
_KEY_FACTORS = {"L;2": 85, "L;4": 17}  # of grey in less than 8 bits


class Rendering(NamedTuple):
    """As in DataConfig; plain data."""

    exif: bool = False
    range: Limits | None = None
    background: Colour = BACKGROUND
    max_pixels: int = MAX_PIXELS
    bands: tuple[int, ...] = ()


PLAIN = Rendering()


def by_channel(limits: Range | Ranges) -> Ranges:
    """The ranges of each channel; none for one range of all."""
    return tuple(one for one in limits if isinstance(one, tuple))


def written(limits: Limits) -> str:
    """A range as in a recipe, "[0, 4095]" or "[[0, 4095], [0, 255]]", or the window in words."""
    if limits == "window":
        return "the window of each file"
    each = (written(one) if isinstance(one, tuple) else f"{one:g}" for one in limits)
    return f"[{', '.join(each)}]"


def mapped(values: NDArray[Any], limits: Range | Ranges) -> NDArray[np.uint8]:
    """`values` of any shape from [low, high] to 0 to 255, linearly.

    Values outside are clipped, halves go to the even number, and NaN is 0. Ranges are those of the
    last axis; ValueError for another number of them.
    """
    if ranges := by_channel(limits):
        parts = zip(np.moveaxis(values, -1, 0), ranges, strict=True)
        return np.stack([mapped(part, one) for part, one in parts], axis=-1)
    low, high = (one for one in limits if not isinstance(one, tuple))
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        found: NDArray[np.uint8] = _table((low, high))[values]
        return found
    return _mapped(values, (low, high))


@lru_cache(maxsize=32)
def _table(limits: Range) -> NDArray[np.uint8]:
    return _mapped(np.arange(1 << 16), limits)


def _mapped(values: NDArray[Any], limits: Range) -> NDArray[np.uint8]:
    low, high = limits
    scaled = (np.clip(values.astype(np.float64), low, high) - low) * (255 / (high - low))
    return np.rint(np.nan_to_num(scaled)).astype(np.uint8)


def is_deep(image: Image.Image | Bands) -> bool:
    """True for other numbers than 0 to 255 in an image that is opened and not loaded."""
    if isinstance(image, Bands):
        return image.dtype != np.uint8
    if image.mode.startswith(("I", "F")) or _is_signed(image):
        return True
    if max(_tag(image, _BITS, (8,))) > 8:
        return True
    return any(
        ";16" in _raw_mode(arguments).removeprefix(_OF_5_BITS)
        or (codec == "ppm" and arguments[-1] > 255)
        for codec, _, _, arguments in getattr(image, "tile", ())
    )


def _tag(image: Image.Image, tag: int, usual: Any) -> Any:
    tags: dict[int, Any] = getattr(image, "tag_v2", {})
    return tags.get(tag, usual)


def _is_signed(image: Image.Image) -> bool:
    """True for a TIFF of signed 8 bits, which Pillow takes for unsigned ones."""
    bits, kinds = _tag(image, _BITS, (8,)), _tag(image, _NUMBERS, (_UNSIGNED,))
    return max(bits) <= 8 and _SIGNED in kinds


def has_upper_bits(image: Image.Image) -> bool:
    """False for a deep image of which Pillow gives no picture in 8 bits."""
    is_apart = _tag(image, _PLANES, 1) == _APART and image.mode in ("RGB", "RGBA")
    codecs = [tile[0] for tile in getattr(image, "tile", ())]
    return not (_is_signed(image) or (is_apart and "raw" in codecs))


def deep_values(
    image: Image.Image | Bands,
) -> tuple[NDArray[Any], NDArray[np.uint8] | None] | None:
    """The values of a deep image, [height, width] or of channels, and its opacity in 8 bits.

    None if Pillow does not tell them.
    """
    if isinstance(image, Bands):
        return image.values(), None
    key = image.info.get("transparency")  # of a PNG: the value of transparent pixels
    found = _grey_values(image) or _colour_values(image)
    if found is None or found[1] is not None or key is None:
        return found
    is_hidden = found[0] == key
    is_hidden = is_hidden.all(axis=2) if is_hidden.ndim == 3 else is_hidden
    return found[0], np.where(is_hidden, 0, 255).astype(np.uint8)


def _grey_values(image: Image.Image) -> tuple[NDArray[Any], None] | None:
    if _is_signed(image):
        return np.asarray(image).view(np.int8), None
    if not image.mode.startswith(("I", "F")):
        return None
    values = np.asarray(image)
    bits = _tag(image, _BITS, (0,))[0]
    if image.mode == "I" and bits == 32 and _tag(image, _NUMBERS, (_UNSIGNED,))[0] == _UNSIGNED:
        values = values.view(np.uint32)
    if image.mode.startswith("I;16") and _tag(image, _WHITE_IS, None) == _WHITE_IS_ZERO:
        values = ((1 << bits) - 1) - values
    return values, None


def _colour_values(image: Image.Image) -> tuple[NDArray[Any], NDArray[np.uint8] | None] | None:
    if not isinstance(image, ImageFile) or not image.tile:
        return None
    mode = _raw_mode(image.tile[0][3])
    base, _, order = mode.partition(";16")
    is_in_planes = _tag(image, _PLANES, 1) == _APART
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
    tiles = list[Any]()
    for tile in image.tile:
        *where, arguments = tile
        own = (raw_mode, *arguments[1:]) if isinstance(arguments, tuple) else raw_mode
        tiles.append(getattr(type(tile), "_make", tuple)((*where, own)))  # Pillow 10 has tuples
    image.tile = tiles
    return np.asarray(image)


def scale_key(image: Image.Image) -> None:
    """Scales the grey value of transparent pixels as Pillow scales grey of less than 8 bits."""
    key, tiles = image.info.get("transparency"), getattr(image, "tile", ())
    if isinstance(key, int) and tiles:
        image.info["transparency"] = key * _KEY_FACTORS.get(_raw_mode(tiles[0][3]), 1)


def _raw_mode(arguments: Any) -> str:
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""
