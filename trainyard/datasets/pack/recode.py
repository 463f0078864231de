"""Optional re-encoding of images that go into shards; without it, bytes are not changed."""

import io
from dataclasses import dataclass

from PIL import Image

from trainyard.data.decode.array_file import MAGIC
from trainyard.data.decode.decode import image_orientation, reference_image
from trainyard.data.decode.dicom import is_dicom
from trainyard.data.decode.orientation import TAG
from trainyard.data.formats.scan import ARRAY_SUFFIX, IMAGE_FORMATS
from trainyard.errors import DataError

NOT_AN_IMAGE = "not an image"
"""The oddity of content that no image begins with."""
_START = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"P5": "PGM",
    b"P6": "PPM",
    b"\0\0\0\x0cjP  ": "JPEG2000",
    b"\xff\x4f\xff\x51": "JPEG2000",
    MAGIC: "NPY",
}
_HEIF = (b"heic", b"heix", b"hevc", b"mif1", b"msf1")  # brands of its files
_SUFFIXES = {kind: endings[0] for kind, endings in IMAGE_FORMATS.items()} | {
    "PGM": ".pgm",
    "NPY": ARRAY_SUFFIX,
}


@dataclass(frozen=True)
class ShortSide:
    """Scales the short side to `pixels`, antialiased; smaller images are not changed."""

    pixels: int
    quality: int
    """Quality of the JPEG, 1 to 100, with chroma at half resolution (4:2:0)."""

    def __post_init__(self) -> None:
        _check(self.pixels, self.quality)

    def __call__(self, image: bytes) -> bytes:
        """The new file. BadImageError (trainyard.data.decode.decode) if the old one is damaged."""
        source = reference_image(image)
        scaled = self.scaled(source)
        return image if scaled is source else _jpeg(scaled, self.quality, of=image)

    def scaled(self, source: Image.Image) -> Image.Image:
        """The scaled image, or `source` itself if it is small enough."""
        width, height = source.size
        short = min(width, height)
        if short <= self.pixels:
            return source
        size = (round(width * self.pixels / short), round(height * self.pixels / short))
        return source.resize(size, Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Repair:
    """Turns other formats, and CMYK JPEGs, into RGB JPEGs; other JPEGs are not changed."""

    quality: int = 100
    """Quality of the JPEG, with chroma at full resolution (4:4:4)."""

    def __post_init__(self) -> None:
        _check(1, self.quality)

    def __call__(self, image: bytes) -> bytes:
        if is_plain_jpeg(image):
            return image
        return _jpeg(reference_image(image), self.quality, subsampling="4:4:4", of=image)


Recode = ShortSide | Repair
"""Frozen dataclasses; their fields are stored in the manifest."""


def suffix_of(image: bytes) -> str:
    """The suffix by the file type of the bytes; ".jpg" for unknown types."""
    return _SUFFIXES.get(_kind(image), ".jpg")


def is_plain_jpeg(image: bytes) -> bool:
    """True for a JPEG in grey or colour, not CMYK, which every trainer can read."""
    return image.startswith(b"\xff\xd8\xff") and _jpeg_components(image) != 4


def oddity(image: bytes, name: str) -> str | None:
    """The oddity of a file called `name`, such as "PNG in disguise" or "CMYK"; None if usual."""
    kind = _kind(image)
    if kind == "JPEG":
        return None if is_plain_jpeg(image) else "CMYK"
    if not kind:
        return NOT_AN_IMAGE
    return f"{kind} in disguise" if name.lower().endswith((".jpg", ".jpeg")) else None


def _jpeg_components(image: bytes) -> int:
    """1 for grey, 3 for colour, 4 for CMYK; 0 if no frame header is found."""
    position = 2
    while position + 10 <= len(image) and image[position] == 0xFF:
        marker = image[position + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a start of frame
            return image[position + 9]
        if marker == 0xFF:  # padding
            position += 1
            continue
        position += 2 + int.from_bytes(image[position + 2 : position + 4], "big")
    return 0


def _kind(image: bytes) -> str:
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "WEBP"
    if image[4:8] == b"ftyp":
        return "AVIF" if b"avif" in image[8:32] else "HEIF" if image[8:12] in _HEIF else ""
    if is_dicom(image):
        return "DICOM"
    return next((kind for start, kind in _START.items() if image.startswith(start)), "")


def _jpeg(
    image: Image.Image, quality: int, subsampling: str = "4:2:0", of: bytes | None = None
) -> bytes:
    """A JPEG, with the orientation in the file `of`, if that is not 1."""
    out, exif = io.BytesIO(), Image.Exif()
    orientation = 1 if of is None else image_orientation(of)
    if orientation != 1:
        exif[TAG] = orientation
    image.save(out, "JPEG", quality=quality, subsampling=subsampling, exif=exif)
    return out.getvalue()


def _check(pixels: int, quality: int) -> None:
    if not 1 <= pixels <= 65_500:  # the most that a JPEG holds
        raise DataError(
            "pack.size-out-of-range", "a side of {size} pixels is not possible", size=pixels
        )
    if not 1 <= quality <= 100:
        raise DataError(
            "pack.quality-out-of-range",
            "a JPEG quality of {value} is not possible; give 1 to 100",
            value=quality,
        )
