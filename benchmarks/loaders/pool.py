"""The photographs in memory, with one random-resized crop each: what decoders alone are given."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.data.decode.crops import RandomResizedCrop

BATCH = 64
SIDE = 224
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Pool:
    """Some images, all contenders' the same."""

    encoded: list[bytes]
    sizes: NDArray[np.int64]  # [n, 2] width, height
    boxes: NDArray[np.int32]  # [n, 4] left, top, right, bottom
    flips: NDArray[np.bool_]  # [n]

    def __len__(self) -> int:
        return len(self.encoded)

    def box(self, number: int) -> tuple[int, int, int, int]:
        left, top, right, bottom = self.boxes[number].tolist()
        return left, top, right, bottom

    def batches(self) -> list[range]:
        """Numbers of images, 64 at a time; what is over at the end is left out."""
        return [range(i, i + BATCH) for i in range(0, len(self) - BATCH + 1, BATCH)]


def load_pool(paths: Sequence[Path]) -> Pool:
    encoded = [path.read_bytes() for path in paths]
    sizes = np.array([Image.open(io.BytesIO(each)).size for each in encoded], np.int64)
    ids = np.arange(len(paths))
    crop = RandomResizedCrop(seed=0, scale=SCALE, ratio=RATIO, flip=0.5)
    crops = crop.draw(ids, np.zeros_like(ids))(sizes)
    return Pool(encoded, sizes, crops.boxes.astype(np.int32), crops.flips)
