"""Encoded images to put into files."""

import io

import numpy as np
from PIL import Image


def jpeg(size: int) -> bytes:
    """Noise, equal for equal sizes in pixels."""
    file = io.BytesIO()
    pixels = np.random.default_rng(size).integers(0, 256, (size, size, 3), np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()
