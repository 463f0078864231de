"""Our decoder without a loader: what the whole loader is measured against.

One thread; encoded images and boxes are in memory, and all batches come to lie in one place.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.loaders.measure import BATCH, SIDE, Epoch, Job
from benchmarks.loaders.peers.trainyard_loader import CROP, index_of
from trainyard.data._native import own_decoder
from trainyard.data.decode.decode import native_pixels, native_sizes
from trainyard.data.decode.seek_tables import SeekTable, open_seek
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import Ids, ShuffledPlan
from trainyard.data.storage.encoded import in_memory

_Decode = Callable[[NDArray[np.uint8]], None]


def make(job: Job) -> Epoch:
    index = index_of(job.data)
    plan = ShuffledPlan(len(index), global_batch=BATCH, seed=0)
    reader, seek = Reader(index), open_seek(index)
    batches = [
        _prepared(index, reader, seek, plan.batch(step)) for step in range(len(index) // BATCH)
    ]
    out = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)

    def epoch() -> Iterator[tuple[Any, Any]]:
        for decode, labels in batches:
            decode(out)
            yield torch.from_numpy(out), labels

    return epoch


def _prepared(
    index: Index, reader: Reader, seek: SeekTable | None, ids: Ids
) -> tuple[_Decode, torch.Tensor]:
    decoder = own_decoder()
    assert decoder is not None
    images = in_memory([reader.read(sample) for sample in ids.tolist()])
    sizes, _ = native_sizes(images, decoder)
    crops = CROP.draw(ids, np.zeros_like(ids))(sizes)
    tables = seek and seek.of(ids)
    status = np.zeros(len(ids), np.uint8)

    def decode(out_BHWC: NDArray[np.uint8]) -> None:
        native_pixels(decoder, images, crops, out_BHWC, status=status, seek=tables)
        assert not status.any()

    return decode, torch.from_numpy(index.label[ids])
