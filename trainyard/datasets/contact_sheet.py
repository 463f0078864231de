"""Random samples of a data set to look at, as a contact sheet."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from trainyard.data.decode.decode import BadImageError, whole_image
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader, read_ahead
from trainyard.data.rng import fold_in, permute
from trainyard.files import atomic_write

Ids = NDArray[np.int64]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_PIXELS = 1_600_000  # of a whole sheet, roughly
CHAT_PIXELS = 600_000  # of one whose letters can be read when it is 600 pixels wide
_SIDES = 64, 400  # pixels of a tile, from and to
_GAP, _MARGIN, _HEAD = 14, 24, 64  # pixels
_PAPER, _GROUND, _INK, _FAINT, _RED = "#ffffff", "#ececec", "#202020", "#767676", "#c62828"


def random_samples(index: Index, count: int, seed: int, label: int | None = None) -> Ids:
    """Ids of up to `count` distinct samples, of one class or all; equal on every machine."""
    known = np.arange(len(index)) if label is None else index.of_class(label)
    positions = np.arange(min(count, len(known)))
    if not len(positions):
        return positions
    keys = fold_in(seed, np.zeros(len(positions), np.int64))
    return known[permute(positions, keys, len(known))]


def save_sheet(path: Path, sheet: Image.Image) -> None:
    """Writes a sheet as a PNG. OSError if it cannot be written."""
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    with atomic_write(path, len(buffer.getvalue())) as file:
        file.write(buffer.getvalue())


class Tile(NamedTuple):
    picture: Image.Image | str
    """An image, or the reason why there is none."""
    name: str
    detail: str


def contact_sheet(index: Index, samples: Ids, columns: int, title: Sequence[str]) -> Image.Image:
    """The samples as tiles with their classes and ids, 1 to 2 megapixels; `title` is two lines."""
    contents = read_ahead(Reader(index), samples)
    each = zip(samples.tolist(), contents, strict=True)
    tiles = (stored_tile(index, sample, content) for sample, content in each)
    return sheet_of(tiles, columns, title, count=len(samples))


def sheet_of(
    tiles: Iterable[Tile],
    columns: int,
    title: Sequence[str],
    *,
    count: int,
    pixels: int = _PIXELS,
) -> Image.Image:
    """`count` tiles as a sheet of about so many pixels, row by row; `title` is two lines."""
    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    style = _style(pixels / (rows * columns))
    width = 2 * _MARGIN + columns * (style.side + _GAP) - _GAP
    height = _MARGIN + _HEAD + rows * (style.side + style.caption + _GAP) - _GAP + _MARGIN
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for line, y, size, ink in zip(title, (0, 30), (22, 15), (_INK, _FAINT), strict=True):
        font = ImageFont.load_default(size)
        text = shortened(line, font, width - 2 * _MARGIN)
        draw.text((_MARGIN, _MARGIN - 4 + y), text, ink, font)
    for position, tile in enumerate(tiles):
        row, column = divmod(position, columns)
        left = _MARGIN + column * (style.side + _GAP)
        top = _MARGIN + _HEAD + row * (style.side + style.caption + _GAP)
        sheet.paste(_drawn(tile, style), (left, top))
    return sheet


class _Style(NamedTuple):
    side: int  # pixels of the square around the image
    caption: int  # pixels below it
    name: Font
    detail: Font


def _style(pixels: float) -> _Style:
    """Of a tile with so many pixels."""
    side = min(max(round(math.sqrt(pixels / 1.2)) - _GAP, _SIDES[0]), _SIDES[1])
    size = min(max(side // 10, 10), 16)  # of the letters, pixels
    name, detail = ImageFont.load_default(size), ImageFont.load_default(size - 2)
    return _Style(side, 2 * size + 14, name, detail)


def stored_tile(index: Index, sample: int, content: bytes | OSError) -> Tile:
    """The tile of a stored image with its classes, id and size."""
    name, detail = ", ".join(index.class_names(sample)), f"#{sample}"
    try:
        if isinstance(content, OSError):
            raise content
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")
            image = whole_image(content)
    except (OSError, BadImageError) as error:
        return Tile(str(error), name, detail)
    return Tile(image, name, f"{detail}  ·  {image.width} x {image.height}")


def _drawn(tile: Tile, style: _Style) -> Image.Image:
    drawn = Image.new("RGB", (style.side, style.side + style.caption), _PAPER)
    draw = ImageDraw.Draw(drawn)
    draw.rectangle((0, 0, style.side - 1, style.side - 1), _GROUND)
    if isinstance(tile.picture, str):
        _write(draw, tile.picture, style)
    else:
        image = _fitted(tile.picture, style.side)
        drawn.paste(image, ((style.side - image.width) // 2, (style.side - image.height) // 2))
    top = style.side + 5
    draw.text((0, top), shortened(tile.name, style.name, style.side), _INK, style.name)
    top += round(style.caption / 2) - 3
    draw.text((0, top), shortened(tile.detail, style.detail, style.side), _FAINT, style.detail)
    return drawn


def _fitted(image: Image.Image, side: int) -> Image.Image:
    """The image scaled to fit a square; a small one is enlarged by a whole factor, unsmoothed."""
    factor = side / max(image.size)
    if factor >= 1:
        times = int(factor)
        size = image.width * times, image.height * times
        return image.resize(size, Image.Resampling.NEAREST)
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)


def _write(draw: ImageDraw.ImageDraw, reason: str, style: _Style) -> None:
    """Writes the reason in place of an image that cannot be shown."""
    lines = textwrap.wrap(reason, style.side // 7)[:4]  # a letter is 6 to 7 pixels wide
    text = "\n".join(shortened(line, style.detail, style.side - 16) for line in lines)
    middle = style.side / 2, style.side / 2
    draw.multiline_text(middle, text, _RED, style.detail, "mm", align="center")


def shortened(text: str, font: Font, width: float) -> str:
    """The text, cut with an ellipsis if it is wider than `width` pixels."""
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
