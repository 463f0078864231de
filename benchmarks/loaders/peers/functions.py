"""Peers as functions: the bytes of a JPEG, a box and a flip to 224 x 224 RGB pixels.

Each decodes in its library's best way that is exact. The resize is antialiased unless said.
"""

import io
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.loaders.pool import SIDE

Box = tuple[int, int, int, int]
Pixels = NDArray[np.uint8]
Function = Callable[[bytes, Box, bool], Pixels]
_SIZE = (SIDE, SIDE)


def resized(image_CHW: Tensor, flip: bool) -> Pixels:
    """By torch: the fastest antialiased resize of uint8 that pip has, but pillow-simd's."""
    small = interpolate(image_CHW[None], _SIZE, mode="bilinear", antialias=True)[0]
    return (small.flip(-1) if flip else small).permute(1, 2, 0).numpy()


def cropped(image_HWC: Pixels, box: Box, flip: bool) -> Pixels:
    left, top, right, bottom = box
    return resized(torch.from_numpy(image_HWC[top:bottom, left:right]).permute(2, 0, 1), flip)


def pillow(content: bytes, box: Box, flip: bool) -> Pixels:
    """As torchvision and timm do with Pillow; what the others' pixels are held against."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    small = image.crop(box).resize(_SIZE, Image.Resampling.BILINEAR)
    return np.asarray(small)[:, ::-1] if flip else np.asarray(small)


def pillow_draft(content: bytes, box: Box, flip: bool) -> Pixels:
    """Decoded at a half or a quarter of its size where the crop allows."""
    image = Image.open(io.BytesIO(content))
    width, scale = image.width, min(box[2] - box[0], box[3] - box[1]) / SIDE
    if scale >= 2:
        image.draft("RGB", (int(image.width / scale), int(image.height / scale)))
    part = image.width / width
    limits = (image.width, image.height, image.width, image.height)
    place = tuple(min(side * part, most) for side, most in zip(box, limits, strict=True))
    small = image.resize(_SIZE, Image.Resampling.BILINEAR, box=place, reducing_gap=2.0)  # type: ignore[arg-type]
    return np.asarray(small)[:, ::-1] if flip else np.asarray(small)


def simplejpeg_torch(content: bytes, box: Box, flip: bool) -> Pixels:
    return cropped(simplejpeg.decode_jpeg(content, "RGB"), box, flip)


def simplejpeg_area(content: bytes, box: Box, flip: bool) -> Pixels:
    """FFCV's resize: OpenCV's INTER_AREA."""
    cv2 = import_module("cv2")
    left, top, right, bottom = box
    image = simplejpeg.decode_jpeg(content, "RGB")[top:bottom, left:right]
    small: Pixels = cv2.resize(image, _SIZE, interpolation=cv2.INTER_AREA)
    return small[:, ::-1] if flip else small


def torchvision_tensors(content: bytes, box: Box, flip: bool) -> Pixels:
    io_, left, top = import_module("torchvision.io"), box[0], box[1]
    encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    image = io_.decode_jpeg(encoded, io_.ImageReadMode.RGB)
    return resized(image[:, top : box[3], left : box[2]], flip)


def torchcodec(content: bytes, box: Box, flip: bool) -> Pixels:
    image = import_module("torchcodec.decoders").decode_jpeg(content)
    return resized(image[:, box[1] : box[3], box[0] : box[2]], flip)


@cache
def _nvimgcodec() -> tuple[Any, Any]:
    codec = import_module("nvidia.nvimgcodec")
    kind = codec.Backend(codec.BackendKind.CPU_ONLY)
    cpu = codec.NVIMGCODEC_DEVICE_CPU_ONLY
    return codec, codec.Decoder(device_id=cpu, max_num_cpu_threads=1, backends=[kind])


def nvimgcodec(content: bytes, box: Box, flip: bool) -> Pixels:
    """Its CPU decoder has libjpeg-turbo decode the crop alone."""
    codec, decoder = _nvimgcodec()
    left, top, right, bottom = box
    region = codec.Region(top, left, bottom, right)
    image = decoder.decode(codec.CodeStream(content).get_sub_code_stream(region=region))
    return resized(torch.from_numpy(np.asarray(image)).permute(2, 0, 1), flip)


@cache
def _turbojpeg(folder: Path) -> tuple[Any, Any]:
    module = import_module("turbojpeg")
    found = [path for lib in ("lib", "lib64") for path in (folder / "libjpeg-turbo" / lib).glob(
        "libturbojpeg.so")]  # fmt: skip
    return module, module.TurboJPEG(*map(str, found[:1]))


def pyturbojpeg(folder: Path) -> Function:
    """A lossless crop to whole blocks, then what is left is decoded."""

    def decode(content: bytes, box: Box, flip: bool) -> Pixels:
        module, turbo = _turbojpeg(folder)
        left, top, right, bottom = box
        part = turbo.crop(content, left, top, right - left, bottom - top)
        step_x, step_y = _steps(content)
        image = turbo.decode(part, module.TJPF_RGB)
        x, y = left % step_x, top % step_y
        return cropped(image, (x, y, x + right - left, y + bottom - top), flip)

    return decode


def _steps(content: bytes) -> tuple[int, int]:
    """Pixels across and down that JPEG's blocks come in."""
    subsampling = simplejpeg.decode_jpeg_header(content)[3]
    return (16 if subsampling in ("420", "422") else 8), (16 if subsampling == "420" else 8)
