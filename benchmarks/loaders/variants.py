"""The photographs in every format that a loader asks for, made once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.loaders.environments import python_of
from benchmarks.loaders.photographs import make_photographs

_SHARD = 250  # samples; several shards to shuffle
_SMALL = ("--short", "256", "--quality", "90")


def data_of(folder: Path) -> Path:
    return folder / "data"


def make_source(folder: Path, count: int) -> Path:
    """The photographs; made anew, with all that is made of them, if there are not as many."""
    place = data_of(folder) / "photographs"
    if len(list(place.glob("*/*.jpg"))) != count:
        shutil.rmtree(data_of(folder), ignore_errors=True)
        make_photographs(place, count, workers=len(os.sched_getaffinity(0)))
    return place


def _pack(source: str, *options: str) -> Callable[[Path, Path], None]:
    def make(folder: Path, out: Path) -> None:
        words = [sys.executable, "-m", "trainyard", "data", "pack"]
        words += [str(data_of(folder) / source), str(out), "--shard-samples", str(_SHARD), *options]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

    return make


def _small_folder(folder: Path, out: Path) -> None:
    """A folder of classes, without a split above them, as `photographs` is."""
    packed = out.with_name("small-packed-folder")
    _pack("photographs", "--format", "folder", *_SMALL)(folder, packed)
    (packed / "train").rename(out)
    shutil.rmtree(packed)


def _with_seek(variant: str) -> Callable[[Path, Path], None]:
    """The same files by hard links, with a seek table beside their index."""

    def make(folder: Path, out: Path) -> None:
        shutil.copytree(
            data_of(folder) / variant,
            out,
            copy_function=os.link,
            ignore=shutil.ignore_patterns(".*", "*.tyindex*"),
        )
        words = [sys.executable, "-m", "trainyard", "data", "index", str(out), "--seek"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

    return make


def _by_peer(peer: str, function: str, source: str) -> Callable[[Path, Path], None]:
    def make(folder: Path, out: Path) -> None:
        write_by_peer(folder, peer, data_of(folder) / source, out, function)

    return make


def write_by_peer(
    folder: Path, peer: str, source: Path, out: Path, function: str = "write"
) -> None:
    """The images of class folders, by a peer's own writer in its environment in `folder`."""
    python = python_of(folder, peer)
    assert python is not None
    module = f"benchmarks.loaders.peers.{peer}_loader"
    code = f"import {module} as peer, sys; from pathlib import Path\n"
    code += f"if __name__ == '__main__': peer.{function}(*map(Path, sys.argv[1:]))"
    words = [str(python), "-c", code, str(source), str(out)]
    subprocess.run(words, check=True, capture_output=True)


VARIANTS: dict[str, Callable[[Path, Path], None]] = {
    "folder-seek": _with_seek("photographs"),
    "webdataset": _pack("photographs", "--format", "webdataset"),
    "webdataset-seek": _with_seek("webdataset"),
    "hdf5": _pack("photographs", "--format", "hdf5"),
    "hdf5-seek": _with_seek("hdf5"),
    "packed": _pack("photographs", "--format", "packed"),
    "small": _small_folder,
    "small-webdataset": _pack("small", "--format", "webdataset"),
    "small-webdataset-seek": _with_seek("small-webdataset"),
    "small-packed": _pack("small", "--format", "packed"),
    "small-pixels": _pack("small", "--format", "packed", "--pixels"),
    "full.beton": _by_peer("ffcv", "write", "photographs"),
    "full-raw.beton": _by_peer("ffcv", "write_raw", "photographs"),
    "small.beton": _by_peer("ffcv", "write", "small"),
    "small-raw.beton": _by_peer("ffcv", "write_raw", "small"),
    "litdata": _by_peer("litdata", "write", "photographs"),
    "mds": _by_peer("streaming", "write", "photographs"),
}
_NEEDS = {  # another variant first
    name: [source]
    for name, source in (
        ("webdataset-seek", "webdataset"),
        ("hdf5-seek", "hdf5"),
        ("small-webdataset", "small"),
        ("small-webdataset-seek", "small-webdataset"),
        ("small-packed", "small"),
        ("small-pixels", "small"),
        ("small.beton", "small"),
        ("small-raw.beton", "small"),
    )
}


def make_variant(folder: Path, name: str) -> Path:
    """Its place; complete or absent."""
    out = data_of(folder) / name
    if name == "photographs" or out.exists():
        return out
    for needed in _NEEDS.get(name, []):
        make_variant(folder, needed)
    unfinished = out.with_name(f"unfinished-{name}")
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    VARIANTS[name](folder, unfinished)
    unfinished.rename(out)
    return out


def size_of(place: Path) -> int:
    """Bytes of a variant, indices aside."""
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def read_all(place: Path) -> None:
    """So that it lies in memory."""
    for path in [place] if place.is_file() else place.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(1 << 24):
                    pass
