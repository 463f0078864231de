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
    `info["window"]` are the values that its own window shows as black and white.
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
        if (window := self._window) is not None:
            self.info["window"] = window
        self._mode = ("L" if in_8_bits and is_plain else "F") if is_grey else "RGB"

    @property
    def _line(self) -> tuple[float, float]:
        """Slope and intercept."""
        slope, intercept = self.data.get("RescaleSlope"), self.data.get("RescaleIntercept")
        return float(1 if slope is None else slope), float(intercept or 0)

    @property
    def _top(self) -> int | None:
        """The number that stored values are subtracted from, if the lowest one is white."""
        if self.data.PhotometricInterpretation != "MONOCHROME1":
            return None
        return -1 if self.data.PixelRepresentation else (1 << self.data.BitsStored) - 1

    @property
    def _window(self) -> tuple[float, float] | None:
        """The values that the first window of the file shows as black and white (PS3.3 C.11.2)."""
        centres, widths = self.data.get("WindowCenter"), self.data.get("WindowWidth")
        if centres is None or widths is None:
            return None
        centre, width = (float(np.atleast_1d(each)[0]) for each in (centres, widths))
        kind = self.data.get("VOILUTFunction") or "LINEAR"
        if kind == "LINEAR":
            centre, width = centre - 0.5, width - 1
        if self._top is not None:
            slope, intercept = self._line
            centre = slope * self._top + 2 * intercept - centre
        is_line = kind.startswith("LINEAR") and width > 0
        return (centre - width / 2, centre + width / 2) if is_line else None

    def load(self) -> Any:
        """Decodes the frame; almost any error if pydicom cannot."""
        if self.data is not None:
            self.im = Image.fromarray(self._pixels()).im
            self.data = None
        return super().load()

    def _pixels(self) -> Any:
        from pydicom.pixels import pixel_array

        values = pixel_array(self.data, index=0)
        if self._top is not None:
            values = self._top - values.astype(np.int64)
        if self.mode != "F":
            return values.astype(np.uint8)
        slope, intercept = self._line
        return (values * slope + intercept).astype(np.float32)


def register() -> None:
    """Lets Pillow open DICOM files."""
    Image.register_open(DicomFile.format, DicomFile)
