"""The bytes of samples from many files at once, from many threads."""

import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from trainyard.data import read
from trainyard.data.index import Index
from trainyard.data.indexing import open_index
from trainyard.data.read import Reader


def shards(folder: Path, sizes: list[int]) -> tuple[Index, list[bytes]]:
    """Tars with `sizes` samples of random bytes each, and what each sample holds."""
    generator = np.random.default_rng(0)
    contents = []
    for number, size in enumerate(sizes):
        with tarfile.open(folder / f"shard-{number:04d}.tar", "w") as tar:
            for row in range(size):
                image = generator.bytes(int(generator.integers(1, 3000)))
                contents.append(image)
                for name, content in ((f"{row}.jpg", image), (f"{row}.cls", b"0")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return open_index(str(folder)), contents


def open_tars(folder: Path) -> list[str]:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.islink(link)]
    return [t for t in targets if t.startswith(str(folder)) and t.endswith(".tar")]


def test_threads_that_read_more_files_than_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_MAX_OPEN", 2)
    index, contents = shards(tmp_path, [5] * 12)
    reader = Reader(index)

    def hammer(seed: int) -> bool:
        order = np.random.default_rng(seed).integers(len(contents), size=1000)
        return all(reader.read(sample) == contents[sample] for sample in order.tolist())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(hammer, range(8)))
    assert len(open_tars(tmp_path)) == 2


def test_many_shards_stay_within_the_limit(tmp_path: Path) -> None:
    index, contents = shards(tmp_path, [2] * (read._MAX_OPEN + 44))
    reader = Reader(index)
    assert [reader.read(sample) for sample in range(len(index))] == contents
    assert len(open_tars(tmp_path)) == read._MAX_OPEN
    del reader
    assert not open_tars(tmp_path)


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [3, 0, 0], [1, 5]], ids=str)
def test_shards_of_few_samples(tmp_path: Path, sizes: list[int]) -> None:
    index, contents = shards(tmp_path, sizes)
    reader = Reader(index)
    assert [reader.read(sample) for sample in range(len(index))] == contents


def test_a_shard_that_was_cut_short(tmp_path: Path) -> None:
    index, contents = shards(tmp_path, [4])
    os.truncate(tmp_path / "shard-0000.tar", int(index.offset[3]) + 1)
    reader = Reader(index)
    assert reader.read(2) == contents[2]
    with pytest.raises(OSError, match="has changed since it was indexed"):
        reader.read(3)
