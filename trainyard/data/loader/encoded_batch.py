"""Batches of encoded images for a GPU to decode: the contents of a loader's slots.

Each image has an equal span of the memory that would hold its pixels. A span begins with an entry
of type `ENTRY`, which has the crop and the kind of the data after it: a JPEG as stored; pixels of
the training size, for an image that a GPU cannot decode; or nothing, for an unreadable image.
"""

import io
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.data._native import own_decoder
from trainyard.data.arrays import Bytes, Floats, Ints
from trainyard.data.decode.crops import CropParameters, Interpolation
from trainyard.data.decode.decode import decode_batch, image_orientation
from trainyard.data.decode.rendering import PLAIN, Rendering
from trainyard.data.storage.encoded import EncodedSpans, contents_of
from trainyard.image_size import ImageSize, height_width, num_pixels

NOTHING, JPEG, PIXELS = range(3)
ENTRY = np.dtype(
    [
        ("kind", np.int64),
        ("length", np.int64),  # bytes of the data
        ("box", np.float64, 4),  # see Crops; this and the rest are for JPEGs only
        ("flip", np.bool_),
        ("resizes_first", np.bool_),
    ]
)
_COARSEST = 32  # largest reduction: above it, a GPU's resize kernel may fail


def side_of(mean_length: float, image_size: ImageSize) -> int:
    """The side of a square image whose pixels can hold an entry and all but the largest images."""
    most = max(2 * mean_length, 3 * num_pixels(image_size))
    return math.ceil(math.sqrt((ENTRY.itemsize + most) / 3))


def stretches(images_BHWC: Bytes) -> tuple[NDArray[np.void], Bytes]:
    """The entries of a batch, ENTRY[B], and the data after them, uint8[B, bytes]; no copies."""
    count, height, width, colours = images_BHWC.shape
    bytes_BN = images_BHWC.reshape(count, height * width * colours)
    return bytes_BN[:, : ENTRY.itemsize].view(ENTRY)[:, 0], bytes_BN[:, ENTRY.itemsize :]


def put_encoded(
    images: EncodedSpans | Sequence[bytes],
    draws: CropParameters,
    images_BHWC: Bytes,
    *,
    size: ImageSize,
    how: Interpolation,
    rendering: Rendering = PLAIN,
) -> dict[int, str]:
    """Fills the spans of some images, for results of `size`. Returns the positions of bad
    images, with the reasons, but for those that a GPU finds. Images that have to be turned upright
    are decoded here.
    """
    entries, rest_BN = stretches(images_BHWC)
    contents, bad = contents_of(images)
    sizes = _sizes(contents, rendering.exif)
    crops = draws(sizes)
    entries["kind"] = NOTHING
    others = []
    for position, content in enumerate(contents):
        box, length = crops.boxes[position], len(content)
        fits = length <= rest_BN.shape[1]
        if fits and _is_for_gpu(sizes[position], box, size, limit=rendering.max_pixels):
            entries[position] = (JPEG, length, box, crops.flips[position], crops.resizes_first)
            rest_BN[position, :length] = np.frombuffer(content, np.uint8)
        elif position not in bad:
            others.append(position)
    pixels_BHWC = np.empty((len(others), *height_width(size), 3), np.uint8)
    unreadable = decode_batch(
        [contents[position] for position in others],
        draws[np.array(others, np.int64)],
        pixels_BHWC,
        how,
        decoder=own_decoder(),
        rendering=rendering,
    )
    for number, position in enumerate(others):
        if number not in unreadable:
            entries["kind"][position] = PIXELS
            entries["length"][position] = length = pixels_BHWC[number].size
            rest_BN[position, :length] = pixels_BHWC[number].reshape(-1)
    return bad | {others[number]: reason for number, reason in unreadable.items()}


def _sizes(contents: Sequence[bytes], exif: bool) -> Ints:
    """Width and height of the JPEGs for a GPU, int[n, 2]; 1 x 1 for other contents."""
    sizes = np.array([_jpeg_size(content) for content in contents]).reshape(-1, 2)
    if exif:
        sizes[[image_orientation(content) != 1 for content in contents]] = 1
    return sizes


def _jpeg_size(content: bytes) -> tuple[int, int]:
    """Width and height of a complete grey or YCbCr JPEG; (1, 1) for other contents.

    Pillow rejects a JPEG that is cut short; a GPU may not.
    """
    if not (content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")):
        return 1, 1
    try:
        image = Image.open(io.BytesIO(content), formats=("JPEG",))
    except Exception:  # Pillow's plugins raise almost all kinds
        return 1, 1
    is_rgb = image.mode == "RGB" and image.info.get("adobe_transform") == 0
    return image.size if image.mode in ("L", "RGB") and not is_rgb else (1, 1)


def _is_for_gpu(size: Ints, box: Floats, image_size: ImageSize, *, limit: int) -> bool:
    reductions = (box[2:] - box[:2]) / height_width(image_size)[::-1]
    return 1 < size[0] * size[1] <= limit and bool(reductions.max() <= _COARSEST)
