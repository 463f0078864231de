"""Converts an image for a shard: recoded, packed, or unpacked from a packed record."""

from dataclasses import dataclass

import numpy as np

from trainyard.data._native import is_built
from trainyard.data.decode.packed_record import has_pixels, image_file, is_record, record_of_pixels
from trainyard.datasets.pack.recode import Recode, ShortSide
from trainyard.datasets.pack.shards import PackOptions
from trainyard.errors import DataError
from trainyard.installation import NEEDS_EXTENSION


@dataclass(frozen=True)
class SampleEncoder:
    """The conversion of each image by the options of a pack."""

    recode: Recode | None
    packs: bool  # True: into records
    pixels: bool

    @property
    def keeps_files(self) -> bool:
        """True if image files are not changed."""
        return self.recode is None and not self.packs

    def file_of(self, content: bytes) -> bytes:
        """The image file of a source's content. BadImageError for a damaged record."""
        from trainyard.data.decode.decode import BadImageError

        try:
            return image_file(content)
        except ValueError as error:
            raise BadImageError(str(error)) from None

    def __call__(self, content: bytes) -> bytes:
        """The bytes to store. BadImageError if decoding is necessary and fails."""
        if self.recode is None and self._is_as_wished(content):
            return content
        image = self.file_of(content)
        if self.pixels:
            return _of_pixels(image, self.recode)
        if self.recode is not None:
            image = self.recode(image)
        return _of_coefficients(image) if self.packs else image

    def _is_as_wished(self, content: bytes) -> bool:
        if not is_record(content):
            return not self.packs
        return self.packs and has_pixels(content) == self.pixels


def storing(options: PackOptions) -> SampleEncoder:
    """The conversion by `options`. DataError if it needs the missing C extension."""
    packs = options.format == "packed"
    if packs and not options.pixels and not is_built():
        raise DataError("data.needs-c-extension", name="packing coefficients", hint=NEEDS_EXTENSION)
    return SampleEncoder(options.recode, packs, options.pixels)


def _of_coefficients(image: bytes) -> bytes:
    """A record of coefficients; a file that a record cannot represent is not changed."""
    from trainyard.data._native import own_decoder

    decoder = own_decoder()
    assert decoder is not None  # checked by `storing`
    return decoder.pack(image) or image


def _of_pixels(image: bytes, recode: Recode | None) -> bytes:
    """A record of upright pixels, as it holds no EXIF; scaled without an intermediate JPEG."""
    from trainyard.data.decode.decode import (
        BadImageError,
        image_orientation,
        is_grey,
        reference_image,
    )
    from trainyard.data.decode.orientation import upright

    stored = reference_image(image, 1 if is_grey(image) else 3)
    pixels = upright(stored, image_orientation(image))
    if isinstance(recode, ShortSide):
        pixels = recode.scaled(pixels)
    try:
        return record_of_pixels(np.asarray(pixels))
    except ValueError as error:
        raise BadImageError(str(error)) from None
