"""CIFAR and MNIST from their archives: the pixels and labels that are in them."""

import gzip
import hashlib
import io
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torchvision.datasets import MNIST

from tests.command_line import Capture, run, shown
from tests.data.tars import Patch, open_splits, stored
from tests.errors import check, refused
from tests.mini_imagenet import tar_of
from trainyard.config import load_recipe
from trainyard.data.decode.packed_record import pixels_of
from trainyard.data.index.table import Index
from trainyard.datasets.prepare import cifar, mnist

NAMES = ("cifar10", "cifar100")
CLASSES = {
    "cifar10": [
        *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    ],
    "cifar100": [f"thing_{number:02d}" for number in range(100)],
}
FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
PER_FILE = 40


def records(name: str, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Labels and pixels, as rows of red, then green, then blue."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(CLASSES[name]), PER_FILE, dtype=np.uint8)
    return labels, random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)


def binary(name: str, seed: int) -> bytes:
    labels, pixels = records(name, seed)
    columns = [labels[:, None], pixels]
    if name == "cifar100":
        columns.insert(0, labels[:, None] // 5)  # the coarse label
    return np.hstack(columns).tobytes()


def batch_files(name: str) -> list[str]:
    if name == "cifar100":
        return ["train.bin", "test.bin"]
    return [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def write_archive(name: str, folder: Path, **replaced: bytes) -> Path:
    """The binary version, in miniature."""
    release = cifar.RELEASES[name]
    contents = {file: binary(name, seed) for seed, file in enumerate(batch_files(name))}
    contents[release.class_names] = ("\n".join(CLASSES[name]) + "\n\n").encode()
    contents |= {file.replace("__", "."): content for file, content in replaced.items()}
    path = folder / release.archive
    tar = tar_of({f"{FOLDERS[name]}/{file}": content for file, content in contents.items()})
    path.write_bytes(gzip.compress(tar, mtime=0))
    return path


def pairs_in(index: Index, mode: str = "RGB") -> list[tuple[int, bytes]]:
    """Sorted (label, pixels) of a data set of packed pixels."""
    pairs = []
    for label, (_, content) in zip(index.label.tolist(), stored(index), strict=True):
        assert Image.fromarray(pixels_of(content)).mode == mode
        pairs.append((label, pixels_of(content).tobytes()))
    return sorted(pairs)


@pytest.mark.parametrize(("name", "num_train"), [("cifar10", 5), ("cifar100", 1)])
def test_pixels_and_labels(name: str, num_train: int, tmp_path: Path) -> None:
    archive = write_archive(name, tmp_path)
    assert run("data", "prepare", name, archive, tmp_path / "out", "--no-checksum") == 0
    splits = open_splits(tmp_path / "out")
    assert splits.keys() == {"train", "val"}
    for split, seeds in (("train", range(num_train)), ("val", [num_train])):
        expected = [
            (label, pixels.reshape(3, 32, 32).transpose(1, 2, 0).tobytes())
            for seed in seeds
            for label, pixels in zip(*records(name, seed), strict=True)
        ]
        assert pairs_in(splits[split]) == sorted(expected)
        assert list(splits[split].classes) == CLASSES[name]
    assert not (tmp_path / "out" / ".prepare").exists()


def test_the_recipe_finds_the_shards_and_a_folder_of_pngs_is_made_of_them(
    tmp_path: Path, capsys: Capture
) -> None:
    """The images of the folder, by path, are those of the shard, by number."""
    write_archive("cifar10", tmp_path)
    words = ("data", "prepare", "cifar10", tmp_path, tmp_path / "out", "--no-checksum")
    assert "200 samples" in shown(capsys, *words)
    assert run(*words) == 0  # done already
    train = load_recipe("cifar10-94").data.train
    assert isinstance(train, str) and (tmp_path / "out" / Path(train).name).exists()
    options = ("--format", "folder", "--no-shuffle", "--workers", 1)
    assert run("data", "pack", tmp_path / "out", tmp_path / "png", *options) == 0
    assert len(list((tmp_path / "png" / "val").glob("*/*.png"))) == PER_FILE
    packed, folder = (open_splits(tmp_path / place)["train"] for place in ("out", "png"))
    assert packed.label.tolist() == folder.label.tolist()
    for (_, record), (_, image) in zip(stored(packed), stored(folder), strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(image)))
        assert np.array_equal(pixels_of(record), pixels)


@pytest.mark.parametrize("name", NAMES)
def test_another_archive_is_refused(name: str, tmp_path: Path) -> None:
    words = ("data", "prepare", name, tmp_path, tmp_path / "out")
    release = cifar.RELEASES[name]
    check(refused(*words), "prepare.missing-file", path=tmp_path, name=release.archive)
    archive = write_archive(name, tmp_path)
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    check(refused(*words), "prepare.wrong-md5", path=archive, md5=md5, expected=release.md5)
    archive.write_bytes(archive.read_bytes()[:50_000])
    check(refused(*words, "--no-checksum"), "prepare.archive-unreadable", path=archive)


@pytest.mark.parametrize(
    ("replaced", "split"),
    [
        ({"test_batch__bin": b"\1" * 3072}, "val"),
        ({"data_batch_2__bin": b""}, "train"),
        ({"test_batch__bin": b"\x0a" + bytes(3072)}, "val"),
        ({"batches__meta__txt": b"cat\n"}, "train"),
    ],
)
def test_a_damaged_archive(replaced: dict[str, bytes], split: str, tmp_path: Path) -> None:
    archive = write_archive("cifar10", tmp_path, **replaced)
    words = ("data", "prepare", "cifar10", archive, tmp_path / "out", "--no-checksum")
    check(refused(*words), "prepare.not-cifar", path=archive, split=split)
    assert not list(tmp_path.glob("out/*.packed"))


def test_the_official_counts_are_checked(tmp_path: Path, monkeypatch: Patch) -> None:
    archive = write_archive("cifar10", tmp_path)
    monkeypatch.setattr("trainyard.datasets.prepare.preparation.check_md5", lambda *_: None)
    check(
        refused("data", "prepare", "cifar10", archive, tmp_path / "out"),
        "prepare.wrong-image-count",
        path=archive,
    )


# --- MNIST and Fashion-MNIST, from IDX files ---

IDX_COUNT = 40


def idx(array: NDArray[np.uint8]) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_idx_files(
    folder: Path, suffix: str = "", replaced: dict[str, bytes] | None = None
) -> Path:
    """The four files in miniature, in torchvision's layout."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for prefix in ("train", "t10k"):
        contents = {
            f"{prefix}-images-idx3-ubyte": idx(
                random.integers(0, 256, (IDX_COUNT, 28, 28), dtype=np.uint8)
            ),
            f"{prefix}-labels-idx1-ubyte": idx(random.integers(0, 10, IDX_COUNT, dtype=np.uint8)),
        }
        for name, content in contents.items():
            content = (replaced or {}).get(name, content)
            file = gzip.compress(content) if suffix else content
            (raw / f"{name}{suffix}").write_bytes(file)
    return raw


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_has_the_pixels_and_labels_of_torchvision(
    name: str, suffix: str, tmp_path: Path
) -> None:
    words = ("data", "prepare", name, write_idx_files(tmp_path, suffix), tmp_path / "out")
    assert run(*words, "--no-checksum") == 0
    splits = open_splits(tmp_path / "out")
    plain = tmp_path if not suffix else tmp_path / "plain"
    if suffix:
        write_idx_files(plain)
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
        (LABELS, idx(np.full(IDX_COUNT, 10, np.uint8)), "prepare.label-too-large"),
        (LABELS, idx(np.zeros(3, np.uint8)), "prepare.image-label-mismatch"),
        (PIXELS, b"\0\0\10\3", "prepare.not-idx"),
        (PIXELS, idx(np.zeros((2, 3, 3), np.uint8))[:-1], "prepare.wrong-idx-size"),
    ],
)
def test_damaged_files_of_mnist(file: str, content: bytes, code: str, tmp_path: Path) -> None:
    raw = write_idx_files(tmp_path, replaced={file: content})
    check(refused("data", "prepare", "mnist", raw, tmp_path / "out", "--no-checksum"), code)
    assert not list(tmp_path.glob("out/*.packed"))


def test_another_release_of_mnist_is_refused(tmp_path: Path) -> None:
    raw, out = write_idx_files(tmp_path), tmp_path / "out"
    for name, source, code in (
        ("fashion-mnist", raw, "prepare.wrong-unpacked-md5"),
        ("mnist", raw, "prepare.wrong-image-count"),
        ("mnist", tmp_path, "prepare.missing-file"),
    ):
        check(refused("data", "prepare", name, source, out), code)
