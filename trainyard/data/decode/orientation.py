"""The orientation of photographs: cameras store pixels as they lie, and note how they were held.

`data.exif` turns images as Pillow's `ImageOps.exif_transpose` does. An upright image is the stored
one, transposed if its orientation is 5 to 8, then mirrored across, down or both. So a box of it is
decoded where it lies in the stored image, and only the resized pixels are turned.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TAG = 0x0112  # of EXIF
_TRANSPOSED, _ACROSS, _DOWN = (5, 6, 7, 8), (2, 3, 6, 7), (3, 4, 7, 8)
_SOS, _APP1 = 0xDA, 0xE1  # markers of a JPEG
_IN_PNG = re.compile(b"eXIf|Raw profile type exif|XML:com.adobe.xmp")

Orientations = NDArray[np.uint8]


def may_be_turned(content: bytes) -> bool:
    """False for JPEGs and PNGs without EXIF and XMP: Pillow takes long to find no orientation.

    It decodes all of a PNG to find its EXIF.
    """
    if content.startswith(b"\x89PNG"):
        return _IN_PNG.search(content) is not None
    at = 2
    while content.startswith(b"\xff\xd8") and content[at : at + 1] == b"\xff":
        marker = content[at + 1] if at + 1 < len(content) else _APP1
        is_plain = 0xC0 <= marker < 0xD0 or _SOS <= marker < 0xFF  # all others have no length
        if not is_plain or marker == _APP1:
            return True
        if marker == _SOS:
            return False
        at += 2 + int.from_bytes(content[at + 2 : at + 4])
    return True


def orientation_of(image: Image.Image) -> int:
    """The orientation of an opened image file, 1 to 8, as `exif_transpose` finds it."""
    if image.format == "TIFF":  # Pillow turns it as it reads one
        return 1
    try:
        found = image.getexif().get(TAG, 1)
    except Exception:  # Pillow raises almost anything on damaged EXIF; the image may be good
        return 1
    return int(found) if found in range(1, 9) else 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """An image, turned by its orientation."""
    if orientation in _TRANSPOSED:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    if orientation in _ACROSS:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if orientation in _DOWN else image


def upright_sizes(sizes: NDArray[np.int64], orientations: Orientations) -> NDArray[np.int64]:
    """Width and height of upright images, int[n, 2], from those of the stored ones."""
    is_transposed = np.isin(orientations, _TRANSPOSED)
    return np.where(is_transposed[:, None], sizes[:, ::-1], sizes)


def stored_boxes(
    boxes: NDArray[np.float64], sizes: NDArray[np.int64], orientations: Orientations
) -> NDArray[np.float64]:
    """The boxes (left, top, right, bottom) in stored images of boxes in upright ones of `sizes`."""
    left, top, right, bottom = boxes.T
    across, down = np.isin(orientations, _ACROSS), np.isin(orientations, _DOWN)
    width, height = sizes.T
    left, right = np.where(across, width - right, left), np.where(across, width - left, right)
    top, bottom = np.where(down, height - bottom, top), np.where(down, height - top, bottom)
    found = np.stack([left, top, right, bottom], axis=1)
    is_transposed = np.isin(orientations, _TRANSPOSED)
    return np.where(is_transposed[:, None], found[:, [1, 0, 3, 2]], found)


def turned(pixels_HWC: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Pixels as stored, turned upright; a view."""
    if orientation in _TRANSPOSED:
        pixels_HWC = pixels_HWC.transpose(1, 0, 2)
    if orientation in _ACROSS:
        pixels_HWC = pixels_HWC[:, ::-1]
    return pixels_HWC[::-1] if orientation in _DOWN else pixels_HWC
