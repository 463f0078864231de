"""Small copies of public data sets, and the truth of each image."""

import csv
import hashlib
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.data.tars import write_files, write_tar
from tests.images import encode

KINDS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".tif": "TIFF", ".ppm": "PPM"}


class Truth(NamedTuple):
    classes: frozenset[str]
    split: str
    """train, val or test; "" for an image without a class, which is no sample."""


class Row(NamedTuple):
    """An image of a copy."""

    path: str  # relative to the copy
    name: str  # of its class
    content: bytes

    @property
    def stem(self) -> str:
        return Path(self.path).stem


class Copy:
    """A copy of a data set in a folder, with the class and split of each image by its SHA-256."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.truth: dict[bytes, Truth] = {}
        self.names: dict[str, str] = {}
        """Names of classes by the numbers that may stand for them."""
        root.mkdir(parents=True)

    def know(self, content: bytes, names: Iterable[str], split: str) -> None:
        self.truth[hashlib.sha256(content).digest()] = Truth(frozenset(names), split)

    def pixels(self, count: int = 1, shape: Sequence[int] = (8, 8, 3)) -> NDArray[np.uint8]:
        """Images unlike all others of the copy: uint8[count, *shape]."""
        random = np.random.default_rng(len(self.truth))
        return random.integers(0, 256, (count, *shape), np.uint8)

    def images(
        self, pattern: str, classes: str = "cat dog", split: str = "train", each: int = 4
    ) -> list[Row]:
        """Images of classes, by a pattern of their paths with {c}, the class, and {i}, a number."""
        rows = self.made(pattern, classes, split, each)
        write_files(self.root, {row.path: row.content for row in rows})
        return rows

    def made(
        self, pattern: str, classes: str = "cat dog", split: str = "train", each: int = 4
    ) -> list[Row]:
        """Such images without a file."""
        rows = []
        for number in range(each * len(classes.split())):
            name = classes.split()[number % len(classes.split())]
            path = pattern.format(c=name, i=len(self.truth) + 1)
            kind = KINDS.get(Path(path).suffix.lower(), "PNG")
            content = encode(Image.fromarray(self.pixels()[0]), kind)
            self.know(content, [name] if split else [], split)
            rows.append(Row(path, name, content))
        return rows

    def no_samples(self, pattern: str, each: int = 4) -> list[Row]:
        """Masks, drawings and images to predict, which have no class."""
        return self.images(pattern, "none", "", each)

    def shadow(self, rows: Iterable[Row], old: str, new: str) -> None:
        """An image without a class beside each of some images, by a change of its path."""
        for row in rows:
            self.no_samples(row.path.replace(old, new), 1)

    def table(self, path: str, rows: Iterable[Iterable[object]], between: str = ",") -> None:
        """A table with a line for each row."""
        file = io.StringIO()
        csv.writer(file, delimiter=between, lineterminator="\n").writerows(rows)
        self.text(path, file.getvalue())

    def text(self, path: str, text: str) -> None:
        write_files(self.root, {path: text.encode()})

    def archive(self, path: str, rows: Sequence[Row], packed: Callable[[bytes], bytes]) -> None:
        """A tar of rows, packed."""
        tar = write_tar(self.root / path, [(row.path, row.content) for row in rows])
        tar.write_bytes(packed(tar.read_bytes()))


class Layout(NamedTuple):
    """A public data set: its copy, and what a person may type."""

    name: str
    build: Callable[[Copy], None]
    words: tuple[str, ...]
    """Options to try after `--data DIR`, which stands for the copy, in order."""
    others: str
    """What other tools make of it."""
    told: str
    """A pattern of the remark, or of the error, that tells a person what to do."""
    note: str
    """What to do in place of words."""


LAYOUTS: list[Layout] = []


def layout(
    name: str, *words: str, others: str = "", told: str = "", note: str = ""
) -> Callable[[Callable[[Copy], None]], Callable[[Copy], None]]:
    """Adds a layout to the table, built by the function below."""

    def add(build: Callable[[Copy], None]) -> Callable[[Copy], None]:
        LAYOUTS.append(Layout(name, build, words, others, told, note))
        return build

    return add
