"""Encoded images to put into files."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(size: int) -> bytes:
    """Noise, equal for equal sizes in pixels."""
    pixels = np.random.default_rng(size).integers(0, 256, (size, size, 3), np.uint8)
    return encode(Image.fromarray(pixels))


def png(width: int, height: int, depth: int, colour_type: int, data: bytes | None) -> bytes:
    """A PNG of any depth, any size in its header, and this stream of pixels, if any."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    head = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = b"" if data is None else chunk(b"IDAT", data)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def deep_png(pixels: NDArray[np.uint16], colour_type: int) -> bytes:
    """A PNG of 16 bits: Pillow writes those of grey only."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return png(pixels.shape[1], pixels.shape[0], 16, colour_type, zlib.compress(rows))


P3 = ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407))
"""XYZ of Display P3's red, green and blue under D50, by Apple's profile."""


def icc(primaries: tuple[tuple[float, float, float], ...] = ()) -> bytes:
    """The ICC profile of sRGB, or one of other primaries with its curve."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    content = bytearray(srgb.tobytes())
    for name, values in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=False):
        (start,) = struct.unpack_from(">I", content, content.index(name) + 4)
        struct.pack_into(">3i", content, start + 8, *(round(65536 * one) for one in values))
    return bytes(content)
