"""MNIST and Fashion-MNIST from IDX files: the pixels and labels that torchvision reads."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from torchvision.datasets import MNIST

from tests.command_line import run
from tests.data.tars import open_splits
from tests.data.test_cifar import pairs_in
from tests.errors import check, refused
from trainyard.datasets.prepare import mnist

COUNT = 40


def idx(array: NDArray[np.uint8]) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_files(folder: Path, suffix: str = "", replaced: dict[str, bytes] | None = None) -> Path:
    """The four files in miniature, in torchvision's layout."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for prefix in ("train", "t10k"):
        contents = {
            f"{prefix}-images-idx3-ubyte": idx(
                random.integers(0, 256, (COUNT, 28, 28), dtype=np.uint8)
            ),
            f"{prefix}-labels-idx1-ubyte": idx(random.integers(0, 10, COUNT, dtype=np.uint8)),
        }
        for name, content in contents.items():
            content = (replaced or {}).get(name, content)
            file = gzip.compress(content) if suffix else content
            (raw / f"{name}{suffix}").write_bytes(file)
    return raw


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_pixels_and_labels_are_those_of_torchvision(name: str, suffix: str, tmp_path: Path) -> None:
    words = ("data", "prepare", name, write_files(tmp_path, suffix), tmp_path / "out")
    assert run(*words, "--no-checksum") == 0
    splits = open_splits(tmp_path / "out")
    plain = tmp_path if not suffix else tmp_path / "plain"
    if suffix:
        write_files(plain)
    for split, index in splits.items():
        theirs = MNIST(plain, train=split == "train")
        images = zip(theirs.targets.tolist(), theirs.data.numpy(), strict=True)
        classes = mnist.RELEASES[name].classes  # those of an index are sorted by name
        labels = [classes.index(str(name)) for name in index.classes or ()]
        pairs = sorted((labels[label], pixels) for label, pixels in pairs_in(index, "L"))
        assert pairs == sorted((label, image.tobytes()) for label, image in images)


LABELS, PIXELS = "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        (LABELS, idx(np.full(COUNT, 10, np.uint8)), "prepare.label-too-large"),
        (LABELS, idx(np.zeros(3, np.uint8)), "prepare.image-label-mismatch"),
        (PIXELS, b"\0\0\10\3", "prepare.not-idx"),
        (PIXELS, idx(np.zeros((2, 3, 3), np.uint8))[:-1], "prepare.wrong-idx-size"),
    ],
)
def test_damaged_files(file: str, content: bytes, code: str, tmp_path: Path) -> None:
    raw = write_files(tmp_path, replaced={file: content})
    check(refused("data", "prepare", "mnist", raw, tmp_path / "out", "--no-checksum"), code)
    assert not list(tmp_path.glob("out/*.packed"))


def test_another_release_is_refused(tmp_path: Path) -> None:
    raw, out = write_files(tmp_path), tmp_path / "out"
    for name, source, code in (
        ("fashion-mnist", raw, "prepare.wrong-unpacked-md5"),
        ("mnist", raw, "prepare.wrong-image-count"),
        ("mnist", tmp_path, "prepare.missing-file"),
    ):
        check(refused("data", "prepare", name, source, out), code)
