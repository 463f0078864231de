"""The yardstick, compiled and called: libjpeg-turbo's own crop decode, and a resize in C."""

import ctypes
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.loaders.pool import SIDE, Pool

_SOURCE = Path(__file__).parent / "yardstick.c"
_CMAKE = ("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_POSITION_INDEPENDENT_CODE=1")


def build_turbo(source: Path, folder: Path) -> None:
    """Compile a checkout of libjpeg-turbo, with cmake and nasm, into FOLDER/libjpeg-turbo."""
    made, prefix = folder / "libjpeg-turbo-made", folder / "libjpeg-turbo"
    subprocess.run(
        ["cmake", "-S", source, "-B", made, *_CMAKE, f"-DCMAKE_INSTALL_PREFIX={prefix}"], check=True
    )
    subprocess.run(["cmake", "--build", made, "--target", "install", "-j2"], check=True)


def build_yardstick(folder: Path) -> Path:
    """FOLDER/yardstick.so, with the libjpeg-turbo in FOLDER if there is one, else the system's."""
    library, turbo = folder / "yardstick.so", folder / "libjpeg-turbo"
    jpeg = ["-ljpeg"]
    for lib in ("lib", "lib64"):
        if (turbo / lib / "libjpeg.a").exists():
            jpeg = [f"-I{turbo}/include", str(turbo / lib / "libjpeg.a")]
    flags = ["-O3", "-std=c11", "-mavx2", "-shared", "-fPIC", "-Wall", "-Wextra"]
    words = ["cc", *flags, str(_SOURCE), *jpeg, "-lm", "-o", str(library)]
    subprocess.run(words, check=True)
    return library


class Slice(NamedTuple):
    """Images as C takes them."""

    addresses: NDArray[np.uintp]
    sizes: NDArray[np.int64]
    boxes: NDArray[np.int32]
    flips: NDArray[np.uint8]


def address(content: bytes) -> int:
    """Where it lies in memory, as long as somebody holds it."""
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0


def slice_of(pool: Pool, numbers: range) -> Slice:
    addresses = [address(pool.encoded[n]) for n in numbers]
    chosen = list(numbers)
    return Slice(
        np.array(addresses, np.uintp),
        np.array([len(pool.encoded[n]) for n in chosen], np.int64),
        np.ascontiguousarray(pool.boxes[chosen]),
        pool.flips[chosen].astype(np.uint8),
    )


class Yardstick:
    """One thread's decoder."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.yardstick_new.restype = ctypes.c_void_p
        self._state = ctypes.c_void_p(self._library.yardstick_new())

    @property
    def version(self) -> str:
        """Of libjpeg-turbo."""
        number = self._library.yardstick_version()
        return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"

    def decode(self, images: Slice, out: NDArray[np.uint8]) -> None:
        """Into uint8[n, side, side, 3], without the interpreter lock."""
        pointers = [ctypes.c_void_p(column.ctypes.data) for column in images]
        bad = self._library.yardstick_decode(
            self._state, *pointers, len(images.sizes), SIDE, ctypes.c_void_p(out.ctypes.data)
        )
        if bad:
            raise ValueError(f"{bad} images could not be decoded")
