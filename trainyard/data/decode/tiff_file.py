"""TIFFs that are no pictures to Pillow, by tifffile: many bands, doubles, colours of floats."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.decode.array_file import Bands
from trainyard.data.decode.orientation import TAG, turned
from trainyard.installation import install_hint

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""The first bytes of TIFFs and BigTIFFs."""


def open_tiff(content: bytes) -> Bands:
    """The first page, upright as Pillow has it.

    Almost any error if it is damaged, has no numbers, and without tifffile.
    """
    try:
        import tifffile
    except ImportError:
        hint = install_hint("tiff")
        raise ValueError(
            f"a TIFF of many bands, or of other numbers than Pillow reads: {hint} makes it readable"
        ) from None
    page: Any = tifffile.TiffFile(io.BytesIO(content)).pages[0]
    if page.axes not in ("YX", "YXS", "SYX"):
        raise ValueError(f"a TIFF whose first page has the axes {page.axes}")
    if page.dtype is None or page.dtype.kind not in "uif":
        raise ValueError(f"a TIFF of {page.dtype}: store integers or floats")
    orientation = page.tags.valueof(TAG, default=1)

    def values() -> NDArray[Any]:
        pixels = np.atleast_3d(page.asarray())
        return turned(np.moveaxis(pixels, 0, 2) if page.axes == "SYX" else pixels, orientation)

    size = page.imagewidth, page.imagelength
    upright_size = size[::-1] if orientation > 4 else size
    return Bands(upright_size, page.samplesperpixel, page.dtype, values)
