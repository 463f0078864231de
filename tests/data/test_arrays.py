"""write_images: the pixels and labels of arrays, or an error, and the lines of docs/arrays.md."""

import gzip
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.io import savemat

import trainyard
from tests.data.tars import Patch, open_splits, stored, write_files
from tests.docs.pages import DOCS, blocks
from tests.errors import raises
from trainyard.data.decode.packed_record import pixels_of
from trainyard.data.index.build import open_index

NAMES = ["cat", "ant"]  # sorted otherwise: an index numbers its classes by their sorted names
LABELS = np.array([0, 1, 1, 0, 1])


def pixels(*shape: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("shape", [(5, 6, 7), (5, 6, 7, 1), (5, 6, 7, 3)])
def test_the_pixels_and_labels_are_those_of_the_arrays(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    images = pixels(*shape)
    trainyard.write_images(images, LABELS.tolist(), NAMES, tmp_path / "a/set")
    index = open_index(str(tmp_path / "a/set"))
    assert index.classes == ("ant", "cat")
    for image, label, (name, record) in zip(images, LABELS, stored(index), strict=True):
        assert name == NAMES[label]
        assert np.array_equal(pixels_of(record), image.squeeze())
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["set"]


def test_an_array_on_a_disk_is_read_in_parts(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("trainyard.datasets.arrays._AT_ONCE", 2)
    images = pixels(5, 4, 4, 3)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = images
        trainyard.write_images(file["x"], LABELS[:, None], NAMES, str(tmp_path / "set"))
    records = [record for _, record in stored(tmp_path / "set")]
    assert np.array_equal(np.stack([pixels_of(record) for record in records]), images)


def test_folders_of_splits_are_the_splits(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        trainyard.write_images(pixels(5, 4, 4), LABELS, NAMES, tmp_path / split)
    assert open_splits(tmp_path).keys() == {"train", "val"}


IMAGES = pixels(5, 4, 4, 3)


@pytest.mark.parametrize(
    ("images", "labels", "names", "code", "fields"),
    [
        (IMAGES / 255, LABELS, NAMES, "arrays.wrong-images", {"type": "float64"}),
        (IMAGES.astype(int), LABELS, NAMES, "arrays.wrong-images", {"type": "int64", "hint": ""}),
        (IMAGES.transpose(0, 3, 1, 2), LABELS, NAMES, "arrays.wrong-images", {"type": "uint8"}),
        (IMAGES[0], LABELS, NAMES, "arrays.wrong-labels", {"num_images": 4}),
        (IMAGES[:, 0, 0], LABELS, NAMES, "arrays.wrong-images", {"shape": [5, 3]}),
        (IMAGES[:0], LABELS[:0], NAMES, "arrays.empty-images", {}),
        (IMAGES[:, :0], LABELS, NAMES, "arrays.empty-images", {}),
        (np.zeros((1, 1, 70_000), np.uint8), [0], NAMES, "arrays.empty-images", {}),
        (IMAGES, LABELS[:4], NAMES, "arrays.wrong-labels", {"shape": [4], "num_images": 5}),
        (IMAGES, LABELS * 1.0, NAMES, "arrays.wrong-labels", {"type": "float64"}),
        (IMAGES, np.eye(5, dtype=int), NAMES, "arrays.wrong-labels", {"shape": [5, 5]}),
        (IMAGES, LABELS + 1, NAMES, "arrays.label-without-name", {"number": 1, "label": 2}),
        (IMAGES, LABELS - 1, NAMES, "arrays.label-without-name", {"number": 0, "label": -1}),
        (IMAGES, LABELS, ["cat", "cat"], "arrays.name-twice", {"name": "cat"}),
        (IMAGES, LABELS, "ab", "arrays.wrong-names", {}),
        (IMAGES, LABELS, ["cat", ""], "arrays.wrong-names", {}),
        (IMAGES, LABELS, [0, 1], "arrays.wrong-names", {}),
        (IMAGES, LABELS, {"0": "cat", "1": "dog"}, "arrays.wrong-names", {}),
    ],
)
def test_other_arrays_are_refused(
    images: Any, labels: Any, names: Any, code: str, fields: dict[str, object], tmp_path: Path
) -> None:
    with raises(code, **fields):
        trainyard.write_images(images, labels, names, tmp_path / "set")
    assert not any(tmp_path.iterdir())


def test_a_destination_that_exists_is_refused_and_an_error_leaves_none(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    write_files(tmp_path / "set", ["mine.txt"])
    with raises("arrays.destination-exists", path=tmp_path / "set"):
        trainyard.write_images(IMAGES, LABELS, NAMES, tmp_path / "set")
    with raises("prepare.folder-unwritable", path=tmp_path / "set/mine.txt"):
        trainyard.write_images(IMAGES, LABELS, NAMES, tmp_path / "set/mine.txt/new")
    monkeypatch.setattr("trainyard.datasets.arrays.record_of_pixels", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainyard.write_images(IMAGES, LABELS, NAMES, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


# --- docs/arrays.md ---


class Database:
    """LMDB, which is not installed: two values."""

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self) -> "Database":
        return self

    def cursor(self) -> list[tuple[bytes, bytes]]:
        return [(b"1", b"one"), (b"2", b"two")]


def write_sources() -> None:
    """What the page reads, in the current folder."""
    counted = np.arange(4) % 2
    arrays: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        arrays |= {f"{split}_images": pixels(4, 28, 28, 3), f"{split}_labels": counted[:, None]}
    np.savez("pathmnist.npz", **arrays)
    for split in ("train", "test"):
        y = np.array([[1], [10], [2], [1]])
        savemat(f"{split}_32x32.mat", {"X": pixels(32, 32, 3, 4), "y": y})
        pixels(4, 3, 96, 96).tofile(f"{split}_X.bin")
        (counted + 1).astype(np.uint8).tofile(f"{split}_y.bin")
    savemat("imagelabels.mat", {"labels": [[7, 8, 9]]})
    savemat("setid.mat", {"trnid": [[3, 1]], "valid": [[2]], "tstid": [[]]})
    write_files(Path(), [f"jpg/image_0000{n}.jpg" for n in (1, 2, 3)])
    for name in ("train", "valid", "test"):
        for one, values in (("x", pixels(4, 96, 96, 3)), ("y", counted.reshape(4, 1, 1, 1))):
            with h5py.File(f"camelyonpatch_level_2_split_{name}_{one}.h5", "w") as file:
                file[one] = values
    face = " ".join(map(str, pixels(48 * 48).tolist()))
    usages = ["Training", "Training", "PublicTest", "PrivateTest"]
    lines = [f'{n % 2},"{face}",{usage}' for n, usage in enumerate(usages)]
    rows = [f"{n % 2},{','.join(['7'] * 784)}" for n in range(4)]
    texts = {
        "fer2013.csv": "\n".join(["emotion,pixels,Usage", *lines]),
        "train.csv": "\n".join(["label,pixel0", *rows]),
        "class_names.txt": "airplane\nbird\n",
    }
    write_files(Path(), {name: text.encode() for name, text in texts.items()})
    for split in ("train", "test"):
        for one, content in (
            ("images-idx3", bytes(16) + pixels(2, 28, 28).tobytes()),
            ("labels-idx1", bytes(8) + b"\x01\x1a"),
        ):
            Path(f"emnist-letters-{split}-{one}-ubyte.gz").write_bytes(gzip.compress(content))


def test_the_lines_of_the_page_make_data_sets(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    lmdb = ModuleType("lmdb")
    lmdb.open = lambda *_, **__: Database()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lmdb", lmdb)
    write_sources()
    for block in blocks(DOCS / "arrays.md"):
        exec(block.text, {})
    for name in ("pathmnist", "svhn", "pcam", "fer2013", "stl10"):
        splits = open_splits(tmp_path / name)
        assert splits.keys() == {"train", "val"}, name
    svhn = open_splits(tmp_path / "svhn")["train"]
    assert [name for name, _ in stored(svhn)] == ["1", "0", "2", "1"]
    (_, first), *_ = stored(svhn)
    assert np.array_equal(pixels_of(first), pixels(32, 32, 3, 4)[..., 0])
    (_, first), *_ = stored(open_splits(tmp_path / "stl10")["train"])
    assert np.array_equal(pixels_of(first), pixels(4, 3, 96, 96)[0].transpose(2, 1, 0))
    assert len(open_index("digits")) == 4
    letters = stored(open_splits("emnist")["train"])
    assert [name for name, _ in letters] == ["a", "z"]
    assert np.array_equal(pixels_of(letters[0][1]), pixels(2, 28, 28)[0].T)
    flowers = open_splits("flowers.csv")
    assert [name for name, _ in stored(flowers["train"])] == ["9", "7"]
    assert len(open_index("lsun")) == 4
