"""DICOM files for Pillow, by pydicom, which is imported once one is opened."""

from typing import Any

import numpy as np
from PIL import Image, ImageFile

_MAGIC_AT, _MAGIC = 128, b"DICM"


def is_dicom(content: bytes) -> bool:
    """True if bytes begin like a DICOM file."""
    return content[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] == _MAGIC


class DicomFile(ImageFile.ImageFile):
    """The first frame: L, RGB, or F for grey of other numbers than 0 to 255.

    F has the values by slope and intercept, in Hounsfield units say. MONOCHROME1, whose lowest
    value is white, is inverted: the lowest value that its bits can store becomes the highest.
    """

    format = "DICOM"

    def _open(self) -> None:
        from pydicom import dcmread

        assert self.fp is not None
        if not is_dicom(self.fp.read(_MAGIC_AT + len(_MAGIC))):
            raise SyntaxError("no DICOM file")
        self.fp.seek(0)
        self.data: Any = dcmread(self.fp)
        self._size = self.data.Columns, self.data.Rows
        self.n_frames = int(self.data.get("NumberOfFrames") or 1)
        is_grey, is_plain = self.data.SamplesPerPixel == 1, self._line == (1, 0)
        in_8_bits = self.data.BitsStored == 8 and self.data.PixelRepresentation == 0
        if not (is_grey or in_8_bits):
            raise ValueError(f"a DICOM file of colours of {self.data.BitsStored} bits")
        self._mode = ("L" if in_8_bits and is_plain else "F") if is_grey else "RGB"

    @property
    def _line(self) -> tuple[float, float]:
        """Slope and intercept."""
        slope, intercept = self.data.get("RescaleSlope"), self.data.get("RescaleIntercept")
        return float(1 if slope is None else slope), float(intercept or 0)

    def load(self) -> Any:
        """Decodes the frame; almost any error if pydicom cannot."""
        if self.data is not None:
            self.im = Image.fromarray(self._pixels()).im
            self.data = None
        return super().load()

    def _pixels(self) -> Any:
        from pydicom.pixels import pixel_array

        values = pixel_array(self.data, index=0)
        if self.data.PhotometricInterpretation == "MONOCHROME1":
            bits, is_signed = self.data.BitsStored, self.data.PixelRepresentation
            values = (-1 if is_signed else (1 << bits) - 1) - values.astype(np.int64)
        if self.mode != "F":
            return values.astype(np.uint8)
        slope, intercept = self._line
        return (values * slope + intercept).astype(np.float32)


def register() -> None:
    """Lets Pillow open DICOM files."""
    Image.register_open(DicomFile.format, DicomFile)
