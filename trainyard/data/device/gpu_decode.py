"""Decoding on a GPU by nvImageCodec (extra `nvimgcodec`), for nodes with few cores per GPU.

The loader process reads images and chooses crops as usual (see encoded.py); the device decodes,
crops, resizes and flips JPEGs. Images are decoded whole: nvImageCodec refuses regions if chroma is
interpolated as in libjpeg, and decoding regions fails in version 0.9.0 (its issue 55).
"""

import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from trainyard.data.batch import BadSample, HostBatch
from trainyard.data.decode.crops import Crops
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.interpolation import Interpolation
from trainyard.data.device.copies import (
    AHEAD,
    InFlightBatch,
    PendingEvents,
    copied_samples,
    copy_stream,
    on_device,
)
from trainyard.data.loader.encoded_batch import JPEG, PIXELS, stretches
from trainyard.errors import RecipeError
from trainyard.image_size import ImageSize, height_width
from trainyard.installation import install_hint

_CPU_ONLY = -99999  # nvImageCodec's device number for the CPU


def check(device: torch.device) -> None:
    """RecipeError if this machine cannot decode on a GPU."""
    if device.type == "cpu":
        raise RecipeError("data.decode = 'gpu' needs a GPU, and there is none: leave it at 'cpu'")
    _library()


def _library() -> Any:
    # Suppresses the library's own message for each image that it cannot decode.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        return importlib.import_module("nvidia.nvimgcodec")
    except ImportError as error:
        raise RecipeError(
            f"data.decode = 'gpu' needs nvImageCodec: {install_hint('nvimgcodec')} "
            f"(CUDA 12: nvidia-nvimgcodec-cu12[nvjpeg]) ({error})"
        ) from None


class Decoder:
    """Decodes JPEGs to whole images on a device, also on the CPU by the same library."""

    def __init__(self, device: torch.device, threads: int) -> None:
        """`threads` do the entropy decoding if the GPU has no JPEG engine."""
        library, is_cpu = _library(), device.type == "cpu"
        kind = library.BackendKind
        kinds = (kind.HW_GPU_ONLY, kind.GPU_ONLY, kind.HYBRID_CPU_GPU)
        self._decoder = library.Decoder(
            device_id=_CPU_ONLY if is_cpu else device.index or 0,
            max_num_cpu_threads=threads,
            backends=[library.Backend(kind) for kind in ((kind.CPU_ONLY,) if is_cpu else kinds)],
            options=":fancy_upsampling=1",  # as in libjpeg
        )
        self._params = library.DecodeParams(
            apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB
        )
        self._library, self._is_cpu = library, is_cpu

    def __call__(self, contents: Sequence[bytes], stream: int) -> list[Tensor | None]:
        """uint8[H, W, 3] of each image, ready on a CUDA stream; None if it cannot be decoded."""
        if not contents:
            return []
        streams = [self._library.CodeStream(content) for content in contents]
        images = self._decoder.decode(streams, params=self._params, cuda_stream=stream)
        return [None if image is None else self._tensor(image) for image in images]

    def _tensor(self, image: Any) -> Tensor:
        # Its DLPack needs a driver even for an image in host memory.
        return torch.from_numpy(np.asarray(image)) if self._is_cpu else torch.from_dlpack(image)


@cache
def decoder_on(device: torch.device, threads: int) -> Decoder:
    """The decoder of this process, cached since creating one is slow."""
    return Decoder(device, threads)


def crop_and_resize(
    pixels_HWC: Tensor, entry: NDArray[np.void], size: ImageSize, how: Interpolation
) -> Tensor:
    """The box of a whole image as uint8[H, W, 3] of `size`, antialiased, by the crop in `entry`."""
    left, top, right, bottom = entry["box"].tolist()
    target_height, target_width = height_width(size)
    pixels_1CHW = pixels_HWC.permute(2, 0, 1)[None]
    if entry["resizes_first"]:
        height, width = pixels_HWC.shape[:2]
        down, across = target_height / (bottom - top), target_width / (right - left)
        resized = round(height * down), round(width * across)
        y, x = round(top * down), round(left * across)
        found = _resize(pixels_1CHW, resized, how)
        found = found[..., y : y + target_height, x : x + target_width]
    else:
        rows = slice(math.floor(top), math.ceil(bottom))
        columns = slice(math.floor(left), math.ceil(right))
        found = _resize(pixels_1CHW[..., rows, columns], (target_height, target_width), how)
    found = found.flip(3) if entry["flip"] else found
    return found[0].permute(1, 2, 0)


def _resize(pixels_1CHW: Tensor, size: tuple[int, int], how: Interpolation) -> Tensor:
    """Resizes as Pillow does: along rows, then columns, rounded to whole numbers in between."""
    for step in ((pixels_1CHW.shape[2], size[1]), size):
        # In float32, since GPUs have no kernel for integers.
        resized = F.interpolate(pixels_1CHW.float(), step, mode=how, antialias=True)
        pixels_1CHW = resized.round_().clamp_(0, 255)
    return pixels_1CHW.to(torch.uint8)


def _is_inside(box: NDArray[np.float64], pixels_HWC: Tensor) -> bool:
    """True if the box lies inside the decoded image, up to rounding."""
    height, width = pixels_HWC.shape[:2]
    return bool((box[2:] < (width + 0.01, height + 0.01)).all())


class DecodingTransfer:
    """Copies batches of encoded images to a device and decodes them there; see encoded.py."""

    ahead = AHEAD

    def __init__(
        self,
        device: torch.device,
        decoder: Decoder,
        image_size: ImageSize,
        *,
        how: Interpolation,
        locate: Callable[[int], tuple[str, int, int]],
    ) -> None:
        """`locate` gives the file, offset and size of a sample, to report a bad one."""
        self._device, self._decode = device, decoder
        self._size, self._how, self._locate = image_size, how, locate
        self._stream = None if device.type == "cpu" else copy_stream(device)
        self._decoding = PendingEvents()
        self.release_finished = self._decoding.release_finished
        self.release_all = self._decoding.release_all

    def start(self, host: HostBatch) -> InFlightBatch:
        """Starts decoding; waits until the library has read the bytes, not for the pixels."""
        release = host.acquire()
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            whole: list[Tensor | None] = []
            pixels_BHWC, unreadable = self._pixels(host.images_BHWC, whole)
            columns = host.map(lambda column: column.copy())
            columns.weights[list(unreadable)] = 0
            samples = copied_samples(columns, self._device)
            done = self._stream.record_event() if self._stream else None
        bad = [self._bad(int(columns.ids[place]), reason) for place, reason in unreadable.items()]
        release()  # the loader may now refill the memory of `host`
        if done is not None:
            self._decoding.add(done, whole.clear)
        tensors = (pixels_BHWC, *on_device(samples))
        return InFlightBatch(partial(self._taken, tensors, done), samples, host.bad + bad)

    def _moved(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _pixels(
        self, images_BHWC: NDArray[np.uint8], whole: list[Tensor | None]
    ) -> tuple[Tensor, dict[int, str]]:
        """uint8[B, H, W, 3] on the device, zero for bad images, and the reasons for these.

        Fills `whole` with the library's images, whose memory must live until the work is done.
        """
        entries, rest_BN = stretches(images_BHWC)
        shape = (len(entries), *height_width(self._size), 3)
        out_BHWC = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        encoded = np.flatnonzero(entries["kind"] == JPEG).tolist()
        lengths = entries["length"].tolist()
        contents = [rest_BN[place, : lengths[place]].tobytes() for place in encoded]
        stream = self._stream.cuda_stream if self._stream else 0
        bad = {}
        whole += self._decode(contents, stream)
        for place, content, pixels in zip(encoded, contents, whole, strict=True):
            try:
                out_BHWC[place] = (
                    crop_and_resize(pixels, entries[place], self._size, self._how)
                    if pixels is not None and _is_inside(entries[place]["box"], pixels)
                    else self._on_host(content, entries[place])
                )
            except ValueError as error:
                bad[place] = str(error)
        for place in np.flatnonzero(entries["kind"] == PIXELS).tolist():
            pixels_HWC = rest_BN[place, : lengths[place]].reshape(shape[1:])
            out_BHWC[place] = self._moved(pixels_HWC.copy())
        return out_BHWC, bad

    def _on_host(self, content: bytes, entry: NDArray[np.void]) -> Tensor:
        """Decodes an image that the GPU refuses. ValueError if it is bad."""
        out_BHWC = np.empty((1, *height_width(self._size), 3), np.uint8)
        crops = Crops(entry["box"][None], entry["flip"][None], bool(entry["resizes_first"]))
        bad = decode_batch([content], lambda sizes: crops, out_BHWC, self._how)
        if bad:
            raise ValueError(bad[0])
        return self._moved(out_BHWC[0])

    def _bad(self, sample: int, reason: str) -> BadSample:
        path, offset, _ = self._locate(sample)
        return BadSample(sample, path, offset, reason)

    @contextmanager
    def _taken(
        self, tensors: tuple[Tensor, ...], done: torch.cuda.Event | None
    ) -> Iterator[Tensor]:
        if done is not None:
            trainer = torch.cuda.current_stream(self._device)
            trainer.wait_event(done)
            for tensor in tensors:
                tensor.record_stream(trainer)  # keeps the memory from early reuse
        yield tensors[0]
