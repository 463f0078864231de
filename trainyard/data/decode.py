"""Encoded images and boxes in, one filled uint8 batch out.

`decode_batch` is called once per slice of a batch. It takes the fastest path that can read each
image; `reference_image`, plain Pillow, says what the pixels ought to be.
"""

import io
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from trainyard.data.augment import Crops

Interpolation = Literal["bilinear", "bicubic"]
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

# What image data sets are made of.
_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")

MAX_PIXELS = 178_956_970  # Pillow's own limit: more is a decompression bomb, not a photograph


class BadImageError(Exception):
    """An image that cannot be decoded; the text is the reason."""


def decode_batch(
    encoded: Sequence[bytes],
    crop: Callable[[NDArray[np.int64]], Crops],
    out_BHWC: NDArray[np.uint8],
    interpolation: Interpolation,
) -> dict[int, str]:
    """Decode, crop, resize (antialiased) and flip each image into its place in `out_BHWC`.

    `crop` turns sizes (int[n, 2]: width, height) into boxes. Returns the positions that could not
    be decoded, with the reasons; their pixels are zero.
    """
    sizes, bad = _image_sizes(encoded)
    crops = crop(sizes)
    for position, content in enumerate(encoded):
        if position not in bad:
            try:
                image = _fast_image(content) or reference_image(content)
                if image.size != tuple(sizes[position]):
                    raise BadImageError("its header and its content differ in size")
                pixels = _resize(image, crops.boxes[position], out_BHWC.shape[1:3], interpolation)
                out_BHWC[position] = pixels[:, ::-1] if crops.flips[position] else pixels
            except BadImageError as error:
                bad[position] = str(error)
    out_BHWC[list(bad)] = 0
    return bad


def _image_sizes(encoded: Sequence[bytes]) -> tuple[NDArray[np.int64], dict[int, str]]:
    """Width and height of each image from its header alone, 1 x 1 and a reason for a bad one."""
    sizes = np.ones((len(encoded), 2), np.int64)
    bad = {}
    for position, content in enumerate(encoded):
        try:
            sizes[position] = _size(content)
        except BadImageError as error:
            bad[position] = str(error)
    return sizes, bad


def reference_image(content: bytes) -> Image.Image:
    """The whole image as RGB, by Pillow: grey, palette, CMYK and alpha are converted."""
    try:
        return open_lazily(content).convert("RGB")
    except Exception as error:  # Pillow's plugins raise almost anything on damaged input
        raise BadImageError(_reason(content, error)) from None


def open_lazily(content: bytes) -> Image.Image:
    """The image with its header read and its pixels not; raises almost anything if damaged."""
    # By name, not whatever Pillow knows: it would hand an EPS to Ghostscript to run.
    return Image.open(io.BytesIO(content), formats=_FORMATS)


def _fast_image(content: bytes) -> Image.Image | None:
    """The whole image by libjpeg-turbo, without the interpreter lock; None if it is not for it."""
    if _fast_size(content) is None:
        return None
    try:
        pixels = simplejpeg.decode_jpeg(content, "RGBX")
    except (ValueError, KeyError):  # damaged, or merely unusual: Pillow judges
        return None
    height, width = pixels.shape[:2]
    return Image.frombuffer("RGBX", (width, height), pixels, "raw", "RGBX", 0, 1)


def _fast_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG from which libjpeg-turbo makes the same RGB as Pillow, or None."""
    if not content.startswith(b"\xff\xd8"):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content, strict=False)
    except (ValueError, KeyError):  # KeyError for a subsampling that it has no name for
        return None
    return None if colours in ("CMYK", "YCCK") else (width, height)


def _resize(
    image: Image.Image,
    box: NDArray[np.float64],
    shape: tuple[int, ...],
    interpolation: Interpolation,
) -> NDArray[np.uint8]:
    """A box of the image as RGB pixels of `shape` (height, width), antialiased."""
    left, top, right, bottom = box.tolist()
    inside = (max(left, 0.0), max(top, 0.0), min(right, image.width), min(bottom, image.height))
    resized = image.resize((shape[1], shape[0]), _FILTERS[interpolation], box=inside)
    return np.asarray(resized)[:, :, :3]


def _size(content: bytes) -> tuple[int, int]:
    try:
        width, height = _fast_size(content) or open_lazily(content).size
    except Exception as error:
        raise BadImageError(_reason(content, error)) from None
    if not 0 < width * height <= MAX_PIXELS:
        raise BadImageError(f"{width} x {height} pixels are not believable")
    return width, height


def _reason(content: bytes, error: Exception) -> str:
    if not content:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return f"{type(error).__name__}: {error}"
