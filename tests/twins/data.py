"""The small data sets that rows read, one for each format, made once by the second edition."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tests.twins.editions import Edition

_FORMATS = ("webdataset", "tfrecord", "hdf5", "packed", "parquet")


def make_data(edition: Edition, folder: Path) -> None:
    if folder.exists():
        return
    part = folder.with_name("data.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _call(edition, part, "data", "prepare", "digits", "digits")
    for name in _FORMATS:
        words = ("--format", name, "--shard-samples", "400", "--workers", "2")
        _call(edition, part, "data", "pack", "digits", name, *words)
    _photographs(part)
    _arrays(part)
    _lists(part)
    for split in ("train", "val"):
        for label in ("0", "1", "2"):
            shutil.copytree(part / f"digits/{split}/{label}", part / f"three/{split}/{label}")
    part.rename(folder)


def _call(edition: Edition, folder: Path, *words: str) -> None:
    subprocess.run(
        edition.command(words),
        cwd=folder,
        env=edition.variables(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _digits(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for path in sorted(folder.glob("digits/*/*/*.png")):
        yield path.parent.parent.name, path.parent.name, path


def _photographs(folder: Path) -> None:
    """JPEGs of several sizes, one of them in grey, and one that is turned."""
    rng = np.random.default_rng(0)
    for split, label, path in _digits(folder):
        if int(path.stem) % 5 == 0:
            height, width = rng.integers(40, 120, 2)
            noise = rng.integers(0, 60, (height, width, 3))
            digit = np.asarray(Image.open(path).resize((width, height)).convert("RGB"))
            image = Image.fromarray((digit * 0.75 + noise).astype(np.uint8))
            target = folder / f"photographs/{split}/{label}/{path.stem}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            image = image.convert("L") if int(path.stem) % 35 == 0 else image
            exif = Image.Exif()
            exif[0x112] = 6 if int(path.stem) % 25 == 0 else 1
            image.save(target, quality=87, exif=exif)


def _arrays(folder: Path) -> None:
    """Images of four channels."""
    for split, label, path in _digits(folder):
        grey = np.asarray(Image.open(path))
        target = folder / f"arrays/{split}/{label}/{path.stem}.npy"
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, np.stack([grey, grey.T, 255 - grey, grey // 2], axis=2))


def _lists(folder: Path) -> None:
    """Each image with its digit, and "even" or "odd"."""
    shutil.copytree(folder / "digits", folder / "lists/images")
    for split in ("train", "val"):
        rows = [
            f"images/{split}/{label}/{path.name},{label}|{'odd' if int(label) % 2 else 'even'}"
            for where, label, path in _digits(folder)
            if where == split
        ]
        (folder / f"lists/{split}.csv").write_text("\n".join(["path,labels", *rows]) + "\n")
