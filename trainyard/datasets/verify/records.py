"""Checks that a packed record equals its original JPEG, to the coefficient and the pixel."""

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import core, own_decoder
from trainyard.data.decode.crops import Crops
from trainyard.data.decode.decode import native_pixels, native_sizes, reference_image
from trainyard.data.decode.packed_record import has_pixels
from trainyard.data.storage.encoded import in_memory

_GREY_LEVELS = 2  # libjpeg rounds chroma once more before converting colours


def why_unlike(record: bytes) -> str | None:
    """The difference between a record and the JPEG unpacked from it; None if there is none.

    The JPEG, packed again, must give the same record. The extension must decode the record and the
    JPEG to the same pixels, and libjpeg to the same within rounding. Records of pixels have no
    other form to compare with, and without the extension nothing is compared. The libraries must be
    able to decode the JPEG.
    """
    decoder = own_decoder()
    if decoder is None or has_pixels(record):
        return None
    jpeg = decoder.unpack(record)
    if jpeg is None:
        return "a damaged packed record"
    if decoder.pack(jpeg) != record:
        return "its coefficients are not those of the JPEG that it gives back"
    expected = np.asarray(reference_image(jpeg))
    found, again = (_decoded(decoder, content) for content in (record, jpeg))
    if found is None or again is None or not np.array_equal(found, again):
        return "its pixels are not those of the JPEG that it gives back"
    difference = int(np.abs(found.astype(np.int16) - expected).max())
    if difference > _GREY_LEVELS:
        return f"its pixels are up to {difference} grey levels from what libjpeg makes of its JPEG"
    return None


def _decoded(decoder: "core.Decoder", content: bytes) -> NDArray[np.uint8] | None:
    """All pixels (height, width, 3), by the extension; None if it fails."""
    stored = in_memory([content])
    sizes, status = native_sizes(stored, decoder)
    width, height = sizes[0].tolist()
    pixels_BHWC = np.empty((1, height, width, 3), np.uint8)
    whole = Crops(np.array([[0.0, 0.0, width, height]]), np.zeros(1, np.bool_))
    native_pixels(decoder, stored, whole, pixels_BHWC, status=status)
    return None if status[0] else pixels_BHWC[0]
