"""1,797 scanned handwritten digits as an image folder: a first data set.

digits.csv.gz is scikit-learn's copy of the test part of E. Alpaydin and C. Kaynak, Optical
Recognition of Handwritten Digits (1998), UCI Machine Learning Repository, under CC BY 4.0. A line
has the 64 pixels of an image, row by row, and its class.
"""

import gzip
import tempfile
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image

from trainyard.datasets.prepare.preparation import make_folder
from trainyard.errors import DataError
from trainyard.files import writing

_VAL_EVERY = 5  # every fifth image of a class is for validation


def prepare_digits(destination: Path) -> dict[str, int]:
    """Writes train/CLASS/*.png and val/CLASS/*.png (8 x 8 pixels, grey); returns images per split.

    The folder appears complete or not at all; an existing one is not changed.
    """
    if not destination.exists():
        images, labels = _load()
        make_folder(destination.parent)
        with (
            tempfile.TemporaryDirectory(dir=destination.parent, prefix=".digits-") as part,
            writing(destination, part=Path(part)),
        ):
            _write(Path(part) / "digits", images, labels)
            (Path(part) / "digits").rename(destination)
    counts = {split: len(list(destination.glob(f"{split}/*/*.png"))) for split in ("train", "val")}
    if sum(counts.values()) != 1797:
        raise DataError(
            "prepare.wrong-digit-count",
            "{path}: holds {num_train} and {num_val} digits instead of 1433 and 364; remove the "
            "folder or choose another",
            path=destination,
            num_train=counts["train"],
            num_val=counts["val"],
        )
    return counts


def _load() -> tuple[np.ndarray, np.ndarray]:
    packed = resources.files(__package__).joinpath("digits.csv.gz").read_bytes()
    rows = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.int64)
    # Stored as ink from 0 to 16 at 8 x 8 pixels.
    images = np.rint(rows[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return images, rows[:, 64]


def _write(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    for label in range(10):
        for number, position in enumerate(np.flatnonzero(labels == label)):
            split = "val" if number % _VAL_EVERY == 0 else "train"
            path = folder / split / str(label) / f"{position:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[position]).save(path)
