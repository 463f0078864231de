"""CIFAR and MNIST from their archives: the pixels and labels that are in them."""

import gzip
import hashlib
import io
import pickle
import shutil
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torchvision.datasets import MNIST

from tests.command_line import Capture, run
from tests.data.tars import Patch, open_splits, stored, write_files
from tests.errors import check, refused
from tests.mini_imagenet import tar_of
from trainyard.config import load_recipe
from trainyard.data.decode.packed_record import pixels_of
from trainyard.data.index.table import Index
from trainyard.data.storage.manifest import read_manifest
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


def pairs_of(name: str, seeds: Iterable[int]) -> list[tuple[int, bytes]]:
    """Sorted (label, pixels) of the records of seeds."""
    return sorted(
        (label, pixels.reshape(3, 32, 32).transpose(1, 2, 0).tobytes())
        for seed in seeds
        for label, pixels in zip(*records(name, seed), strict=True)
    )


@pytest.mark.parametrize(("name", "num_train"), [("cifar10", 5), ("cifar100", 1)])
def test_pixels_and_labels(name: str, num_train: int, tmp_path: Path) -> None:
    archive = write_archive(name, tmp_path)
    assert run("data", "prepare", name, archive, tmp_path / "out", "--no-checksum") == 0
    splits = open_splits(tmp_path / "out")
    assert splits.keys() == {"train", "val"}
    for split, seeds in (("train", range(num_train)), ("val", [num_train])):
        assert pairs_in(splits[split]) == pairs_of(name, seeds)
        assert list(splits[split].classes) == CLASSES[name]
    assert not (tmp_path / "out" / ".prepare").exists()


def test_the_recipe_finds_the_shards_and_a_folder_of_pngs_is_made_of_them(
    tmp_path: Path, capsys: Capture
) -> None:
    """The images of the folder, by path, are those of the shard, by number."""
    write_archive("cifar10", tmp_path)
    words = ("data", "prepare", "cifar10", tmp_path, tmp_path / "out", "--no-checksum")
    assert run(*words) == 0
    said = capsys.readouterr()
    assert "200 samples" in said.out
    assert ("200 images" in said.err, "50,000" in said.err) == (True, True)
    assert run(*words) == 0  # done already
    train = load_recipe("cifar10-94").data.train
    assert isinstance(train, str) and (tmp_path / "out" / Path(train).name).exists()
    options = ("--format", "folder", "--no-shuffle", "--processes", 1)
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
    both = f"{release.archive} and no {cifar.PICKLED[name].archive}"
    check(refused(*words), "prepare.missing-file", path=tmp_path, name=both)
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


def test_another_count_than_the_official_one_is_told_and_not_called_official(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    archive = write_archive("cifar10", tmp_path)
    monkeypatch.setattr("trainyard.datasets.prepare.preparation.check_md5", lambda *_: None)
    assert run("data", "prepare", "cifar10", archive, tmp_path / "out") == 0
    assert "40 images for val" in capsys.readouterr().err
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None
    assert manifest.about["official"] is False


# --- the Python version ---


def arrays(name: str, seed: int, protocol: int = 2) -> bytes:
    labels, pixels = records(name, seed)
    key = b"labels" if name == "cifar10" else b"fine_labels"
    other = {b"batch_label": b"testing batch 1 of 1", b"filenames": [b"a.png"] * PER_FILE}
    return pickle.dumps({**other, b"data": pixels, key: labels.tolist()}, protocol)


def of_python_2(name: str, seed: int) -> bytes:
    """A batch as the official files have it: by NumPy of that time, with byte strings."""
    labels, pixels = records(name, seed)
    key = b"labels" if name == "cifar10" else b"fine_labels"

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b")
    array += b"\x87R(K\1M(\0M\0\x0c\x86cnumpy\ndtype\n" + text(b"u1") + b"K\0K\1\x87R"
    array += b"(K\3" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89T"
    array += struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels.tolist()) + b"e"
    return b"\x80\2}(" + text(b"data") + array + text(key) + numbers + b"u."


def write_pickles(name: str, folder: Path, **replaced: bytes) -> Path:
    """The folder of the Python version, in miniature; with batches of every kind."""
    release = cifar.PICKLED[name]
    files = [*release.files["train"], *release.files["val"]]
    contents = {
        file: of_python_2(name, seed) if seed < 2 else arrays(name, seed, protocol=seed)
        for seed, file in enumerate(files)
    }
    names = [one.encode() for one in CLASSES[name]]
    contents[release.class_names] = pickle.dumps({release.keys[1].encode(): names}, 2)
    write_files(folder, contents | replaced)
    return folder


@pytest.mark.parametrize(("name", "num_train"), [("cifar10", 5), ("cifar100", 1)])
@pytest.mark.parametrize("kind", ["archive", "folder", "folder of it"])
def test_pickles_have_the_pixels_and_labels_of_the_binary_version(
    name: str, num_train: int, kind: str, tmp_path: Path
) -> None:
    folder = source = write_pickles(name, tmp_path / "raw" / "batches")
    if kind == "archive":
        source = tmp_path / cifar.PICKLED[name].archive
        members = {f"batches/{path.name}": path.read_bytes() for path in folder.iterdir()}
        source.write_bytes(gzip.compress(tar_of(members), mtime=0))
    elif kind == "folder of it":
        source = tmp_path / "raw"
    assert run("data", "prepare", name, source, tmp_path / "out", "--no-checksum") == 0
    splits = open_splits(tmp_path / "out")
    for split, seeds in (("train", range(num_train)), ("val", [num_train])):
        assert pairs_in(splits[split]) == pairs_of(name, seeds)
        assert list(splits[split].classes) == CLASSES[name]


def test_the_unpacked_binary_version_is_read(tmp_path: Path) -> None:
    archive = write_archive("cifar100", tmp_path)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "raw", filter="data")
    words = (tmp_path / "raw/cifar-100-binary", tmp_path / "out", "--no-checksum")
    assert run("data", "prepare", "cifar100", *words) == 0
    assert pairs_in(open_splits(tmp_path / "out")["val"]) == pairs_of("cifar100", [1])


def calling(name: str, *arguments: object) -> bytes:
    """A pickle that calls a function."""
    module, _, function = name.rpartition(".")
    stack = pickle.dumps(arguments, 2)[2:-1]  # without its head and its stop
    return b"\x80\2c" + f"{module}\n{function}\n".encode() + stack + b"R."


HOSTILE = {
    "a function": calling("os.system", "touch ran"),
    "a built-in": calling("builtins.eval", "open('ran', 'w')"),
    "a part of a name": b"\x80\4\x8c\5numpy\x8c\x12dtype.__subclasses__\x93)R.",
    "another of NumPy": calling("numpy.load", "x.npy"),
    "an object of its own": b"cos\nsystem\n)\x81.",
    "an instance": b"(S'touch ran'\nios\nsystem\n.",
    "an extension": b"\x80\2\x82\1.",
    "a persistent id": b"Pos.system\n.",
    "a codec": calling("_codecs.encode", "x", "zip"),
    "an attribute of a name": b"\x80\2cnumpy\ndtype\nN}U\4nameU\6systems\x86b.",
    "no dict": pickle.dumps([1], 2),
    "an array of objects": pickle.dumps({b"data": np.array([{}, {}]), b"labels": [0, 1]}, 2),
    "floats": pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, 2),
    "labels too large": pickle.dumps({b"data": np.zeros(3072, "u1"), b"labels": [256]}, 2),
    "labels between numbers": pickle.dumps(
        {b"data": np.zeros((2, 3072), "u1"), b"labels": [0.5, 1]}, 2
    ),
    "fewer pixels": pickle.dumps({b"data": np.zeros((1, 3071), "u1"), b"labels": [0]}, 2),
    "pixels in a list": pickle.dumps({b"data": [[7] * 3072], b"labels": [0]}, 2),
    "no labels": pickle.dumps({b"data": np.zeros((1, 3072), "u1")}, 2),
    "tuples in tuples": b"\x80\2}K\1" + b"\x85" * 2_000_000 + b"K\1s.",
    "a cut": arrays("cifar10", 0)[:1000],
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pickle_runs_nothing_and_is_refused(
    kind: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_pickles("cifar10", tmp_path / "raw", test_batch=HOSTILE[kind])
    words = ("data", "prepare", "cifar10", source, tmp_path / "out", "--no-checksum")
    check(refused(*words), "prepare.pickle-refused", path=source, file="test_batch")
    write_pickles("cifar10", tmp_path / "raw", **{"batches.meta": HOSTILE[kind]})
    check(refused(*words), "prepare.pickle-refused", path=source, file="batches.meta")
    assert not (tmp_path / "ran").exists()
    assert not list(tmp_path.glob("out/*.packed"))


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
    raw.mkdir(parents=True, exist_ok=True)
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
        ("mnist", raw / "none", "prepare.missing-file"),
    ):
        check(refused("data", "prepare", name, source, out), code)


@pytest.mark.parametrize("source", [".", "MNIST", "MNIST/raw"])
def test_a_small_mnist_is_found_and_its_count_is_told(
    source: str, tmp_path: Path, capsys: Capture
) -> None:
    write_idx_files(tmp_path / "set", ".gz" if source == "." else "")
    assert run("data", "prepare", "mnist", tmp_path / "set" / source, tmp_path / "out") == 0
    assert "40 images for train; the published data set has 60,000" in capsys.readouterr().err


def test_the_names_of_other_copies_of_mnist(tmp_path: Path) -> None:
    """train-images.idx3-ubyte, and on Kaggle a folder of this name with the file in it."""
    raw = write_idx_files(tmp_path / "set")
    for path in sorted(raw.iterdir()):
        name = path.name.replace("-idx", ".idx")
        path.rename(raw / name)
        write_files(tmp_path / "kaggle", {f"{path.name}/{path.name}": (raw / name).read_bytes()})
    for number, source in enumerate((raw, tmp_path / "kaggle")):
        assert run("data", "prepare", "mnist", source, tmp_path / f"{number}") == 0
    first, second = (pairs_in(open_splits(tmp_path / f"{n}")["val"], "L") for n in (0, 1))
    assert first == second
    assert len(first) == IDX_COUNT


def test_the_files_of_two_data_sets_are_refused(tmp_path: Path) -> None:
    """torchvision keeps MNIST and FashionMNIST in one folder, under the same names."""
    raw = write_idx_files(tmp_path / "set")
    write_idx_files(tmp_path / "set", ".gz")  # beside the others
    words = ("data", "prepare", "mnist", tmp_path / "set")
    assert run(*words, tmp_path / "out") == 0
    shutil.copytree(raw, tmp_path / "set/FashionMNIST/raw")
    names = [
        str(tmp_path / f"set/{one}/raw/train-images-idx3-ubyte")
        for one in ("FashionMNIST", "MNIST")
    ]
    check(refused(*words, tmp_path / "new"), "prepare.several-files", names=" and ".join(names))
