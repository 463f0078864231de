"""TIFFs that are no pictures to Pillow, by tifffile: many bands, doubles, colours of floats."""

import io
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from trainyard.data.decode.orientation import TAG, turned
from trainyard.installation import install_hint

_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BANDS, _BITS = 277, 258  # tags


def is_tiff(content: bytes) -> bool:
    """True if bytes begin like a TIFF."""
    return content.startswith(_STARTS)


def is_picture(content: bytes) -> bool:
    """True if Pillow opens a TIFF."""
    with suppress(Exception):  # its tags are damaged
        Image.open(io.BytesIO(content), formats=["TIFF"])
        return True
    return False


def tiff_shape(content: bytes) -> tuple[int, int, int]:
    """Height, width and bands of the first page. Almost any error if it is damaged."""
    page = _first_page(content)
    sizes = dict(zip(page.axes, page.shape, strict=True))
    sides = sizes["Y"], sizes["X"]
    height, width = sides[::-1] if _orientation(page) > 4 else sides
    return height, width, sizes.get("S", 1)


def tiff_pixels(content: bytes) -> NDArray[Any]:
    """The first page, [height, width, bands], upright as Pillow has it. Errors as of tiff_shape."""
    page = _first_page(content)
    pixels: NDArray[Any] = page.asarray()
    if pixels.dtype.kind not in "uif":
        raise ValueError(f"a TIFF of {pixels.dtype}: store integers or floats")
    bands_at = page.axes.find("S")
    pixels_HWC = pixels[..., None] if bands_at < 0 else np.moveaxis(pixels, bands_at, 2)
    return turned(pixels_HWC, _orientation(page))


def _orientation(page: Any) -> int:
    found: int = page.tags.valueof(TAG, default=1)
    return found


def _first_page(content: bytes) -> Any:
    """tifffile's first page, whose axes are YX, and maybe S for the bands."""
    try:
        import tifffile
    except ImportError:
        raise ValueError(
            f"{_described(content)}: {install_hint('tiff')} makes it readable"
        ) from None
    page: Any = tifffile.TiffFile(io.BytesIO(content)).pages[0]
    if page.axes not in ("YX", "YXS", "SYX"):
        raise ValueError(f"a TIFF whose first page has the axes {page.axes}")
    return page


def _described(content: bytes) -> str:
    file, bands, bits = io.BytesIO(content), 1, "1"
    with suppress(Exception):
        tags = ImageFileDirectory_v2(file.read(16 if b"+" in content[:4] else 8))
        file.seek(tags.next)
        tags.load(file)
        bands, bits = tags.get(_BANDS, 1), "/".join(map(str, sorted({*tags.get(_BITS, (1,))})))
    return f"a TIFF of {bands} bands of {bits} bits"
