"""Decoding on a GPU by torchvision, which calls nvJPEG, for nodes with few cores per GPU.

The loader process reads images and chooses crops as usual (see loader/encoded_batch.py); the device
decodes JPEGs, whole ones, and crops, resizes and flips them.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from trainyard.data.batch import BadSample, HostBatch, PixelBatch
from trainyard.data.decode.crops import Crops, Interpolation
from trainyard.data.decode.decode import decode_batch
from trainyard.data.device import copies
from trainyard.data.loader.encoded_batch import JPEG, PIXELS, stretches
from trainyard.errors import RecipeError
from trainyard.image_size import ImageSize, height_width


def check(device: torch.device) -> None:
    """RecipeError if this machine cannot decode on a GPU."""
    if device.type == "cpu":
        raise RecipeError(
            "recipe.decode-without-gpu",
            "data.decode = 'gpu' needs a GPU, and there is none: leave it at 'cpu'",
        )
    from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

    probe = encode_jpeg(torch.zeros(3, 64, 64, dtype=torch.uint8))
    try:
        decode_jpeg([probe], ImageReadMode.RGB, device)
    except (AttributeError, RuntimeError) as error:  # AttributeError by a build without CUDA
        raise RecipeError(
            "recipe.gpu-decode-unavailable",
            "data.decode = 'gpu' needs torchvision's build for torch's CUDA: install it, or leave "
            "data.decode at 'cpu' ({reason})",
            reason=str(error).splitlines()[0],
        ) from None


def decode(encoded: list[Tensor], device: torch.device) -> list[Tensor | None]:
    """uint8[3, H, W] of each JPEG, which is uint8[bytes] on the host; None for what is refused.

    torchvision decodes all of a list or none, so a list that fails is halved. It returns when its
    work is done, which is on a stream of its own.
    """
    from torchvision.io import ImageReadMode, decode_jpeg  # a second of imports

    if not encoded:
        return []
    if device.type == "cuda":
        # That stream does not wait for the current one, but writes to memory that was freed on it
        # and may still be read (pytorch/vision#9606).
        torch.cuda.current_stream(device).synchronize()
    try:
        return list(decode_jpeg(encoded, ImageReadMode.RGB, device))
    except RuntimeError:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # images that have begun write to freed memory
    if len(encoded) == 1:
        return [None]
    half = len(encoded) // 2
    return decode(encoded[:half], device) + decode(encoded[half:], device)


def crop_and_resize(
    pixels_CHW: Tensor, entry: NDArray[np.void], size: ImageSize, how: Interpolation
) -> Tensor:
    """The box of a whole image as uint8[H, W, 3] of `size`, antialiased, by the crop in `entry`."""
    left, top, right, bottom = entry["box"].tolist()
    target_height, target_width = height_width(size)
    pixels_1CHW = pixels_CHW[None]
    if entry["resizes_first"]:
        height, width = pixels_CHW.shape[1:]
        down, across = target_height / (bottom - top), target_width / (right - left)
        resized = round(height * down), round(width * across)
        y, x = round(top * down), round(left * across)
        pixels = _resize(pixels_1CHW, resized, how)
        pixels = pixels[..., y : y + target_height, x : x + target_width]
    else:
        rows = slice(math.floor(top), math.ceil(bottom))
        columns = slice(math.floor(left), math.ceil(right))
        pixels = _resize(pixels_1CHW[..., rows, columns], (target_height, target_width), how)
    pixels = pixels.flip(3) if entry["flip"] else pixels
    return pixels[0].permute(1, 2, 0)


def _resize(pixels_1CHW: Tensor, size: tuple[int, int], how: Interpolation) -> Tensor:
    """Resizes as Pillow does: along rows, then columns, rounded to whole numbers in between."""
    for step in ((pixels_1CHW.shape[2], size[1]), size):
        # In float32, since GPUs have no kernel for integers.
        resized = F.interpolate(pixels_1CHW.float(), step, mode=how, antialias=True)
        pixels_1CHW = resized.round_().clamp_(0, 255)
    return pixels_1CHW.to(torch.uint8)


class DecodingTransfer:
    """Copies batches of encoded images to a device and decodes them there."""

    ahead = copies.AHEAD

    def __init__(
        self,
        device: torch.device,
        image_size: ImageSize,
        *,
        how: Interpolation,
        locate: Callable[[int], tuple[str, int, int]],
    ) -> None:
        """`locate` gives the file, offset and size of a sample, to report a bad one."""
        self._device, self._size, self._how, self._locate = device, image_size, how, locate
        self._stream = None if device.type == "cpu" else copies.copy_stream(device)

    def start(self, host: HostBatch) -> PixelBatch[Tensor]:
        """Decodes, and starts cropping; the memory of `host` is the loader's again afterwards."""
        release = host.acquire()
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            pixels_BHWC, unreadable = self._pixels(host.images_BHWC)
            columns = host.map(lambda column: column.copy())
            columns.weights[list(unreadable)] = 0
            samples = copies.copied_samples(columns, self._device)
            done = self._stream.record_event() if self._stream else None
        release()
        rejected = ((int(columns.ids[row]), reason) for row, reason in unreadable.items())
        bad = [BadSample(one, *self._locate(one)[:2], reason) for one, reason in rejected]

        def acquire() -> Callable[[], None]:
            if done is not None:
                copies.wait_for(done, pixels_BHWC, samples)
            return lambda: None

        complete = replace(host, bad=host.bad + bad, capacity=0.0)  # the loader does not decode
        return copies.moved(complete, samples, pixels_BHWC, acquire)

    def release_finished(self) -> None:
        """Holds no memory of the loader."""

    def release_all(self) -> None:
        """Holds no memory of the loader."""

    def _pixels(self, images_BHWC: NDArray[np.uint8]) -> tuple[Tensor, dict[int, str]]:
        """uint8[B, H, W, 3] on the device, zero for bad images, and the reasons for these."""
        entries, rest_BN = stretches(images_BHWC)
        shape = (*height_width(self._size), 3)
        out_BHWC = torch.zeros(len(entries), *shape, dtype=torch.uint8, device=self._device)
        data = [row[:length] for row, length in zip(rest_BN, entries["length"], strict=True)]
        encoded = np.flatnonzero(entries["kind"] == JPEG).tolist()
        decoded = decode([torch.from_numpy(data[row]) for row in encoded], self._device)
        bad = {}
        for row, pixels in zip(encoded, decoded, strict=True):
            if pixels is not None:
                out_BHWC[row] = crop_and_resize(pixels, entries[row], self._size, self._how)
                continue
            try:
                out_BHWC[row] = self._by_cpu(data[row].tobytes(), entries[row])
            except ValueError as error:
                bad[row] = str(error)
        for row in np.flatnonzero(entries["kind"] == PIXELS).tolist():
            out_BHWC[row] = torch.from_numpy(data[row].reshape(shape)).to(self._device)
        return out_BHWC, bad

    def _by_cpu(self, content: bytes, entry: NDArray[np.void]) -> Tensor:
        """Decodes an image that the device refuses. ValueError if it is bad."""
        out_BHWC = np.empty((1, *height_width(self._size), 3), np.uint8)
        crops = Crops(entry["box"][None], entry["flip"][None], bool(entry["resizes_first"]))
        bad = decode_batch([content], lambda sizes: crops, out_BHWC, self._how)
        if bad:
            raise ValueError(bad[0])
        return torch.from_numpy(out_BHWC[0]).to(self._device)
