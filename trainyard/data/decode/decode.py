"""Decodes encoded images and crops them to boxes, into one uint8 batch.

`decode_batch` is called once per slice of a batch. The C extension decodes baseline JPEGs and
packed records, in one call. Pillow decodes the other images, one at a time, and the extension crops
and resizes their pixels; without the extension Pillow does it all. `reference_image`, plain Pillow,
defines the right pixels.

The last axis of a batch is its channels. 3: RGB. 1: luminance, which is the Y of a JPEG in YCbCr,
and Pillow's convert("L") of the RGB pixels of any other image. Other numbers: multispectral images,
whose channels are resized one by one.
"""

import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from trainyard.data._native import core
from trainyard.data.decode import dicom
from trainyard.data.decode.array_file import MAGIC, Bands, open_array
from trainyard.data.decode.crops import (
    CentralCrop,
    Crops,
    Interpolation,
    RandomCropParameters,
    inner_size,
)
from trainyard.data.decode.orientation import (
    Orientations,
    may_be_turned,
    orientation_of,
    stored_boxes,
    turned,
    upright,
    upright_sizes,
)
from trainyard.data.decode.packed_record import (
    MAX_SIDE,
    has_pixels,
    jpeg_head,
    jpeg_of,
    pixels_of,
    record_of_pixels,
)
from trainyard.data.decode.rendering import (
    MAX_PIXELS,
    PLAIN,
    Limits,
    Range,
    Ranges,
    Rendering,
    by_channel,
    deep_values,
    has_upper_bits,
    is_deep,
    mapped,
    scale_key,
)
from trainyard.data.decode.tiff_file import TIFF_STARTS, open_tiff
from trainyard.data.formats.left_out import needs_plugin
from trainyard.data.formats.scan import IMAGE_FORMATS
from trainyard.data.storage.encoded import (
    PACKED_MAGIC,
    EncodedSpans,
    as_stored,
    contents_of,
    in_memory,
)
from trainyard.errors import DataError

# Without a handler, Pillow's errors are printed for every image.
logging.getLogger("PIL").addHandler(logging.NullHandler())
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

if "HEIF" in IMAGE_FORMATS:
    import pillow_heif

    pillow_heif.register_heif_opener()
if "DICOM" in IMAGE_FORMATS:
    dicom.register()

OF_PICTURES = (1, 3)  # channels
_WHOLE = (0, 65535)  # the range of 16 bits

_KnownCrops = RandomCropParameters | CentralCrop
"""Crops that the extension makes by itself, once it has read the header of an image."""


class BadImageError(Exception):
    """An image that cannot be decoded; the text is the reason."""


def decode_batch(
    images: EncodedSpans | Sequence[bytes],
    crop: Callable[[NDArray[np.int64]], Crops],
    out_BHWC: NDArray[np.uint8],
    interpolation: Interpolation,
    *,
    decoder: "core.Decoder | None" = None,
    seek: EncodedSpans | None = None,
    rendering: Rendering = PLAIN,
) -> dict[int, str]:
    """Decodes, crops, resizes (antialiased) and flips each image into its place in `out_BHWC`.

    `crop` turns sizes (int[n, 2]: width, height) into boxes inside the images. Returns the
    positions that could not be decoded, with the reasons; their pixels are zero. Without a
    `decoder`, see `own_decoder`, Pillow decodes all images. DataError for packed
    coefficients without the extension.
    """
    are_pictures = out_BHWC.shape[3] in OF_PICTURES and not rendering.bands
    is_sized = rendering.exif or rendering.max_pixels != MAX_PIXELS  # the limit of its own crops
    if decoder is None or is_sized or not are_pictures or not isinstance(crop, _KnownCrops):
        return _decode_sized(
            images, crop, out_BHWC, interpolation, decoder=decoder, seek=seek, rendering=rendering
        )
    stored = as_stored(images)
    status = np.zeros(len(stored.which), np.uint8)
    crops, rule = crop.rule(len(status))
    bicubic = interpolation == "bicubic"
    native_pixels(
        decoder, stored, crops, out_BHWC, status=status, bicubic=bicubic, seek=seek, rule=rule
    )
    left = np.flatnonzero(status)
    if not left.size:
        return {}
    rest, pixels_BHWC = stored.part(left), np.empty((len(left), *out_BHWC.shape[1:]), np.uint8)
    bad = _decode_sized(
        rest, crop[left], pixels_BHWC, interpolation, decoder=decoder, rendering=rendering
    )
    out_BHWC[left] = pixels_BHWC
    return {int(left[position]): reason for position, reason in bad.items()}


def _decode_sized(
    images: EncodedSpans | Sequence[bytes],
    crop: Callable[[NDArray[np.int64]], Crops],
    out_BHWC: NDArray[np.uint8],
    interpolation: Interpolation,
    *,
    decoder: "core.Decoder | None" = None,
    seek: EncodedSpans | None = None,
    rendering: Rendering = PLAIN,
) -> dict[int, str]:
    """`decode_batch` in steps: the sizes, and orientations, of all images, then their boxes."""
    contents, unreadable = contents_of(images)
    stored, shape = in_memory(contents), out_BHWC.shape[1:]
    decoder = decoder if shape[2] in OF_PICTURES and not rendering.bands else None
    sizes, status = native_sizes(stored, decoder, rendering.max_pixels)
    orientations = native_orientations(contents, status) if rendering.exif else None
    bad = _pillow_sizes(contents, sizes, status, orientations, rendering=rendering) | unreadable
    crops = crop(sizes if orientations is None else upright_sizes(sizes, orientations))
    if crops.pad is not None:
        how = partial(
            _decode_sized, interpolation=interpolation, decoder=decoder, rendering=rendering
        )
        return _decode_padded(how, contents, crops, out_BHWC, seek=seek, bad=bad)
    if decoder is not None:
        native = partial(native_pixels, decoder, bicubic=interpolation == "bicubic")
        if orientations is None:
            native(stored, crops, out_BHWC, status=status, seek=seek)
        else:
            turning = partial(_upright_pixels, native, sizes=sizes, orientations=orientations)
            turning(stored, crops, out_BHWC, status=status, seek=seek)
    for position in np.flatnonzero(status).tolist():
        if position not in bad:
            try:
                size, part = tuple(sizes[position].tolist()), crops.part(position)
                turns = 1 if orientations is None else int(orientations[position])
                stored_images = _images(contents[position], size, shape[2], rendering)
                whole = [upright(image, turns) for image in stored_images]
                out_BHWC[position] = _resized(whole, part, shape, interpolation, decoder=decoder)
            except BadImageError as error:
                bad[position] = str(error)
    out_BHWC[list(bad)] = 0
    return bad


def _decode_padded(
    decode: Callable[..., dict[int, str]],
    contents: Sequence[bytes],
    crops: Crops,
    out_BHWC: NDArray[np.uint8],
    *,
    seek: EncodedSpans | None,
    bad: dict[int, str],
) -> dict[int, str]:
    """Each box in the middle, in its own shape, and `crops.pad` beside it. Adds to `bad`."""
    assert crops.pad is not None
    height, width, channels = out_BHWC.shape[1:]
    out_BHWC[:] = crops.pad
    for position in set(range(len(contents))) - bad.keys():
        one = slice(position, position + 1)
        crop = crops.part(position)._replace(pad=None)
        high, wide = inner_size(crop.boxes[0], (height, width))
        pixels_BHWC = np.empty((1, high, wide, channels), np.uint8)
        found = decode(
            contents[one], lambda _, crop=crop: crop, pixels_BHWC, seek=seek and seek.part(one)
        )
        bad |= {position + zero: reason for zero, reason in found.items()}
        top, left = (height - high) // 2, (width - wide) // 2
        left = width - wide - left if crop.flips[0] else left
        out_BHWC[position, top : top + high, left : left + wide] = pixels_BHWC[0]
    out_BHWC[list(bad)] = 0
    return bad


# --- the extension ---


def native_sizes(
    stored: EncodedSpans, decoder: "core.Decoder | None", limit: int = MAX_PIXELS
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Sizes from the headers, and a status; 1 x 1 where it is not 0: left to Pillow."""
    count = len(stored.which)
    sizes, status = np.ones((count, 2), np.int64), np.ones(count, np.uint8)
    if decoder is not None:
        decoder.sizes(*stored, sizes, status)
        status[sizes[:, 0] * sizes[:, 1] > limit] = core.NOT_OURS
    return sizes, status


def native_orientations(contents: Sequence[bytes], status: NDArray[np.uint8]) -> Orientations:
    """The orientations of images whose status is 0; 1 for those that are left to Pillow."""
    found = np.ones(len(status), np.uint8)
    for position in np.flatnonzero(status == 0).tolist():
        found[position] = image_orientation(contents[position])
    return found


def _upright_pixels(
    native: Callable[..., None],
    stored: EncodedSpans,
    crops: Crops,
    out_BHWC: NDArray[np.uint8],
    *,
    status: NDArray[np.uint8],
    seek: EncodedSpans | None,
    sizes: NDArray[np.int64],
    orientations: Orientations,
) -> None:
    """`native_pixels` for crops of upright images: only the resized pixels are turned."""
    turns = (orientations > 1) & (status == core.OK)
    of_others = np.where(turns, core.NOT_OURS, status).astype(np.uint8)
    native(stored, crops, out_BHWC, status=of_others, seek=seek)
    status[~turns] = of_others[~turns]
    boxes = stored_boxes(crops.boxes, upright_sizes(sizes, orientations), orientations)
    height, width, channels = out_BHWC.shape[1:]
    for row in np.flatnonzero(turns).tolist():
        orientation, one, found = int(orientations[row]), slice(row, row + 1), status[row : row + 1]
        spans = stored.part(one)
        crop = Crops(boxes[one], np.zeros(1, bool), crops.resizes_first)
        shape = (width, height) if orientation > 4 else (height, width)
        pixels_BHWC = np.empty((1, *shape, channels), np.uint8)
        native(spans, crop, pixels_BHWC, status=found, seek=seek and seek.part(one))
        pixels_HWC = turned(pixels_BHWC[0], orientation)
        out_BHWC[row] = pixels_HWC[:, ::-1] if crops.flips[row] else pixels_HWC


def native_pixels(
    decoder: "core.Decoder",
    stored: EncodedSpans,
    crops: Crops,
    out_BHWC: NDArray[np.uint8],
    *,
    status: NDArray[np.uint8],
    bicubic: bool = False,
    seek: EncodedSpans | None = None,
    rule: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Decodes the images whose status is 0, and sets the status of those that fail.

    `rule`: see CropParameters.rule; without it the boxes are given.
    """
    decoder.decode(
        *stored,
        np.require(crops.boxes, np.float64, ["C", "W"]),
        crops.flips,
        out_BHWC,
        status,
        height=out_BHWC.shape[1],
        width=out_BHWC.shape[2],
        bicubic=bicubic,
        beyond=crops.resizes_first,
        seek=seek,
        channels=out_BHWC.shape[3],
        **rule,
    )


# --- Pillow ---


def _pillow_sizes(
    contents: Sequence[bytes],
    sizes: NDArray[np.int64],
    status: NDArray[np.uint8],
    orientations: Orientations | None,
    *,
    rendering: Rendering,
) -> dict[int, str]:
    """Fills in the sizes, and orientations, of images whose status is not 0.

    Returns the reasons for bad images.
    """
    bad = {}
    for position in np.flatnonzero(status).tolist():
        try:
            sizes[position] = _size(contents[position], rendering)
            if orientations is not None:
                orientations[position] = image_orientation(contents[position])
        except BadImageError as error:
            sizes[position] = 1
            bad[position] = str(error)
    return bad


def _images(
    content: bytes, size: tuple[int, ...], channels: int, rendering: Rendering
) -> list[Image.Image]:
    """The whole image: RGB, luminance, or the channels of a multispectral one, as grey.

    BadImageError if its size, as stored, is not `size`, the one in its header.
    """
    with _blamed(content):
        if channels in OF_PICTURES:
            found = [reference_image(content, channels, rendering)]
        elif (count := num_channels(image := opened(content, rendering.bands))) != channels:
            raise _unlike(count, channels)
        elif isinstance(image, Bands):
            pixels_HWC = _bands_in_8_bits(image, rendering.range)
            found = [Image.fromarray(pixels_HWC[..., each]) for each in range(channels)]
        else:
            found = [*in_8_bits(image, rendering.range).split()]
    if found[0].size != size:
        raise BadImageError("its header and its content differ in size")
    return found


def reference_image(content: bytes, channels: int = 3, rendering: Rendering = PLAIN) -> Image.Image:
    """The whole image by Pillow; grey, palette and CMYK are converted, transparency is laid on
    the background.

    `channels`: 3 for RGB, or 1 for luminance.
    """
    with _blamed(content):
        stored = opened(content, rendering.bands)
        if isinstance(stored, Bands) and stored.channels not in OF_PICTURES:
            raise _unlike(stored.channels, channels)
        image = shown(stored, rendering.range)
        if channels == 3:
            return as_rgb(image, rendering)
        image.draft("L", image.size)  # of a JPEG the Y, without a way through RGB
        return (image if is_grey(image) else as_rgb(image, rendering)).convert("L")


def is_grey_file(content: bytes) -> bool:
    """True for an image of 8-bit grey values alone. BadImageError if it cannot be opened."""
    with _blamed(content):
        return is_grey(shown(opened(content)))


def is_deep_file(content: bytes) -> bool:
    """True for more than 8 bits a channel; False for what cannot be opened."""
    try:
        return is_deep(opened(content))
    except Exception:  # Pillow's plugins raise almost all kinds
        return False


def is_grey(image: Image.Image) -> bool:
    """True for an image of 8-bit grey values alone."""
    return image.mode == "L" and not has_alpha(image)


def has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def num_channels(image: Image.Image | Bands) -> int:
    """Channels of an opened image."""
    return image.channels if isinstance(image, Bands) else len(image.getbands())


def _unlike(found: int, wanted: int) -> BadImageError:
    return BadImageError(
        f"it has {found} channel{'' if found == 1 else 's'}, and data.channels = {wanted}"
    )


@contextmanager
def _blamed(content: bytes) -> Iterator[None]:
    """Inside, any error counts as one of the image: Pillow's plugins raise almost all kinds."""
    try:
        yield
    except (BadImageError, DataError):
        raise
    except Exception as error:
        raise BadImageError(_reason(content, error)) from None


def in_8_bits(image: Image.Image, limits: Limits | None) -> Image.Image:
    """An opened image, with its values mapped from `limits` if it has more than 8 bits a channel.

    Without limits it is not changed, unless the upper 8 bits alone do not tell what is transparent.
    BadImageError if Pillow does not tell its values. It scales a PGM of more than 8 bits to 16.
    """
    if not is_deep(image):
        return image
    if limits is None and has_upper_bits(image):
        if "transparency" not in image.info:
            return image
        limits = _WHOLE
    deep = deep_values(image)
    limits = _own_range(limits, image.info)
    if limits is not None and by_channel(limits):
        raise BadImageError("no array, whose channels the ranges of data.range are of")
    if limits is None or deep is None:
        how = "set data.range" if deep else "Pillow does not tell them, store it as a PNG"
        raise BadImageError(
            f"a {image.format or 'picture'} in {image.mode} of other numbers than 0 to 255: {how}"
        )
    values, opacity_HW = deep
    picture = Image.fromarray(mapped(values, limits))
    if opacity_HW is not None:
        picture.putalpha(Image.fromarray(opacity_HW))
    return picture


def _own_range(limits: Limits | None, info: Mapping[Any, Any]) -> Range | Ranges | None:
    """The limits, for "window" those that a file has itself. BadImageError without them."""
    if limits != "window":
        return limits
    if (found := info.get("window")) is None:
        raise BadImageError("no DICOM image with a window of its own, and data.range = 'window'")
    low, high = found
    return low, high


def as_rgb(image: Image.Image, rendering: Rendering = PLAIN) -> Image.Image:
    """Any Pillow image as 8-bit RGB. BadImageError if its range of values is unknown.

    Pillow's own conversion turns all values above 255 white. Without a range, this one takes the
    upper 8 of 16 bits, as Pillow does for RGB, and floats go from 0 to 1. Transparent pixels have
    no colour of their own, whatever is stored: they show the background.
    """
    image = in_8_bits(image, rendering.range)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        values = deep_values(image)
        assert values is not None
        return _grey(values[0] >> 8)
    if image.mode == "I":
        raise BadImageError("grey of 32-bit integers, of unknown range: set data.range")
    if image.mode == "F":
        pixels = np.asarray(image)
        if not (pixels.min() >= 0 and pixels.max() <= 1):
            raise BadImageError("grey of floats that are not all from 0 to 1: set data.range")
        return _grey(np.rint(pixels * 255))
    if has_alpha(image):
        scale_key(image)
        picture, found = image.convert("RGBA"), Image.new("RGB", image.size, rendering.background)
        found.paste(picture, mask=picture)
        return found
    return image.convert("RGB")


def _grey(pixels_HW: NDArray[Any]) -> Image.Image:
    return Image.fromarray(pixels_HW.astype(np.uint8)).convert("RGB")


def whole_image(content: bytes, rendering: Rendering = PLAIN) -> Image.Image:
    """Any image as RGB, for display; BadImageError also for more than `max_pixels`.

    Of a multispectral image the first three channels; of two the first one.
    """
    with _blamed(content):
        stored = opened(content, rendering.bands)
        _check_size(*stored.size, rendering.max_pixels)
        image = as_rgb(shown(stored, rendering.range), rendering)
    return upright(image, image_orientation(content)) if rendering.exif else image


def _check_size(width: int, height: int, limit: int) -> None:
    if not 0 < width * height <= limit:
        raise BadImageError(
            f"{width} x {height} pixels, and data.max_pixels = {limit}: raise it if it is no "
            "decompression bomb"
        )


def opened(content: bytes, bands: tuple[int, ...] = ()) -> Image.Image | Bands:
    """The image with only its header read; raises almost any error if damaged.

    Bands for a .npy file and for a TIFF that Pillow does not open; with `bands`, which are those
    of it, for any TIFF, and else BadImageError.
    """
    is_array, is_tiff = content.startswith(MAGIC), content.startswith(TIFF_STARTS)
    if not (bands or is_array):
        if content.startswith(PACKED_MAGIC):
            return _unpacked(content)
        try:  # Only known formats: Pillow would hand an EPS to Ghostscript to run.
            return Image.open(io.BytesIO(content), formats=list(IMAGE_FORMATS))
        except Exception:
            if not is_tiff:
                raise
    if not (is_array or is_tiff):
        raise BadImageError("no TIFF and no .npy array, whose channels data.bands names")
    found = open_tiff(content) if is_tiff else open_array(content)
    if max(bands, default=0) > found.channels:
        raise BadImageError(f"it has {found.channels} channels, and data.bands = {[*bands]}")
    if not bands:
        return found
    rows = np.array(bands) - 1
    return found._replace(channels=len(bands), values=lambda: found.values()[..., rows])


def shown(image: Image.Image | Bands, limits: Limits | None = None) -> Image.Image:
    """An opened image; of bands, in 8 bits, the first three, or the first one."""
    if isinstance(image, Image.Image):
        return image
    pixels_HWC = _bands_in_8_bits(image, limits)
    return Image.fromarray(
        np.ascontiguousarray(pixels_HWC[..., :3] if image.channels >= 3 else pixels_HWC[..., 0])
    )


def _bands_in_8_bits(image: Bands, limits: Limits | None) -> NDArray[np.uint8]:
    """uint8[height, width, channels]; BadImageError for other numbers without a range."""
    if not is_deep(image):
        return image.values()
    limits = _own_range(limits, {})
    if limits is None:
        raise BadImageError(f"an array of {image.dtype}: set data.range, or store uint8")
    return mapped(image.values(), limits)


def _unpacked(record: bytes) -> Image.Image:
    if has_pixels(record):
        return Image.fromarray(pixels_of(record))
    return Image.open(io.BytesIO(jpeg_of(record)), formats=("JPEG",))


def _resized(
    images: Sequence[Image.Image],
    crops: Crops,
    shape: tuple[int, ...],
    how: Interpolation,
    *,
    decoder: "core.Decoder | None",
) -> NDArray[np.uint8]:
    """The box of the only crop as pixels of `shape` (height, width, channels), antialiased, flipped
    if it is to be. By the extension if it can: the pixels are then those of a packed record.
    """
    if decoder is not None and max(images[0].size) <= MAX_SIDE:
        out_BHWC, status = np.empty((1, *shape), np.uint8), np.zeros(1, np.uint8)
        record = in_memory([record_of_pixels(np.asarray(images[0]))])
        native_pixels(decoder, record, crops, out_BHWC, status=status, bicubic=how == "bicubic")
        if status[0] == core.OK:
            found: NDArray[np.uint8] = out_BHWC[0]
            return found
    left, top, right, bottom = crops.boxes[0].tolist()
    if not crops.resizes_first:
        x, y = math.floor(left), math.floor(top)
        whole = (x, y, math.ceil(right), math.ceil(bottom))
        images = [image.crop(whole) for image in images]
        left, top, right, bottom = left - x, top - y, right - x, bottom - y
    size, inside = (shape[1], shape[0]), (left, top, right, bottom)
    resized = [np.asarray(image.resize(size, _FILTERS[how], box=inside)) for image in images]
    pixels = np.concatenate([each.reshape(*shape[:2], -1) for each in resized], axis=2)
    return pixels[:, ::-1] if crops.flips[0] else pixels


def _size(content: bytes, rendering: Rendering) -> tuple[int, int]:
    if rendering.max_pixels > MAX_PIXELS:
        Image.MAX_IMAGE_PIXELS = None  # Pillow's limit, of the whole process
    with _blamed(content):
        size = opened(content, rendering.bands).size
    _check_size(*size, rendering.max_pixels)
    return size


def image_orientation(content: bytes) -> int:
    """The orientation of an image file, 1 to 8; 1 if Pillow does not read it."""
    try:
        content = jpeg_head(content) if content.startswith(PACKED_MAGIC) else content
        image = opened(content) if may_be_turned(content) else None
        return orientation_of(image) if isinstance(image, Image.Image) else 1
    except Exception:  # the decoder judges the file
        return 1


def _reason(content: bytes, error: Exception) -> str:
    if not content:
        return "the file is empty"
    if isinstance(error, Image.DecompressionBombError):
        return f"{error} data.max_pixels = {MAX_PIXELS}: raise it if it is none"
    if isinstance(error, UnidentifiedImageError):
        if content[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1"):
            return f"a HEIF image, {needs_plugin('HEIF')}"
        if dicom.is_dicom(content):
            return f"a DICOM image, {needs_plugin('DICOM')}"
        return "not an image"
    return f"{type(error).__name__}: {error}"
