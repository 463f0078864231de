"""Loading speed of images, and their size on disk."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Storage(NamedTuple):
    """A storage format of images."""

    images: float  # per second and core: read, decoded and cropped
    num_bytes: float  # per image


# Speed of whole loaders on one core, and bytes per image: ImageNet-like files of 110 kB, and the
# same shrunk to a short side of 256 pixels. benchmarks/results/2026-11-22-2-core-vm-loader.md
STORAGES = {
    "jpeg": Storage(2_140, 112e3),  # folder, WebDataset, TFRecord, HDF5
    "jpeg-seek": Storage(2_490, 114e3),
    "packed": Storage(4_436, 230e3),
    "jpeg-256": Storage(5_110, 33e3),
    "jpeg-256-seek": Storage(5_305, 34e3),
    "packed-256": Storage(8_263, 65e3),
    "pixels-256": Storage(9_943, 257e3),
}


@dataclass(frozen=True)
class Supply:
    """Loading speed of a node."""

    storage: Storage
    cores: int
    bytes_per_second: float = math.inf
    """Bandwidth of its disks or network; unlimited if all data is in memory."""
    factor: float = 1.0
    """Factor on the decoding speed, to see the effect of an error."""

    @property
    def decoding(self) -> float:
        """Images per second."""
        return self.factor * self.cores * self.storage.images

    @property
    def reading(self) -> float:
        return self.bytes_per_second / self.storage.num_bytes

    @property
    def images(self) -> float:
        return min(self.decoding, self.reading)

    @property
    def bound(self) -> Literal["decoding", "storage"]:
        return "decoding" if self.decoding <= self.reading else "storage"
