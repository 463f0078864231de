"""What a format's writer takes."""

from typing import NamedTuple


class Encoded(NamedTuple):
    """An image file's content on its way into a shard."""

    image: bytes
    suffix: str  # of the file type that the bytes are: ".jpg", ".png", …
    label: int
    key: str  # unique in the data set, without dots or slashes
