"""The decoder on damaged JPEGs, through Python: no crash, and every way gives the same."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fuzz.seeds import damaged, jpegs
from tests.trials.counts import SEED, count_of
from trainyard.data._native import core
from trainyard.data.storage.encoded import in_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(core is None, reason="the extension is not built"),
]


class Decoders:
    """One decoder for each path, which keeps what an image before has left in it."""

    def __init__(self) -> None:
        self.all = [core.Decoder(path) for path in core.paths]
        self.num_calls = 0
        self._sizes, self._one = np.ones((1, 2), np.int64), np.zeros(1, np.int64)

    def size(self, content: bytes) -> tuple[int, int] | None:
        """Width and height, if the decoder is for it."""
        status = np.zeros(1, np.uint8)
        length = np.array([len(content)])
        self.all[0].sizes([content], self._one, self._one, length, self._sizes, status)
        width, height = self._sizes[0].tolist()
        return None if status[0] else (width, height)

    def crop(
        self, content: bytes, box: list[float], side: int, table: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8] | None:
        """The pixels that every path gives; None if all of them refuse."""
        found = [self._by(decoder, content, box, side, table) for decoder in self.all]
        first = found[0]
        assert all(str(status) == str(first[0]) for status, _ in found)
        assert first[0] or all(np.array_equal(pixels, first[1]) for _, pixels in found)
        return None if first[0] else first[1]

    def _by(
        self,
        decoder: "core.Decoder",
        content: bytes,
        box: list[float],
        side: int,
        table: NDArray[np.uint8] | None,
    ) -> tuple[int, NDArray[np.uint8]]:
        self.num_calls += 1
        out, status = np.zeros((1, side, side, 3), np.uint8), np.zeros(1, np.uint8)
        decoder.decode(
            *([content], self._one, self._one, np.array([len(content)])),
            *(np.array([box]), np.zeros(1, np.bool_), out, status),
            height=side,
            width=side,
            seek=None if table is None else in_memory([table.tobytes()]),
        )
        return int(status[0]), out[0]


@pytest.mark.timeout(0)
def test_damaged_jpegs() -> None:
    """With its seek table, and packed, an image has the same pixels."""
    decoders, rng, came_of_it = Decoders(), np.random.default_rng(SEED), Counter[str]()
    for number, content in enumerate(damaged([*jpegs()], rng)):
        if decoders.num_calls >= count_of("FUZZ", 2000):
            break
        size = decoders.size(content)
        if size is None or size[0] * size[1] > 1 << 20:
            came_of_it["refused by its header"] += 1
            decoders.num_calls += 1
            continue
        x, y = (np.sort(rng.uniform(0, side, 2)) for side in size)
        box = [x[0], y[0], max(x[1], x[0] + 0.1), max(y[1], y[0] + 0.1)]
        box = [*box[:2], *np.minimum(box[2:], size).tolist()] if number % 2 else [0.0, 0.0, *size]
        pixels = decoders.crop(content, box, 1 + number % 40)
        came_of_it["refused" if pixels is None else "decoded"] += 1
        record, table = decoders.all[0].pack(content), decoders.all[0].seek_table(content)
        assert record is None or decoders.all[0].unpack(record) == content, number
        came_of_it["packed" if record is not None else "stored as its file"] += 1
        if pixels is None:
            continue
        for stored, entries in ((record, None), (content, table)):
            if stored is None or (stored is content and entries is None):
                continue
            made = None if entries is None else np.frombuffer(entries, np.uint8)
            found = decoders.crop(stored, box, 1 + number % 40, made)
            assert found is not None and np.array_equal(found, pixels), number
    print(f"\n{decoders.num_calls} calls: {dict(came_of_it)}")
