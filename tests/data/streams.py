"""Shards of WebDataset for streams."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.tars import write_tar
from tests.images import encode


def png(number: int, side: int = 16) -> bytes:
    """Noise, another one for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
    return encode(Image.fromarray(pixels), "PNG", compress_level=1)


def write_shards(folder: Path, sizes: Sequence[int], *, classes: int = 10) -> str:
    """Shards of so many samples each, as a brace list; the key of each is SHARD-POSITION."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        members = []
        for position in range(size):
            key = f"{shard}-{position:05d}"
            label = str((shard + position) % classes).encode()
            members += [(f"{key}.png", png(shard << 16 | position)), (f"{key}.cls", label)]
        write_tar(folder / f"part-{shard:03d}.tar", members)
    return f"{folder}/part-{{000..{len(sizes) - 1:03d}}}.tar"


def ids_of(sizes: Sequence[int]) -> list[int]:
    """The ids of all samples of such shards, sorted."""
    return [shard << 32 | place for shard, size in enumerate(sizes) for place in range(size)]
