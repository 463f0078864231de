"""DICOM files by pydicom: the values of their slope and intercept, through `data.range`."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.command_line import SHORT, run
from tests.data.tars import write_files
from tests.errors import check, refused
from trainyard.config import load_recipe
from trainyard.data._native import own_decoder
from trainyard.data.decode.crops import FittedCrop
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.lost import look
from trainyard.data.decode.rendering import Limits, Range, Rendering
from trainyard.data.index.build import open_index

pydicom = pytest.importorskip("pydicom")
LEVELS_HW = np.random.default_rng(0).integers(0, 4096, (12, 10)).astype(np.uint16)


def dicom(pixels: NDArray[Any], photometric: str = "MONOCHROME2", **tags: Any) -> bytes:
    """A file without compression, of frames or one picture."""
    image = pydicom.Dataset()
    image.file_meta = pydicom.dataset.FileMetaDataset()
    image.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    image.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    image.SOPInstanceUID = "1.2.3"
    image.Rows, image.Columns = pixels.shape[:2]
    image.SamplesPerPixel = 3 if photometric == "RGB" else 1
    image.PhotometricInterpretation = photometric
    image.PixelRepresentation = int(pixels.dtype.kind == "i")
    image.BitsAllocated = 8 * pixels.itemsize
    image.BitsStored = 12 if pixels.itemsize == 2 else 8
    image.HighBit = image.BitsStored - 1
    if photometric == "RGB":
        image.PlanarConfiguration = 0
    image.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(image, name, value)
    file = io.BytesIO()
    pydicom.dcmwrite(file, image, enforce_file_format=True)
    return file.getvalue()


def seen(content: bytes, limits: Limits | None) -> NDArray[np.uint8] | str:
    out = np.empty((1, 12, 10, 3), np.uint8)
    bad = decode_batch(
        [content],
        FittedCrop((12, 10), 1.0),
        out,
        "bilinear",
        decoder=own_decoder(),
        rendering=Rendering(range=limits),
    )
    pixels_HWC: NDArray[np.uint8] = out[0]
    return bad[0] if bad else pixels_HWC


def mapped(values_HW: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    shares = (np.clip(values_HW, low, high) - low) / (high - low)
    return np.repeat(np.rint(255 * shares)[..., None], 3, axis=2).astype(np.uint8)


VALUES_HW = LEVELS_HW.astype(float)
KINDS: dict[str, tuple[bytes, NDArray[Any], Range]] = {
    "stored values": (dicom(LEVELS_HW), VALUES_HW, (0, 4095)),
    "Hounsfield units": (
        dicom(LEVELS_HW, RescaleSlope=2, RescaleIntercept=-1024),
        2 * VALUES_HW - 1024,
        (-160, 240),
    ),
    "signed": (dicom((LEVELS_HW // 2).astype(np.int16) - 900), LEVELS_HW // 2 - 900.0, (-500, 500)),
    "white is low": (dicom(LEVELS_HW, "MONOCHROME1"), 4095 - VALUES_HW, (0, 4095)),
    "8 bits": (dicom((LEVELS_HW >> 4).astype(np.uint8)), VALUES_HW // 16, (0, 255)),
    "8 bits with white low": (
        dicom((LEVELS_HW >> 4).astype(np.uint8), "MONOCHROME1"),
        255 - VALUES_HW // 16,
        (0, 255),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_values_are_mapped_from_the_range(name: str) -> None:
    content, values_HW, limits = KINDS[name]
    found = seen(content, limits)
    assert not isinstance(found, str), found
    assert np.array_equal(found, mapped(values_HW, *limits))


WINDOW: dict[str, Any] = {"WindowCenter": [1000, 40], "WindowWidth": [501, 80]}  # the first counts
LINE: dict[str, Any] = {"RescaleSlope": 2, "RescaleIntercept": -1024}
WINDOWS: dict[str, tuple[bytes, NDArray[Any], Range]] = {
    "linear": (dicom(LEVELS_HW, **WINDOW), VALUES_HW, (749.5, 1249.5)),
    "of units": (dicom(LEVELS_HW, **WINDOW, **LINE), 2 * VALUES_HW - 1024, (749.5, 1249.5)),
    "exact": (
        dicom(LEVELS_HW, WindowCenter=100, WindowWidth=400, VOILUTFunction="LINEAR_EXACT"),
        VALUES_HW,
        (-100, 300),
    ),
    "white is low": (  # PS3.3: the window is one of the values before they are inverted
        dicom(LEVELS_HW, "MONOCHROME1", **WINDOW, **LINE),
        -(2 * VALUES_HW - 1024),
        (-1249.5, -749.5),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_the_window_of_a_file_is_its_range(name: str) -> None:
    content, values_HW, limits = WINDOWS[name]
    found = seen(content, "window")
    assert not isinstance(found, str), found
    assert np.array_equal(found, mapped(values_HW, *limits))


@pytest.mark.parametrize(
    "tags", [{}, {"WindowCenter": 9, "WindowWidth": 9, "VOILUTFunction": "SIGMOID"}, LINE]
)
def test_a_file_without_a_linear_window_is_bad(tags: dict[str, Any]) -> None:
    assert isinstance(seen(dicom(LEVELS_HW, **tags), "window"), str)


def test_colours_frames_and_what_needs_a_range() -> None:
    colours = np.random.default_rng(0).integers(0, 256, (12, 10, 3)).astype(np.uint8)
    assert np.array_equal(seen(dicom(colours, "RGB"), None), colours)
    grey = colours.transpose(2, 0, 1).copy()
    frames = dicom(grey, Rows=12, Columns=10, NumberOfFrames=3)
    assert np.array_equal(seen(frames, None), np.repeat(grey[0, ..., None], 3, axis=2))
    assert look(frames).frames == 3
    assert isinstance(seen(dicom(LEVELS_HW), None), str)
    assert isinstance(seen(dicom(LEVELS_HW)[:-40], (0, 4095)), str)


@pytest.mark.slow
def test_a_run_proposes_and_keeps_the_range_of_its_units(tmp_path: Path) -> None:
    files = {
        f"{split}/{'ab'[number % 2]}/{number}.dcm": dicom(
            (LEVELS_HW % 50 + 500 * (number % 2)).astype(np.uint16), RescaleIntercept=-1000
        )
        for split in ("train", "val")
        for number in range(16)
    }
    data, out = write_files(tmp_path / "data", files), tmp_path / "run"
    assert len(open_index(f"{data}/train")) == 16
    tiny = (*SHORT, "--model.name", "test_resnet", "--batch.size", "8", "--data.image_size", "32")
    train = ("train", "debug", "--data", data, "--run", out, *tiny, "--json")
    check(refused(*train), "recipe.range-not-set", limits="[-1000, -451]")
    assert run(*train, "--data.range", "auto") == 0
    assert load_recipe(str(out / "recipe.toml")).data.range == (-1000, -451)
    assert run("predict", out, f"{data}/val/a/0.dcm") == 0
