"""Sizes of images: squares and rectangles."""

ImageSize = int | tuple[int, int]
"""The side of a square, or height and width, in pixels."""


def height_width(size: ImageSize) -> tuple[int, int]:
    """Height and width of images of a size."""
    return (size, size) if isinstance(size, int) else size


def num_pixels(size: ImageSize) -> int:
    """Pixels of an image of a size."""
    height, width = height_width(size)
    return height * width


def size_text(size: ImageSize) -> str:
    """A size as in a recipe: "224", or "[128, 256]"."""
    return str(size) if isinstance(size, int) else str(list(size))


def parse_size(text: str) -> ImageSize:
    """The size of a text, as `size_text` writes it. ValueError if it is none."""
    if not text.startswith("["):
        return int(text)
    height, width = map(int, text.strip("[]").split(","))
    return as_size(height, width)


def as_size(height: int, width: int) -> ImageSize:
    """The size of images of `height` x `width` pixels; a square has one number."""
    return height if height == width else (height, width)
