"""The input of a format's writer."""

from typing import NamedTuple


class EncodedSample(NamedTuple):
    """The content of an image file, to be written into a shard."""

    image: bytes
    suffix: str  # by the file type of the bytes: ".jpg", ".png", …
    label: int
    key: str  # unique in the data set, without dots or slashes
    labels: list[int] | None = None  # any number of classes instead of `label`
