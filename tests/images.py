"""Encoded images to put into files."""

import io
from typing import Any

import numpy as np
from PIL import Image


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(size: int) -> bytes:
    """Noise, equal for equal sizes in pixels."""
    pixels = np.random.default_rng(size).integers(0, 256, (size, size, 3), np.uint8)
    return encode(Image.fromarray(pixels))
