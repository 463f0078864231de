"""The decoder in C, called for one image, and JPEGs for it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.images import encode
from trainyard.data._native import core
from trainyard.data.storage.source import LocalFile

PATHS: tuple[str, ...] = core.paths if core is not None else ()
Pixels = NDArray[np.uint8]


def decode(
    content: bytes,
    box: tuple[float, ...],
    size: tuple[int, int],
    path: str,
    *,
    flip: bool = False,
    source: LocalFile | None = None,
    **options: Any,
) -> tuple[Pixels, int]:
    """A box of an image at a size (height, width) by one path, and its status.

    `source`: a file that begins with the content, to read it from.

    What lies before and behind the pixels in memory is not written to.
    """
    (height, width), channels = size, options.get("channels", 3)
    room = np.full((3, height * width * channels), 171, np.uint8)
    room[1] = 0
    out, status, zero = (
        room[1].reshape(1, height, width, channels),
        np.zeros(1, np.uint8),
        np.zeros(1, np.int64),
    )
    core.Decoder(path).decode(
        *([source or content], zero, zero, np.array([len(content)]), np.array([box], np.float64)),
        *(np.array([flip]), out, status),
        **(options | {"height": height, "width": width}),
    )
    assert (room[[0, 2]] == 171).all()
    return out[0], int(status[0])


def waves(height: int, width: int, noise: float = 25) -> Pixels:
    """Coloured waves and noise."""
    rng = np.random.default_rng(height * 1000 + width)
    y, x = np.mgrid[:height, :width]
    bands = np.stack([np.sin(x / (5 + c) + y / 9) for c in range(3)], axis=-1)
    pixels: Pixels = (120 + 60 * bands + rng.normal(0, noise, bands.shape)).clip(0, 255)
    return pixels.astype(np.uint8)


def jpeg(pixels: Pixels, mode: str = "RGB", **options: Any) -> bytes:
    return encode(Image.fromarray(pixels).convert(mode), **options)
